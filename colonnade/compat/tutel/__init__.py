"""Tutel's interface: a program written for Tutel runs after its import is changed.

    from tutel import moe, net, system            →           from colonnade.compat.tutel import moe, net, system

``moe.moe_layer`` has Tutel's arguments, attributes, parameter names and shapes on each rank, so that state dicts load
in both directions, and draws the same initial values from the same seeds. Nothing is compiled. The differences are:

*Fixed here.*

- Batch-prioritised routing orders the tokens before it counts them, so that a capacity factor of 0 drops nothing; Tutel
  counts in the wrong order and drops tokens for every factor of 0 or less.
- ``llama_ffn`` (SwiGLU) experts give the same result at every degree; Tutel's multiply it by r for r > 1.
- Ranks may hold unequal numbers of tokens, with or without ``inequivalent_tokens``: they agree on the capacity in every
  call, the largest rank's, at the cost of one small message. Without the argument Tutel hangs or fails. The same
  message detects ranks that differ in settings that must be equal (widths, degrees, capacity factors), and raises an
  error on each of them.
- ``capacity_factor=0`` as an argument of the call means 0; Tutel takes the gate's own factor instead.
- ``parallel_type='auto'`` takes the degree that moves the fewest elements at the current capacity (built-in experts;
  degree 1 with others). Tutel has the rule but never enables it, and uses degree 1.
- ``num_experts_per_device=0.5`` is an expert on 2 devices; Tutel makes it one on 1. - With ``is_gshard_loss=False`` one
expert has a loss of 0, not NaN. - Every degree also works inside a ``group``. -
``checkpoint.gather`` and ``checkpoint.scatter`` read files with ``weights_only=True``, support all sizes that the layer
supports except ``llama_ffn`` experts whose D·F cannot be divided over their ranks, and join ``llama_ffn`` experts with
several per rank. - A state dict without an expert's parameter is an error, unless ``strict=False``; Tutel fills in
zeros. - The dictionaries ``gate_type`` and ``experts`` are not changed, so two layers can be created from one. Unknown
options and
  impossible degrees immediately raise errors of :mod:`colonnade.errors`. ``model_dim`` may be odd.

*Added.*

- ``load_loss_input="logits"`` of ``moe_layer``: with ``is_gshard_loss=False`` the load loss compares each expert's
  logit with the token's last noisy logit that is kept (Riquelme 2021, arXiv 2106.05974, appendix A). Tutel compares
  the expert's probability with that logit, and so does this layer by default, because programs were tuned with it.

*Omitted.*

- Environment variables (SKIP_MOE, SKIP_EXPERT, SKIP_A2A, CAP_FACTOR, BATCH_PRIO, LOCAL_SIZE, …) are not read: pass the
  arguments; NUMA_TYPE is the argument of ``system.init_affinity_at_program_beginning``. Processes are started by
  torchrun, not by mpiexec.
- ``use_2dh`` goes by the number of processes that torchrun started on this machine, and takes one step inside a group
  of one's own. ``megablocks_size`` is accepted, and rounds the capacity as Tutel does in inference on one process; it
  chooses no other kernel. Gradients of ``net.allreduce_forward`` and ``net.allreduce_backward`` are those of a sum.
- ``tutel.jit``, ``tutel.parted``, ``tutel.custom`` and the launcher have no counterpart here.

As in Tutel, experts compute on all C slots, empty ones too, because a custom expert sees (experts, rows, D). The
library's own layer (``colonnade.config.MoeConfig``) has no such padding: docs/howto/tutel.md says how to migrate.
"""
