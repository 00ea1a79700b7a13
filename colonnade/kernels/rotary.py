"""Rotary position embeddings (see :mod:`colonnade.model.rotary`), in plain torch.

(x₁, x₂) → (x₁ cos pθ − x₂ sin pθ,  x₂ cos pθ + x₁ sin pθ)        pairs are (i, i + H/2)
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Rotation(NamedTuple):
    """Factors of each element of a head and of its partner, (T, 1, H) each."""

    own: Tensor
    """(cos, cos)"""
    other: Tensor
    """(−sin, sin)"""


def rotation(positions_T: Tensor, theta: Tensor, factor: float, dtype: torch.dtype) -> Rotation:
    """The rotary factors of each token, for θ (H/2,) radians per token; ``factor`` scales cos and sin."""
    angle = positions_T.to(theta.dtype)[:, None, None] * theta
    cos, sin = (angle.cos() * factor).to(dtype), (angle.sin() * factor).to(dtype)
    return Rotation(torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1))


def rotate(x_TNH: Tensor, by: Rotation) -> Tensor:
    """Applies the rotation to each head of ``x_TNH``; an element's partner is half a head away."""
    return torch.addcmul(x_TNH * by.own, x_TNH.roll(x_TNH.shape[-1] // 2, -1), by.other)
