"""Experts with torch's grouped GEMM, in 16 or 32 bits and in float8, and reference versions of its products.

    product    c_r = a_r b_eᵀ                          r over expert e's rows
    scaled     c_r = (a_r s_r) · (b_e ⊙ s_e)ᵀ          the arithmetic is float32's
    wgrad      d_e = Σ_r p_r ⊗ q_r

The grouped GEMM takes the rows' ends as they are: no padding, no synchronisation with the device. It needs contiguous
rows that start at multiples of 16 bytes, one dtype for both operands, and int32 ends. Widths that do not fit are padded
with zeros. Rows past the last end belong to no expert. torch leaves them uninitialised, and they may hold NaN; since
0 · NaN is NaN, they are set to 0 after each GEMM, in the forward and the backward pass, and count in no sum. Autograd
differentiates the GEMM with grouped GEMMs again. Biases are added row by row.

The float8 version, for Hopper, is torch's private ``_scaled_grouped_mm``, which only this file names. It needs e4m3 for
both operands, contiguous rows and weights that are contiguous along the summed dimension, sizes that are multiples
of 16, a float32 scale per row and per column of each expert, and int32 ends; it writes bfloat16. An expert may have any
number of rows, also none. ``use_fast_accum`` is on as for dense GEMMs with row-wise scales
(:mod:`colonnade.kernels.linear.scaled_mm`).
"""

import itertools

import torch
from torch import Tensor
from torch.nn import functional as F

from colonnade.kernels.dropout import HiddenDropout
from colonnade.kernels.experts.reference import ACTIVATIONS, Weights

_product = getattr(F, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)
"""Public since torch 2.12 or so; private before."""
available = _product is not None
scaled_available = hasattr(torch, "_scaled_grouped_mm")
SCALED_CAPABILITY = (9, 0)
"""The only compute capability for which torch has the float8 kernel."""


def product(x_RD: Tensor, w_EDF: Tensor, ends_E: Tensor) -> Tensor:
    """y_RF: each expert's rows times its weights; ``ends_E`` is int32, rows past the last end are undefined."""
    assert _product is not None
    return _product(x_RD, w_EDF, offs=ends_E)


def wgrad(p_RM: Tensor, q_RN: Tensor, ends_E: Tensor) -> Tensor:
    """d_EMN (see :func:`wgrad_reference`); both widths must be multiples of 16 bytes."""
    return product(p_RM.T, q_RN, ends_E)


def wgrad_reference(p_RM: Tensor, q_RN: Tensor, ends_E: Tensor) -> Tensor:
    """d_EMN: the sum of outer products over each expert's rows."""
    parts = itertools.pairwise([0, *ends_E.tolist()])
    return torch.stack([p_RM[start:end].T @ q_RN[start:end] for start, end in parts])


def scaled_product(
    a_RK: Tensor, b_ENK: Tensor, a_scale: Tensor, b_scale: Tensor, ends_E: Tensor, dtype: torch.dtype
) -> Tensor:
    """c_RN (see :func:`scaled_product_reference`)."""
    return torch._scaled_grouped_mm(
        a_RK.contiguous(),
        b_ENK.contiguous().transpose(1, 2),
        a_scale.flatten(),
        b_scale.flatten(1),
        offs=ends_E,
        out_dtype=dtype,
        use_fast_accum=True,
    )


def scaled_product_reference(
    a_RK: Tensor, b_ENK: Tensor, a_scale: Tensor, b_scale: Tensor, ends_E: Tensor, dtype: torch.dtype
) -> Tensor:
    """c_RN in ``dtype`` from float8 operands; scales are float32, (R, 1) and (E, N, 1)."""
    c_RN = a_scale.new_zeros(len(a_RK), b_ENK.shape[1])
    for e, (start, end) in enumerate(itertools.pairwise([0, *ends_E.tolist()])):
        a_cK = a_RK[start:end].float() * a_scale[start:end]
        c_RN[start:end] = a_cK @ (b_ENK[e].float() * b_scale[e]).T
    return c_RN.to(dtype)


def experts(
    x_RD: Tensor, ends_E: Tensor, weights: Weights, activation: str, dropout: HiddenDropout | None = None
) -> Tensor:
    """y_RD (see :func:`reference.experts`)."""
    R, D = x_RD.shape
    if not R or not len(ends_E):
        return zero_output(x_RD, weights)
    act, row = ACTIVATIONS[activation], torch.arange(R, device=x_RD.device)
    # On a CPU it is known whether any rows lie past the last end; asking a GPU would synchronise with it.
    valid_R1 = None if not x_RD.is_cuda and int(ends_E[-1]) == R else (row < ends_E[-1]).unsqueeze(1)
    ends = ends_E.to(torch.int32)
    biased = weights.up_bias_EF is not None or weights.down_bias_ED is not None
    expert_R = torch.searchsorted(ends_E, row, right=True).clamp(max=len(ends_E) - 1) if biased else None

    def linear(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        y = product(x, w, ends)
        if bias is not None and expert_R is not None:
            # In float32, because its gradient is a sum over all of an expert's rows.
            y = (y[:, : bias.shape[1]] + bias.float()[expert_R]).to(x.dtype)
        return y if valid_R1 is None else y.where(valid_R1, 0)

    # Both widths are padded, since the backward GEMMs swap them.
    up, down = (_padded(_padded(w, 1), 2) for w in (weights.up_EFD, weights.down_EFD))
    x = _padded(x_RD if valid_R1 is None else x_RD.where(valid_R1, 0), 1)
    u = linear(x, up.transpose(1, 2), weights.up_bias_EF)
    if weights.gate_EFD is None:
        h = act(u)
    else:
        gate = _padded(_padded(weights.gate_EFD, 1), 2)
        h = act(linear(x, gate.transpose(1, 2), weights.gate_bias_EF)) * u
    if dropout is not None:
        h = dropout.drop(h[:, : len(dropout.column_F)])  # without the padding
    return linear(_padded(h, 1), down, weights.down_bias_ED)[:, :D]


def _padded(x: Tensor, dim: int) -> Tensor:
    """``x`` with ``dim`` padded with zeros to a multiple of 16 bytes."""
    missing = -x.shape[dim] % (16 // x.element_size())
    if not missing:
        return x
    return F.pad(x, (0, missing) if dim in (-1, x.dim() - 1) else (0, 0, 0, missing))


def zero_output(x_RD: Tensor, weights: Weights) -> Tensor:
    """Zeros that depend on all inputs, so that each gets a gradient of zeros."""
    return x_RD * 0 + sum((w.sum() * 0 for w in weights if w is not None), start=x_RD.new_zeros(()))
