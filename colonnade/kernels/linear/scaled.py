"""A Bᵀ of two float8 matrices with their scales, as an equation: the specification of :mod:`scaled_mm`.

    C = (a ⊙ s_a) (b ⊙ s_b)ᵀ

The arithmetic is float32's.
"""

import torch
from torch import Tensor


def product(a_MK: Tensor, b_NK: Tensor, a_scale: Tensor, b_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """c_MN in ``dtype``; a scale is one float32 number, or one a row (M × 1, N × 1)."""
    return ((a_MK.float() * a_scale) @ (b_NK.float() * b_scale).T).to(dtype)
