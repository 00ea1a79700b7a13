"""One global gradient norm that knows which rank holds what, and the clip by it.

    ‖g‖² = Σ over parameters, Σ over their *owners*, ‖local gradient‖²         g ← g · min(1, clip / (‖g‖ + 10⁻⁶))

A rank owns what nobody else counts: its own shard over the data axis, in one replica; over tp its own part of a cut
parameter, and of a replicated one only rank 0's copy; of tied weights the first pipeline rank's; of experts one copy.
(Pascanu 2013, arXiv 1211.5063, section 3.2; frameworks that clip each shard by itself, or count a replicated parameter
tp times, train another model at another layout.)

Everything stays on the device: a bucket sum over tp for PARTIAL parameters, one number summed over the world, and the
multiplication. Nothing waits for the result.
"""

from collections.abc import Container, Mapping

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_

from colonnade.parallel.axis import Axes, Axis, ExpertAxes
from colonnade.parallel.layout import PARTIAL, Experts, Placement


def sum_partial(weights: Mapping[str, Tensor], layout: Mapping[str, Placement], tp: Axis) -> None:
    """Complete the gradients of parameters used on a share of the heads or tokens: one flattened sum over tp."""
    grads = [w.grad for name, w in weights.items() if layout[name] is PARTIAL and w.grad is not None]
    if tp.size == 1 or not grads:
        return
    whole = tp.sum_(torch.cat([grad.flatten() for grad in grads]))
    parts = whole.split([grad.numel() for grad in grads])
    for grad, part in zip(grads, parts, strict=True):
        grad.copy_(part.view_as(grad))


def sum_experts(weights: Mapping[str, Tensor], layout: Mapping[str, Placement], grid: ExpertAxes) -> None:
    """Complete the gradients of experts: over the ranks that hold copies of them, and those of an output's bias, which
    each rank of an expert has whole, over its sh ranks too.
    """
    for axis, wanted in ((grid.copies, (1, None)), (grid.sh, (None,))):
        held = [w for name, w in weights.items() if isinstance(at := layout[name], Experts) and at.hidden in wanted]
        if axis.size == 1 or not held:
            continue
        # No token may have come to this rank's experts, whose peers sum all the same.
        grads = [torch.zeros_like(w) if w.grad is None else w.grad for w in held]
        whole = axis.sum_(torch.cat([grad.flatten() for grad in grads]))
        for w, part in zip(held, whole.split([w.numel() for w in held]), strict=True):
            w.grad = part.view_as(w)


def sum_tied(weights: Mapping[str, Tensor], tied: bool, ends: Axis) -> None:
    """Complete the gradient of a weight that both ends of a pipeline have: as embedding and as output projection."""
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
    """The norm of the whole model's gradient, the same 0-dim tensor on every rank of ``world``; ``copies`` are
    parameters that another pipeline rank counts.

    It is not finite either where any rank's ``loss_sum`` is not: a logit that overflowed to -inf makes an infinite
    loss of finite gradients, and whoever skips bad steps must not need a second sum over the world to learn of it.
    """
    owned = [
        w.grad for name, w in weights.items() if w.grad is not None and name not in copies and _owns(layout[name], axes)
    ]
    some = next(iter(weights.values()), loss_sum)
    assert some is not None, "a rank that trains nothing needs the loss to know the type"
    exact = torch.promote_types(some.dtype, torch.float32)
    # A rank that owns nothing still takes part in the sum. torch's get_total_norm would round the norm of each 16-bit
    # gradient to 16 bits.
    norms = torch._foreach_norm(owned, 2, dtype=exact) if owned else [some.new_zeros((), dtype=exact)]
    norm = torch.linalg.vector_norm(torch.stack(tuple(norms)))
    square = norm.square() if loss_sum is None else norm.square() + (0 * loss_sum).to(norm.dtype)
    return world.sum_(square).sqrt()


def _owns(placement: Placement, axes: Axes) -> bool:
    """Whether this rank is the one that counts its part of a parameter."""
    if isinstance(placement, Experts):
        return axes.experts.copies.rank == 0 and (placement.hidden is not None or axes.experts.sh.rank == 0)
    return axes.replicate.rank == 0 and (isinstance(placement, int) or axes.tp.rank == 0)


def clip_factor(norm: Tensor, limit: float) -> Tensor:
    """What :func:`clip_` multiplies by."""
    return (limit / (norm + 1e-6)).clamp(max=1.0)


def clip_(weights: Mapping[str, Tensor], norm: Tensor, limit: float) -> None:
    """Scale every gradient so that the global norm is at most ``limit``."""
    clip_grads_with_norm_(weights.values(), limit, norm)
