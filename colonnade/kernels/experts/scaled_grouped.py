"""Products over each expert's own rows, as equations: the specification of :mod:`scaled_grouped_mm`, and of sums.

    product    c_r = (a_r s_r) · (b_e ⊙ s_e)ᵀ          r of expert e's rows; the arithmetic is float32's
    sums       d_e = Σ_r p_r ⊗ q_r

Rows past the last end belong to no expert: 0, and no part of any sum.
"""

import itertools

import torch
from torch import Tensor


def product(
    a_RK: Tensor, b_ENK: Tensor, a_scale: Tensor, b_scale: Tensor, ends_E: Tensor, dtype: torch.dtype
) -> Tensor:
    """c_RN in ``dtype`` of two float8 operands; scales are float32, (R, 1) and (E, N, 1)."""
    c_RN = a_scale.new_zeros(len(a_RK), b_ENK.shape[1])
    for e, (start, end) in enumerate(itertools.pairwise([0, *ends_E.tolist()])):
        a_cK = a_RK[start:end].float() * a_scale[start:end]
        c_RN[start:end] = a_cK @ (b_ENK[e].float() * b_scale[e]).T
    return c_RN.to(dtype)


def sums(p_RM: Tensor, q_RN: Tensor, ends_E: Tensor) -> Tensor:
    """d_EMN."""
    parts = itertools.pairwise([0, *ends_E.tolist()])
    return torch.stack([p_RM[start:end].T @ q_RN[start:end] for start, end in parts])
