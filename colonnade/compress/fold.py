"""Folding: moves a scale per input from the activations into the weights, which reduces rounding errors.

    y = W x = (W diag(s)) (x / s)            1/s is multiplied into the norm before, or into up's rows

    AWQ, arXiv 2306.00978           s = mean|x|^α                        the α of :data:`STEPS` with the least error
    SmoothQuant, arXiv 2211.10438   s = max|x|^α / max|w|^(1−α)          α = 0.5, for inputs rounded to int8

The function of the model does not change. The inputs of attention and of a dense feed-forward layer are folded into the
preceding norm, those of a gated layer's down projection into the rows of up.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from colonnade.compress.calibrate import InputStatistics, Moments
from colonnade.compress.gptq import damped, error, nearest
from colonnade.compress.grids import GridKind
from colonnade.kernels.linear.quantise import Kind, dequantise
from colonnade.model.attention import Attention
from colonnade.model.ffn import FeedForward
from colonnade.model.norm import Norm
from colonnade.model.tensor_parallel_linear import Linear
from colonnade.model.transformer import Block

STEPS = 20
"""Values of α between 0 and 1 that are tried."""


@dataclass(frozen=True)
class _FoldSite:
    names: tuple[str, ...]
    """The layers whose inputs are scaled."""
    linears: Sequence[Linear]
    before: Norm | Linear


def fold(block: Block, statistics: InputStatistics, kind: Kind, group: int, grid: GridKind) -> None:
    """Fold scales into the float weights of ``block`` and change ``statistics`` accordingly."""
    for place in _fold_sites(block):
        moments = statistics.linears[place.names[0]]
        weights = [linear.weight.detach().float() for linear in place.linears]
        if kind == "int8_dynamic":
            scale_D = smooth_scale(weights, moments)
        else:
            scale_D = awq_scale(weights, moments, kind, group, grid)
        if scale_D is None:
            continue
        apply(place.linears, place.before, scale_D)
        for name in place.names:
            statistics.linears[name] = statistics.linears[name].scaled(scale_D)


def awq_scale(weights: Sequence[Tensor], moments: Moments, kind: Kind, group: int, grid: GridKind) -> Tensor | None:
    """s_D with the least tr(Δ H Δᵀ) of rounding to nearest; None if no scaling is best."""
    h_DD, mean_D = damped(moments.hessian), moments.mean_abs.float().clamp(min=1e-8)
    best, least = None, sum(_rounding_error(w, None, h_DD, kind, group, grid) for w in weights)
    for step in range(1, STEPS):
        s_D = normalised(mean_D ** (step / STEPS))
        now = sum(_rounding_error(w, s_D, h_DD, kind, group, grid) for w in weights)
        if now < least:
            best, least = s_D, now
    return best


def smooth_scale(weights: Sequence[Tensor], moments: Moments, alpha: float = 0.5) -> Tensor:
    """SmoothQuant's s_D."""
    highest_D = torch.stack([w.abs().amax(0) for w in weights]).amax(0).float().clamp(min=1e-5)
    return normalised(moments.max_D.float().clamp(min=1e-5) ** alpha / highest_D ** (1 - alpha))


def normalised(s_D: Tensor) -> Tensor:
    """``s_D`` with √(max · min) = 1, within 1e-4 … 1e4."""
    return (s_D / (s_D.max() * s_D.min()).sqrt()).clamp(1e-4, 1e4)


@torch.no_grad()
def apply(linears: Sequence[Linear], before: Norm | Linear, scale_D: Tensor) -> None:
    """Multiply the columns of ``linears`` by s and divide the layer that computes their inputs by it."""
    for linear in linears:
        linear.weight.mul_(scale_D)
    if isinstance(before, Norm):
        before.weight.div_(scale_D)
    else:
        before.weight.div_(scale_D[:, None])
    if before.bias is not None:
        before.bias.div_(scale_D)


def _rounding_error(w_FD: Tensor, s_D: Tensor | None, h_DD: Tensor, kind: Kind, group: int, grid: GridKind) -> float:
    scaled_FD = w_FD if s_D is None else w_FD * s_D
    rounded_FD = dequantise(nearest(scaled_FD, kind, group, grid), torch.float32)
    return error((rounded_FD if s_D is None else rounded_FD / s_D) - w_FD, h_DD)


def _fold_sites(block: Block) -> list[_FoldSite]:
    places: list[_FoldSite] = []
    if block.post:  # a norm's output is the residual stream there
        return places
    if isinstance(block.attention, Attention):
        places.append(_FoldSite(("attention.qkv",), [block.attention.qkv], block.norm1))
    if isinstance(block.ffn, FeedForward):
        up, gate = block.ffn.up, block.ffn.gate
        inner = [up] if gate is None else [up, gate]
        names = ("ffn.up",) if gate is None else ("ffn.up", "ffn.gate")
        places.append(_FoldSite(names, inner, block.norm2))
        if gate is not None:
            places.append(_FoldSite(("ffn.down",), [block.ffn.down], up))
    return places
