"""AdamW on master weights, fused with gradient clipping and the cast to the compute dtype, in plain torch.

    g ← f g                                f: clip factor over float16's loss scale
    m ← β₁ m + (1 − β₁) g                  v ← β₂ v + (1 − β₂) g²
    w ← a w − b m / (c √v + ε)             a = 1 − η λ    b = η / (1 − β₁ᵗ)    c = 1 / √(1 − β₂ᵗ)
    w' ← w in the compute dtype                                             (Loshchilov 2017, arXiv 1711.05101)

As separate passes this is 52 bytes of memory traffic per weight in bfloat16 (gradients to float32, their norm,
clipping, AdamW, the copy). In one pass it is 28: g, w, m, v are read once and w, m, v, w' written once; plus 2 for the
norm. All arithmetic is in the masters' dtype and every operation is rounded separately, so that a kernel can be
compared bit for bit.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class ParameterState(NamedTuple):
    """A weight with its gradient and optimizer state, all of one shape.

    All tensors but the gradient have the master's strides, without gaps.
    """

    gradient: Tensor
    master: Tensor
    first: Tensor
    """m."""
    second: Tensor
    """v."""
    copy: Tensor | None = None
    """w', if the model computes in another dtype."""


def step_sizes(
    steps_P: Tensor, decay_P: Tensor, dtype: torch.dtype, *, lr: float | Tensor, beta1: float, beta2: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(a, b, c) of each weight in ``dtype``, from its step count (this step included) and weight decay.

    Computed in float64 and then rounded, because 1 − β₂ᵗ is a small difference.
    """
    t_P = steps_P.double()
    a_P, b_P, c_P = 1 - lr * decay_P.double(), lr / (1 - beta1**t_P), (1 - beta2**t_P).rsqrt()
    return a_P.to(dtype), b_P.to(dtype), c_P.to(dtype)


@torch.no_grad()
def adamw(
    weights: Sequence[ParameterState],
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
    """Updates ``weights`` in place with their gradients times ``factor`` (0-dim); does nothing where ``skip`` is 1.

    Gradients are not modified.
    """
    skipped = skip > 0
    for weight, a, b, c in zip(weights, a_P, b_P, c_P, strict=True):
        g = weight.gradient.to(weight.master.dtype) * factor
        m = weight.first * beta1 + g * (1 - beta1)
        v = weight.second * beta2 + g * g * (1 - beta2)
        w = weight.master * a - m * b / (v.sqrt() * c + eps)
        for old, new in ((weight.first, m), (weight.second, v), (weight.master, w)):
            old.copy_(torch.where(skipped, old, new))
        if weight.copy is not None:
            weight.copy.copy_(weight.master)
