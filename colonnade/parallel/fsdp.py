"""Master weights: what the optimizer moves, and how gradients reach them over the data axis.

The model computes with its own parameters (perhaps bfloat16, perhaps gathered for a moment); the optimizer moves
float32 *masters*, one plain local tensor a parameter. Two ways to hold them, behind one small face:

    Sharded   data ranks > 1: FSDP2 keeps 1/dp of each parameter in float32, gathers a block before it runs in the
              compute type, and reduce-scatters its gradients in float32 (ZeRO-3, arXiv 1910.02054, section 5).
    Whole     one data rank: nothing to shard. The masters are the parameters themselves, or, for a lower compute
              type, float32 copies, into which each gradient is added as soon as autograd has it.

FSDP over one rank gives the same numbers but copies each weight into and out of its communication buffers: measured
2 to 18% of a step (docs/decisions/0002-masters.md). Gradients are *sums*: the loss is already divided by the global
count of tokens, so FSDP must not divide by the number of ranks (layout rule 7).
"""

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from colonnade.parallel.distributed_context import DistributedContext
from colonnade.parallel.layout import Experts, layout_of
from colonnade.parallel.pipeline import Stage


class Masters(Protocol):
    """The float32 weights of this rank, by parameter name, and the life of their gradients in one step."""

    local: dict[str, Tensor]
    """Plain tensors that alias what is stored."""
    frozen: dict[str, Tensor]
    """Likewise what is not trained."""
    copies: dict[str, Tensor]
    """What the model computes with, of masters that are copied into a lower type."""
    graded: dict[str, Tensor]
    """For each of :attr:`local` the tensor in whose ``.grad`` its gradient stands after :meth:`collect`: itself, or its
    copy."""

    def accumulate(self, *, last: bool) -> None:
        """Before the backward pass of a micro-batch: ``last`` sends the summed gradients on their way."""
        ...

    def collect(self) -> None:
        """After the last backward pass: each gradient, summed over the data axis, where :attr:`graded` says."""
        ...

    def publish(self) -> None:
        """After the masters moved (a step, a load): the model computes with the new values."""
        ...

    def place(self, name: str, held: Tensor, value: Tensor) -> None:
        """Take what this rank keeps of ``value``: of parameter ``name``, cut as it is before FSDP cuts it, or of the
        buffer ``held``. :meth:`publish` follows when all are there.
        """
        ...


def masters(
    model: nn.Module,
    ground: DistributedContext,
    compute: torch.dtype,
    roots: Sequence[nn.Module] | None = None,
    *,
    single: bool = False,
) -> Masters:
    """Prepare ``model``, whose weights are in the master type, to train in ``compute`` on this ground.

    It may be on the meta device where :attr:`DistributedContext.sharded`: then this rank's shards are all that is ever
    made, and wait to be filled (by :meth:`Masters.place`, or from a checkpoint).

    ``model.blocks`` are gathered one by one; everything else belongs to its root and stays gathered from its first
    use to the end of the backward pass. ``roots`` are the modules that are called: the stages of a pipeline, or
    ``model`` itself. ``single``: a step is one micro-batch, and whoever moves the masters takes its gradients in the
    compute type, as autograd makes them, where nothing has to be summed over data ranks.
    """
    roots = roots or [model]
    if ground.sharded:
        return Sharded(model, ground, compute, roots)
    held = Whole(model.named_parameters(), compute, single=single)
    held.follow(roots)
    return held


class Whole:
    """Masters of a model that one data rank holds alone."""

    def __init__(self, parameters: Iterable[tuple[str, nn.Parameter]], compute: torch.dtype, *, single: bool = False):
        self.local: dict[str, Tensor] = {}
        self.frozen: dict[str, Tensor] = {}
        self.copies: dict[str, Tensor] = {}
        self._single = single
        self._pairs: list[tuple[Tensor, Tensor]] = []
        for name, parameter in parameters:
            held = self.local if parameter.requires_grad else self.frozen
            if parameter.dtype == compute:
                held[name] = parameter
                continue
            master = held[name] = parameter.detach().clone().requires_grad_(parameter.requires_grad)
            parameter.data = parameter.data.to(compute)
            self._pairs.append((parameter, master))
            if not parameter.requires_grad:
                continue
            self.copies[name] = parameter
            if not single:
                # Adding each gradient up in float32 at once keeps the sum over micro-batches exact and frees the other.
                parameter.register_post_accumulate_grad_hook(lambda p, master=master: _move_gradient(p, master))
        self.graded = self.local | self.copies if single else self.local

    def accumulate(self, *, last: bool) -> None:
        """Nothing to hold back: autograd adds the micro-batches up."""
        assert last or not self._single, "gradients of several micro-batches are added up in float32"

    def follow(self, roots: Iterable[nn.Module]) -> None:
        """Take over each micro-batch's gradients from stages whose schedule would add them up in the compute type."""
        for root in roots:
            if isinstance(root, Stage):
                root.after_weights = self._take

    def _take(self) -> None:
        """What came without autograd's hooks."""
        for parameter, master in self._pairs:
            if parameter.grad is not None:
                _move_gradient(parameter, master)

    def collect(self) -> None:
        """All gradients are in the masters, laid out as these are."""
        if self._single:
            return
        self._take()
        for master in self.local.values():
            if master.grad is not None and master.grad.stride() != master.stride():
                # Autograd lays a gradient out as its weight, that schedule does not, and torch's fused AdamW reads
                # memory in order whatever the strides are: gathered experts' gradients are transposed views.
                master.grad = torch.empty_like(master).copy_(master.grad)

    @torch.no_grad()
    def publish(self) -> None:
        """Round the masters to the compute type."""
        for parameter, master in self._pairs:
            parameter.copy_(master)

    @torch.no_grad()
    def place(self, name: str, held: Tensor, value: Tensor) -> None:
        """Into the master, whole."""
        self.local.get(name, self.frozen.get(name, held)).copy_(value)


def _move_gradient(parameter: Tensor, master: Tensor) -> None:
    assert parameter.grad is not None
    if master.grad is None:
        master.grad = parameter.grad.to(master.dtype)
    else:
        master.grad.add_(parameter.grad)
    parameter.grad = None


class Sharded:
    """Masters that FSDP2 shards over the data axis. Experts are shared out over a grid of their own on the same ranks
    (layout rule 10), so that their masters are :class:`Whole` on each.
    """

    def __init__(self, model: nn.Module, ground: DistributedContext, compute: torch.dtype, roots: Sequence[nn.Module]):
        # A second of imports, for sharded runs alone.
        from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

        # A pipeline runs many micro-batches through a stage before it may let go of the weights (layout rule 8).
        mesh, reshard = ground.fsdp_mesh, ground.plan.reshard and ground.plan.pp == 1
        kept = next(model.parameters()).dtype
        policy = MixedPrecisionPolicy(
            param_dtype=None if compute == kept else compute,
            reduce_dtype=kept,
            cast_forward_inputs=False,  # rotary tables stay float32; everything else has the compute type already
        )
        layout = layout_of(model)
        apart = {p for name, p in model.named_parameters() if isinstance(layout[name], Experts)}
        for block in model.get_submodule("blocks").children():
            fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard, ignored_params=apart)
        self._roots: list[FSDPModule] = [
            fully_shard(root, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard and None, ignored_params=apart)
            for root in roots
        ]
        for module in (module for root in roots for module in root.modules()):
            if isinstance(module, FSDPModule):
                # Both are needed: FSDP would otherwise express a factor as a pre-multiplied sum, which gloo refuses
                # and NCCL answers with zeros in bfloat16 (docs/decisions/0004-parallel-rules-on-h200.md).
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        if next(model.parameters()).is_meta:
            for root in roots:
                root.to_empty(device=ground.device)
        experts = {name: p for name, p in model.named_parameters() if isinstance(layout[name], Experts)}
        self._experts, self._shard = Whole(experts.items(), compute), ground.shard
        self._experts.follow(roots)
        self._parameters = {name: p for name, p in model.named_parameters() if name not in experts}
        held = self._experts.local | self._experts.frozen
        # In the model's own order, which is the same under every plan.
        self.local: dict[str, Tensor] = {}
        self.frozen: dict[str, Tensor] = {}
        for name, p in model.named_parameters():
            mine = held[name] if name in experts else _shard(p).detach().requires_grad_(p.requires_grad)
            (self.local if p.requires_grad else self.frozen)[name] = mine
        self.copies, self.graded = self._experts.copies, self.local

    def accumulate(self, *, last: bool) -> None:
        """Reduce over the data axis once a step, not once a micro-batch."""
        for root in self._roots:
            root.set_requires_gradient_sync(last)
            root.set_is_last_backward(last)

    def collect(self) -> None:
        """Hand FSDP's gradient shards to the plain tensors that the optimizer knows."""
        self._experts.collect()
        for name, parameter in self._parameters.items():
            if parameter.grad is not None:
                self.local[name].grad = _shard(parameter.grad)
                parameter.grad = None

    def publish(self) -> None:
        """The masters alias FSDP's shards, which the next gather reads; only the experts' are copies."""
        self._experts.publish()

    @torch.no_grad()
    def place(self, name: str, held: Tensor, value: Tensor) -> None:
        """Into the master, the rows of this rank's shard."""
        if name not in self._parameters:
            self._experts.place(name, held, value)
            return
        start, stop = self._shard.part(value.shape[0])
        (self.local if name in self.local else self.frozen)[name].copy_(value[start:stop])


def _shard(x: Tensor) -> Tensor:
    from torch.distributed.tensor import DTensor

    detached = x.detach()
    assert isinstance(detached, DTensor)
    return detached.to_local()
