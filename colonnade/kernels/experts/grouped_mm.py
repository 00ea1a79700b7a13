"""Experts in torch's grouped matrix product, which takes the rows' ends as they are: no padding, no synchronisation.

torch's product wants rows whose elements are neighbours and begin at multiples of 16 bytes, one type on both sides, and
int32 ends; it leaves rows past the last end as they were in memory. So the widths are padded with zeros where they do
not fit, and such rows are set to 0 after each product, forward and backward: what is left there may be NaN, and
0 · NaN is NaN. It differentiates itself, with grouped products again. Biases are added row by row.

Products over each expert's own rows, as equations: the specification of :mod:`~colonnade.kernels.experts.grouped_mm`,
and of sums.

    product    c_r = (a_r s_r) · (b_e ⊙ s_e)ᵀ          r of expert e's rows; the arithmetic is float32's
    sums       d_e = Σ_r p_r ⊗ q_r

Rows past the last end belong to no expert: 0, and no part of any sum.

Each expert's rows times its weights in float8 on the matrix units of a Hopper GPU.

The one file that names torch's private ``_scaled_grouped_mm``. It wants e4m3 on both sides, rows that lie one after
another and weights whose summed dimension does, each a multiple of 16 long; a float32 scale a row and one a column of
each expert; int32 ends; and writes bfloat16. An expert may have any number of rows, also none; rows past the last end
stay as they were in memory. Nothing waits for the device.

``use_fast_accum`` as for dense products with a scale a row (:mod:`colonnade.kernels.linear.scaled_mm`).
"""

import itertools

import torch
from torch import Tensor
from torch.nn import functional as F

from colonnade.kernels.dropout import HiddenDropout
from colonnade.kernels.experts.reference import ACTIVATIONS, Weights

_product = getattr(F, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)
"""Public since torch 2.12 or so; the same under a private name before."""
available = _product is not None


def product(x_RD: Tensor, w_EDF: Tensor, ends_E: Tensor) -> Tensor:
    """y_RF: the rows up to each of the int32 ends times that expert's weights; rows past the last end are anything."""
    assert _product is not None
    return _product(x_RD, w_EDF, offs=ends_E)


def sums(p_RM: Tensor, q_RN: Tensor, ends_E: Tensor) -> Tensor:
    """d_EMN (see :func:`scaled_grouped.sums`): both widths must be multiples of 16 bytes."""
    return product(p_RM.T, q_RN, ends_E)


def _padded(x: Tensor, dim: int) -> Tensor:
    """``x`` with ``dim`` filled up to 16 bytes with zeros."""
    more = -x.shape[dim] % (16 // x.element_size())
    if not more:
        return x
    return F.pad(x, (0, more) if dim in (-1, x.dim() - 1) else (0, 0, 0, more))


def experts(
    x_RD: Tensor, ends_E: Tensor, weights: Weights, activation: str, dropout: HiddenDropout | None = None
) -> Tensor:
    """y_RD (see :func:`reference.experts`)."""
    R, D = x_RD.shape
    if not R or not len(ends_E):
        return _of_none(x_RD, weights)
    act, row = ACTIVATIONS[activation], torch.arange(R, device=x_RD.device)
    # A CPU says at once whether there are rows past the last end; a GPU would have to be waited for.
    here_R1 = None if not x_RD.is_cuda and int(ends_E[-1]) == R else (row < ends_E[-1]).unsqueeze(1)
    ends = ends_E.to(torch.int32)
    biased = weights.up_bias_EF is not None or weights.down_bias_ED is not None
    expert_R = torch.searchsorted(ends_E, row, right=True).clamp(max=len(ends_E) - 1) if biased else None

    def through(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        y = product(x, w, ends)
        if bias is not None and expert_R is not None:
            # In float32, because its gradient is a sum over all of an expert's rows.
            y = (y[:, : bias.shape[1]] + bias.float()[expert_R]).to(x.dtype)
        return y if here_R1 is None else y.where(here_R1, 0)

    # Padded along both widths, so that the products of the way back, which swap them, fit as well.
    up, down = (_padded(_padded(w, 1), 2) for w in (weights.up_EFD, weights.down_EFD))
    x = _padded(x_RD if here_R1 is None else x_RD.where(here_R1, 0), 1)
    u = through(x, up.transpose(1, 2), weights.up_bias_EF)
    if weights.gate_EFD is None:
        h = act(u)
    else:
        gate = _padded(_padded(weights.gate_EFD, 1), 2)
        h = act(through(x, gate.transpose(1, 2), weights.gate_bias_EF)) * u
    if dropout is not None:
        h = dropout.drop(h[:, : len(dropout.column_F)])  # not what it was padded with
    return through(_padded(h, 1), down, weights.down_bias_ED)[:, :D]


def _of_none(x_RD: Tensor, weights: Weights) -> Tensor:
    """Rows of no expert, still hanging on the inputs, as a gradient of zeros has to reach them."""
    return x_RD * 0 + sum((w.sum() * 0 for w in weights if w is not None), start=x_RD.new_zeros(()))


def scaled_product_reference(
    a_RK: Tensor, b_ENK: Tensor, a_scale: Tensor, b_scale: Tensor, ends_E: Tensor, dtype: torch.dtype
) -> Tensor:
    """c_RN in ``dtype`` of two float8 operands; scales are float32, (R, 1) and (E, N, 1)."""
    c_RN = a_scale.new_zeros(len(a_RK), b_ENK.shape[1])
    for e, (start, end) in enumerate(itertools.pairwise([0, *ends_E.tolist()])):
        a_cK = a_RK[start:end].float() * a_scale[start:end]
        c_RN[start:end] = a_cK @ (b_ENK[e].float() * b_scale[e]).T
    return c_RN.to(dtype)


def sums_reference(p_RM: Tensor, q_RN: Tensor, ends_E: Tensor) -> Tensor:
    """d_EMN."""
    parts = itertools.pairwise([0, *ends_E.tolist()])
    return torch.stack([p_RM[start:end].T @ q_RN[start:end] for start, end in parts])


CAPABILITY = (9, 0)
"""The only one for which torch has this kernel."""
scaled_available = hasattr(torch, "_scaled_grouped_mm")


def scaled_product(
    a_RK: Tensor, b_ENK: Tensor, a_scale: Tensor, b_scale: Tensor, ends_E: Tensor, dtype: torch.dtype
) -> Tensor:
    """c_RN (see :func:`scaled_grouped.product`)."""
    return torch._scaled_grouped_mm(
        a_RK.contiguous(),
        b_ENK.contiguous().transpose(1, 2),
        a_scale.flatten(),
        b_scale.flatten(1),
        offs=ends_E,
        out_dtype=dtype,
        use_fast_accum=True,
    )
