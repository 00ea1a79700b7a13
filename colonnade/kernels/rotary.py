"""Rotary positions (:mod:`colonnade.model.rotary`): what each number of a head is multiplied by, and what its partner.

(x₁, x₂) → (x₁ cos pθ − x₂ sin pθ,  x₂ cos pθ + x₁ sin pθ)        pairs are (i, i + H/2)
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Rotation(NamedTuple):
    """What each number of a head is multiplied by, and what its partner, (T, 1, H) each."""

    own: Tensor
    """(cos, cos)"""
    other: Tensor
    """(−sin, sin)"""


def rotation(positions_T: Tensor, theta: Tensor, factor: float, dtype: torch.dtype) -> Rotation:
    """The rotation of each token, for θ (H/2,) radians a token; cos and sin are multiplied by ``factor``."""
    angle = positions_T.to(theta.dtype)[:, None, None] * theta
    cos, sin = (angle.cos() * factor).to(dtype), (angle.sin() * factor).to(dtype)
    return Rotation(torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1))


def rotate(x_TNH: Tensor, by: Rotation) -> Tensor:
    """Turn each head of ``x_TNH``: half a head further lies each number's partner."""
    return torch.addcmul(x_TNH * by.own, x_TNH.roll(x_TNH.shape[-1] // 2, -1), by.other)
