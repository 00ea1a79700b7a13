"""The end of a training step: reduce gradients, take the global norm, clip, AdamW, publish the weights.

    ‖g‖² = Σ over parameters, Σ over their *owners*, ‖local gradient‖²         g ← g · min(1, clip / (‖g‖ + 10⁻⁶))

Each element of the gradient is counted by one owner: a data-parallel shard by the rank that stores it, in one replica;
a tensor-parallel shard by its tp rank, a replicated parameter by tp rank 0; a tied weight by the first pipeline stage;
an expert by one of its copies. (Pascanu 2013, arXiv 1211.5063, section 3.2. Clipping each shard separately, or counting
a replicated parameter tp times, would make training depend on the layout.)

A step with a non-finite loss or norm updates nothing: weights, moments and Adam's step count keep their values, and the
learning-rate schedule does not advance. Everything stays on the device, without a synchronisation: a bucketed sum over
tp for PARTIAL parameters, a scalar all-reduce over the world, and the multiplication.
"""

from collections.abc import Container, Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_

from colonnade.config import TrainConfig
from colonnade.model import Transformer
from colonnade.parallel.axis import Axes, Axis, ExpertAxes
from colonnade.parallel.fsdp import Masters
from colonnade.parallel.layout import PARTIAL, Experts, Placement, layout_of
from colonnade.train.loss_scaler import LossScaler
from colonnade.train.lr_schedule import learning_rate, learning_rate_tensor
from colonnade.train.optimizer import AdamW, FusedAdamW


class OptimizerStepResult(NamedTuple):
    """Gradient norm, learning rate and whether the update was skipped."""

    norm: Tensor
    """Global gradient norm before clipping; not finite where the update was skipped."""
    lr: float | Tensor
    """On the device where steps may be skipped."""
    skip: Tensor
    """float32: 1 if the update was skipped, otherwise 0."""


class OptimizerStep:
    """``optimizer_step(number, loss_sum)``, after the last backward pass of step ``number`` (from 0)."""

    def __init__(
        self,
        model: Transformer,
        masters: Masters,
        optimizer: AdamW,
        train: TrainConfig,
        world: Axis,
        scaler: LossScaler | None = None,
    ):
        """``scaler`` where the loss was multiplied by a loss scale (float16)."""
        self.model, self.masters, self.optimizer, self.train = model, masters, optimizer, train
        self.world, self.scaler, self.layout = world, scaler, layout_of(model)
        self._may_skip = scaler is not None or train.skip_bad_batches > 0

    def __call__(self, number: int, loss_sum: Tensor) -> OptimizerStepResult:
        """Update the weights; the update is skipped if any rank's ``loss_sum`` or the norm is not finite."""
        weights, model, axes = self.masters.gradient_holders, self.model, self.model.axes
        lr = self._learning_rate(number)
        self.masters.collect()
        sum_tied_grads(weights, model.config.tied, axes.embedding)
        sum_partial_grads(weights, self.layout, axes.tp)
        sum_expert_grads(weights, self.layout, axes.experts)
        grad_norm = gradient_norm(weights, self.layout, axes, self.world, model.copies, loss_sum)
        scale = None
        if self.scaler is not None:
            grad_norm = self.scaler.update(grad_norm)
            scale = self.scaler.used_scale
        skip = (~grad_norm.isfinite()).to(torch.float32)
        if isinstance(self.optimizer, FusedAdamW):
            self.optimizer.step(lr, skip, scale, clip_factor(grad_norm, self.train.clip))
        else:
            clip_grads_(weights, grad_norm, self.train.clip)
            self.optimizer.step(lr, skip, scale)
            self.masters.update_model()
        return OptimizerStepResult(grad_norm, lr, skip)

    def _learning_rate(self, number: int) -> float | Tensor:
        """The rate of the next update; where steps may be skipped, only the device has the number of updates."""
        if not self._may_skip:
            return learning_rate(number, self.train)
        lr = learning_rate_tensor(self.optimizer.updates, self.train)
        return lr.float() if lr.is_cuda else lr  # torch's fused kernel for GPUs reads a float32


def sum_partial_grads(weights: Mapping[str, Tensor], layout: Mapping[str, Placement], tp: Axis) -> None:
    """Sum PARTIAL parameters' gradients (used on a share of heads or tokens) over tp, in one bucket."""
    grads = [w.grad for name, w in weights.items() if layout[name] is PARTIAL and w.grad is not None]
    if tp.size == 1 or not grads:
        return
    summed = tp.sum_(torch.cat([grad.flatten() for grad in grads]))
    for grad, part in zip(grads, summed.split([grad.numel() for grad in grads]), strict=True):
        grad.copy_(part.view_as(grad))


def sum_expert_grads(weights: Mapping[str, Tensor], layout: Mapping[str, Placement], grid: ExpertAxes) -> None:
    """Sum the gradients of experts over the ranks with copies of them.

    An expert's output bias is whole on each of its etp ranks, so its gradient is summed over those too.
    """
    for axis, hidden_dims in ((grid.copies, (1, None)), (grid.etp, (None,))):
        shared = [
            w for name, w in weights.items() if isinstance(at := layout[name], Experts) and at.hidden in hidden_dims
        ]
        if axis.size == 1 or not shared:
            continue
        # If no token reached this rank's experts there is no gradient, but the other ranks still call the collective.
        grads = [torch.zeros_like(w) if w.grad is None else w.grad for w in shared]
        summed = axis.sum_(torch.cat([grad.flatten() for grad in grads]))
        for w, part in zip(shared, summed.split([w.numel() for w in shared]), strict=True):
            w.grad = part.view_as(w)


def sum_tied_grads(weights: Mapping[str, Tensor], tied: bool, ends: Axis) -> None:
    """Sum the gradient of a tied embedding over the first and last pipeline stage, which both use it."""
    if tied and ends.size > 1 and "embed.tokens.weight" in weights:  # it may be frozen
        w = weights["embed.tokens.weight"]
        w.grad = ends.sum_(torch.zeros_like(w) if w.grad is None else w.grad)


def gradient_norm(
    weights: Mapping[str, Tensor],
    layout: Mapping[str, Placement],
    axes: Axes,
    world: Axis,
    copies: Container[str] = (),
    loss_sum: Tensor | None = None,
) -> Tensor:
    """The norm of the whole model's gradient, the same 0-dim tensor on every rank of ``world``.

    ``copies`` are parameters that another pipeline rank counts. The norm is also not finite where any rank's
    ``loss_sum`` is not: a logit that overflowed to -inf gives an infinite loss with finite gradients, and this way
    skipping bad steps needs no second all-reduce.
    """
    owned = [
        w.grad for name, w in weights.items() if w.grad is not None and name not in copies and _owns(layout[name], axes)
    ]
    sample = next(iter(weights.values()), loss_sum)
    assert sample is not None, "a rank that trains nothing needs the loss to know the type"
    dtype = torch.promote_types(sample.dtype, torch.float32)
    # A rank that owns nothing still takes part in the sum. torch's get_total_norm would round the norm of each 16-bit
    # gradient to 16 bits.
    norms = torch._foreach_norm(owned, 2, dtype=dtype) if owned else [sample.new_zeros((), dtype=dtype)]
    local_norm = torch.linalg.vector_norm(torch.stack(tuple(norms)))
    square = local_norm.square()
    if loss_sum is not None:
        square = square + (0 * loss_sum).to(square.dtype)
    return world.sum_(square).sqrt()


def _owns(placement: Placement, axes: Axes) -> bool:
    """Whether this rank counts its part of a parameter."""
    if isinstance(placement, Experts):
        return axes.experts.copies.rank == 0 and (placement.hidden is not None or axes.experts.etp.rank == 0)
    return axes.replicate.rank == 0 and (isinstance(placement, int) or axes.tp.rank == 0)


def clip_factor(norm: Tensor, limit: float) -> Tensor:
    """The factor by which :func:`clip_grads_` multiplies."""
    return (limit / (norm + 1e-6)).clamp(max=1.0)


def clip_grads_(weights: Mapping[str, Tensor], norm: Tensor, limit: float) -> None:
    """Scale every gradient so that the global norm is at most ``limit``."""
    clip_grads_with_norm_(weights.values(), limit, norm)
