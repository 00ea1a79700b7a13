"""Master weights: what the optimizer updates, and how gradients reach them over the data axis.

The model computes with its own parameters (perhaps in bfloat16, perhaps gathered temporarily); the optimizer updates
float32 *masters*, one plain local tensor per parameter. There are two kinds with one interface:

    ShardedMasters     data ranks > 1: FSDP2 keeps 1/dp of each parameter in float32, gathers a block before it runs in
                       the compute dtype, and reduce-scatters its gradients in float32 (ZeRO-3, arXiv 1910.02054,
                       section 5).
    UnshardedMasters   one data rank: the masters are the parameters themselves or, for a lower compute dtype, float32
                       copies, to which each gradient is added as soon as autograd has it.

FSDP over one rank gives the same numbers but copies each weight into and out of its communication buffers: measured
2 to 18% of a step (docs/decisions/0002-masters.md). Gradients are *sums*: the loss is already divided by the global
token count, so FSDP must not divide by the number of ranks (layout rule 7).
"""

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from colonnade.parallel.distributed_context import DistributedContext
from colonnade.parallel.layout import Experts, layout_of
from colonnade.parallel.pipeline import Stage


class Masters(Protocol):
    """This rank's float32 weights by parameter name, and the handling of their gradients in one step."""

    local: dict[str, Tensor]
    """Trained weights: plain tensors that alias the storage."""
    frozen: dict[str, Tensor]
    """The same for weights that are not trained."""
    copies: dict[str, Tensor]
    """The model's lower-precision copies of masters."""
    gradient_holders: dict[str, Tensor]
    """For each of :attr:`local`, the tensor whose ``.grad`` holds its gradient after :meth:`collect`: itself or its
    copy."""

    def begin_micro_batch(self, *, last: bool) -> None:
        """Prepare for a micro-batch's backward pass; the ``last`` one starts the gradient reduction."""
        ...

    def collect(self) -> None:
        """After the last backward pass, put the reduced gradients into :attr:`gradient_holders`."""
        ...

    def update_model(self) -> None:
        """After the masters changed (a step, a load), make the model compute with the new values."""
        ...

    def assign(self, name: str, tensor: Tensor, value: Tensor) -> None:
        """Set parameter ``name`` to its part of ``value``, or the buffer ``tensor`` to ``value``.

        ``value`` is the tensor-parallel shard, before FSDP shards it. Call :meth:`update_model` after the last one.
        """
        ...


def masters(
    model: nn.Module,
    context: DistributedContext,
    compute: torch.dtype,
    roots: Sequence[nn.Module] | None = None,
    *,
    single: bool = False,
    keep_frozen: bool = True,
) -> Masters:
    """Prepare ``model``, whose weights have the master dtype, to train in the dtype ``compute``.

    Where :attr:`DistributedContext.sharded`, it may be on the meta device: only this rank's shards are then allocated,
    to be filled by :meth:`Masters.assign` or from a checkpoint.

    ``model.blocks`` and ``model.encoder_blocks`` are gathered one by one; all other parameters belong to their root
    and stay gathered from their first use to the end of the backward pass. ``roots`` are the modules that are called:
    the stages of a pipeline, or ``model`` itself. ``single``: a step has one micro-batch, and the optimizer takes
    gradients in the compute dtype, as autograd makes them, where they need no reduction over data ranks. Without
    ``keep_frozen`` weights that are not trained have no masters where FSDP does not shard them.
    """
    roots = roots or [model]
    if context.sharded:
        return ShardedMasters(model, context, compute, roots)
    unsharded = UnshardedMasters(model.named_parameters(), compute, single=single, keep_frozen=keep_frozen)
    unsharded.hook_stages(roots)
    return unsharded


class UnshardedMasters:
    """Masters of parameters that FSDP does not shard."""

    def __init__(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        compute: torch.dtype,
        *,
        single: bool = False,
        keep_frozen: bool = True,
    ):
        self.local: dict[str, Tensor] = {}
        self.frozen: dict[str, Tensor] = {}
        self.copies: dict[str, Tensor] = {}
        self._single = single
        self._pairs: list[tuple[Tensor, Tensor]] = []
        for name, parameter in parameters:
            weights = self.local if parameter.requires_grad else self.frozen
            if not parameter.requires_grad and not keep_frozen:
                parameter.data = parameter.data.to(compute)
            if parameter.dtype == compute:
                weights[name] = parameter
                continue
            master = weights[name] = parameter.detach().clone().requires_grad_(parameter.requires_grad)
            parameter.data = parameter.data.to(compute)
            self._pairs.append((parameter, master))
            if not parameter.requires_grad:
                continue
            self.copies[name] = parameter
            if not single:
                # Accumulating in float32 immediately keeps the sum over micro-batches exact and frees the other
                # gradient.
                parameter.register_post_accumulate_grad_hook(lambda p, master=master: _move_gradient(p, master))
        self.gradient_holders = self.local | self.copies if single else self.local

    def begin_micro_batch(self, *, last: bool) -> None:
        """Do nothing: autograd accumulates over micro-batches."""
        assert last or not self._single, "gradients of several micro-batches are added up in float32"

    def hook_stages(self, roots: Iterable[nn.Module]) -> None:
        """Accumulate in float32 also for pipeline stages whose schedule bypasses autograd's hooks."""
        for root in roots:
            if isinstance(root, Stage):
                root.after_weight_gradients = self._move_gradients

    def _move_gradients(self) -> None:
        for parameter, master in self._pairs:
            if parameter.grad is not None:
                _move_gradient(parameter, master)

    def collect(self) -> None:
        """Move all gradients to the masters, in the masters' memory layout."""
        if self._single:
            return
        self._move_gradients()
        for master in self.local.values():
            if master.grad is not None and master.grad.stride() != master.stride():
                # Autograd gives a gradient its weight's strides, zero-bubble schedules do not (gathered experts'
                # gradients are transposed views), and torch's fused AdamW ignores strides.
                master.grad = torch.empty_like(master).copy_(master.grad)

    @torch.no_grad()
    def update_model(self) -> None:
        """Round the masters to the compute dtype."""
        for parameter, master in self._pairs:
            parameter.copy_(master)

    @torch.no_grad()
    def assign(self, name: str, tensor: Tensor, value: Tensor) -> None:
        """Copy ``value`` into the master, or into the buffer ``tensor``."""
        self.local.get(name, self.frozen.get(name, tensor)).copy_(value)


def _move_gradient(parameter: Tensor, master: Tensor) -> None:
    assert parameter.grad is not None
    if master.grad is None:
        master.grad = parameter.grad.to(master.dtype)
    else:
        master.grad.add_(parameter.grad)
    parameter.grad = None


class ShardedMasters:
    """Masters that FSDP2 shards over the data axis.

    Experts are sharded over their own axes on the same ranks (layout rule 10), so their masters are
    :class:`UnshardedMasters` on each.
    """

    def __init__(self, model: nn.Module, context: DistributedContext, compute: torch.dtype, roots: Sequence[nn.Module]):
        # These imports take a second, which only sharded runs pay.
        from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

        # A pipeline runs many micro-batches through a stage before it may free the weights (layout rule 8).
        mesh, reshard = context.fsdp_mesh, context.plan.reshard and context.plan.pp == 1
        master_dtype = next(model.parameters()).dtype
        policy = MixedPrecisionPolicy(
            param_dtype=None if compute == master_dtype else compute,
            reduce_dtype=master_dtype,
            cast_forward_inputs=False,  # rotary tables stay float32; everything else has the compute dtype already
        )
        layout = layout_of(model)
        experts = {name: p for name, p in model.named_parameters() if isinstance(layout[name], Experts)}
        ignored = set(experts.values())
        stacks = [module for name, module in model.named_children() if name in ("encoder_blocks", "blocks")]
        for block in (block for stack in stacks for block in stack.children()):
            fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard, ignored_params=ignored)
        self._roots: list[FSDPModule] = [
            fully_shard(
                root, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard and None, ignored_params=ignored
            )
            for root in roots
        ]
        for module in (module for root in roots for module in root.modules()):
            if isinstance(module, FSDPModule):
                # Both are needed: FSDP would otherwise express a factor as a pre-multiplied sum, which gloo refuses
                # and for which NCCL returns zeros in bfloat16 (docs/decisions/0004-parallel-rules-on-h200.md).
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        if next(model.parameters()).is_meta:
            for root in roots:
                root.to_empty(device=context.device)
            experts = {name: model.get_parameter(name) for name in experts}
        self._experts, self._shard = UnshardedMasters(experts.items(), compute), context.shard
        self._experts.hook_stages(roots)
        self._parameters = {name: p for name, p in model.named_parameters() if name not in experts}
        expert_masters = self._experts.local | self._experts.frozen
        # In the model's own order, which is the same under every plan.
        self.local: dict[str, Tensor] = {}
        self.frozen: dict[str, Tensor] = {}
        for name, p in model.named_parameters():
            master = expert_masters[name] if name in experts else _local(p).detach().requires_grad_(p.requires_grad)
            (self.local if p.requires_grad else self.frozen)[name] = master
        self.copies, self.gradient_holders = self._experts.copies, self.local

    def begin_micro_batch(self, *, last: bool) -> None:
        """Reduce over the data axis once per step, not once per micro-batch."""
        for root in self._roots:
            root.set_requires_gradient_sync(last)
            root.set_is_last_backward(last)

    def collect(self) -> None:
        """Hand FSDP's gradient shards to the optimizer's plain tensors."""
        self._experts.collect()
        for name, parameter in self._parameters.items():
            if parameter.grad is not None:
                self.local[name].grad = _local(parameter.grad)
                parameter.grad = None

    def update_model(self) -> None:
        """Update the experts' copies; the other masters alias FSDP's shards, which the next gather reads."""
        self._experts.update_model()

    @torch.no_grad()
    def assign(self, name: str, tensor: Tensor, value: Tensor) -> None:
        """Copy this rank's shard of ``value`` into the master."""
        if name not in self._parameters:
            self._experts.assign(name, tensor, value)
            return
        start, stop = self._shard.part(value.shape[0])
        (self.local if name in self.local else self.frozen)[name].copy_(value[start:stop])


def unsharded(x: Tensor) -> Tensor:
    """``x``, gathered over the data ranks that FSDP shards it over, which call this together."""
    from torch.distributed.tensor import DTensor

    return x.full_tensor() if isinstance(x, DTensor) else x


def _local(x: Tensor) -> Tensor:
    from torch.distributed.tensor import DTensor

    detached = x.detach()
    assert isinstance(detached, DTensor)
    return detached.to_local()
