"""Gradient reduction over ranks, and clipping by the global norm, for your own models.

The modules' ``layout`` tables define how each parameter is sharded. A parameter in no table is replicated, and has on
each rank the whole gradient of that rank's tokens.
"""

from dataclasses import replace

import torch
from torch import Tensor, nn

from colonnade.parallel.axis import Axes
from colonnade.parallel.layout import WHOLE, Experts, Placement, placements
from colonnade.train.optimizer_step import clip_grads_, gradient_norm, sum_expert_grads, sum_partial_grads


def reduce_gradients(model: nn.Module, axes: Axes) -> None:
    """Sum each parameter's gradient over the ranks that share it; all ranks call this after their backward passes.

    The gradients of replicated and tensor-parallel parameters are summed over the data ranks, those of experts over the
    ranks that hold the same experts.
    """
    weights, layout = _weights(model)
    sum_partial_grads(weights, layout, axes.tp)
    sum_expert_grads(weights, layout, axes.experts)
    if axes.batch.size == 1:
        return
    shared = [w for name, w in weights.items() if not isinstance(layout[name], Experts)]
    for dtype in dict.fromkeys(w.dtype for w in shared):
        same = [w for w in shared if w.dtype == dtype]
        # A parameter may have a gradient on other ranks only, so all take part in the sum.
        grads = [torch.zeros_like(w) if w.grad is None else w.grad for w in same]
        whole = axes.batch.sum_(torch.cat([grad.flatten() for grad in grads]))
        for w, part in zip(same, whole.split([w.numel() for w in same]), strict=True):
            w.grad = part.view_as(w)


def clip_gradients(model: nn.Module, axes: Axes, limit: float) -> Tensor:
    """Scale all gradients to a global norm of at most ``limit``; returns the norm before, on every rank.

    Call :func:`reduce_gradients` first.
    """
    weights, layout = _weights(model)
    # Replicated parameters are counted once: on the first data rank.
    norm = gradient_norm(weights, layout, replace(axes, replicate=axes.batch), axes.experts.tokens)
    clip_grads_(weights, norm, limit)
    return norm


def _weights(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Placement]]:
    """The trained parameters, and the placement of each."""
    table = placements(model)
    weights: dict[str, Tensor] = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return weights, {name: table.get(name, WHOLE) for name in weights}
