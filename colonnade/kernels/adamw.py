"""AdamW on masters, with the clip before it and the rounding after it: the specification, in plain torch.

    g ← f g                                f: what clips, over float16's loss scale
    m ← β₁ m + (1 − β₁) g                  v ← β₂ v + (1 − β₂) g²
    w ← a w − b m / (c √v + ε)             a = 1 − η λ    b = η / (1 − β₁ᵗ)    c = 1 / √(1 − β₂ᵗ)
    w' ← w in the compute type                                              (Loshchilov 2017, arXiv 1711.05101)

Done one after another these are 52 bytes a weight of memory traffic in bfloat16 (gradients to float32, their norm, the
clip, AdamW, the copy); in one pass 28: g, w, m, v are read once, w, m, v, w' written once; and 2 for the norm. All
arithmetic is in the masters' type, each operation rounded by itself, so that a kernel can be held to the last bit.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Weight(NamedTuple):
    """One weight and all that moves with it; of equal shapes, and but for the gradient laid out alike, without gaps."""

    gradient: Tensor
    master: Tensor
    first: Tensor
    """m."""
    second: Tensor
    """v."""
    copy: Tensor | None = None
    """w', where the model computes in another type."""


def rates(
    steps_P: Tensor, decay_P: Tensor, dtype: torch.dtype, *, lr: float | Tensor, beta1: float, beta2: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(a, b, c) of each weight in ``dtype``, from its count of steps, this one included, and its decay; in float64
    before they are rounded, for 1 − β₂ᵗ is a small difference.
    """
    t_P = steps_P.double()
    a_P, b_P, c_P = 1 - lr * decay_P.double(), lr / (1 - beta1**t_P), (1 - beta2**t_P).rsqrt()
    return a_P.to(dtype), b_P.to(dtype), c_P.to(dtype)


@torch.no_grad()
def adamw(
    weights: Sequence[Weight],
    a_P: Tensor,
    b_P: Tensor,
    c_P: Tensor,
    factor: Tensor,
    skip: Tensor,
    *,
    beta1: float,
    beta2: float,
    eps: float,
) -> None:
    """Move ``weights`` in place by their gradients times ``factor`` (0-dim); nothing moves where ``skip`` is 1.

    Gradients are left as they are.
    """
    stays = skip > 0
    for weight, a, b, c in zip(weights, a_P, b_P, c_P, strict=True):
        g = weight.gradient.to(weight.master.dtype) * factor
        m = weight.first * beta1 + g * (1 - beta1)
        v = weight.second * beta2 + g * g * (1 - beta2)
        w = weight.master * a - m * b / (v.sqrt() * c + eps)
        for old, new in ((weight.first, m), (weight.second, v), (weight.master, w)):
            old.copy_(torch.where(stays, old, new))
        if weight.copy is not None:
            weight.copy.copy_(weight.master)
