"""Skinny GEMM (few rows) on a CPU, with plain and weight-only quantised weights; decoding is bound by reading W.

    skinny_linear       y = x Wᵀ + b
    quantised_linear    y_tf = Σ_g ( s_fg Σ_(d in g) x_td q_fd  +  m_fg Σ_(d in g) x_td ),   int8, float8: one g, no m

torch passes x Wᵀ to MKL as it is. For few rows MKL computes it on one core, and far below what even one core can read
from memory. Equivalent forms are faster (float32, two cores of an EPYC 9004, W 1536 × 576, not in any cache; GB/s of W,
where the cores can read 60 to 70):

    rows of x                      1      2      4      8     16     32
    x Wᵀ                          13      7      9      9      7      5
    (W xᵀ)ᵀ                       33     33     24     15     10      7
    x Wᵀ, W in 16 blocks          27     20     20     17     12      7

The second form needs x to stay in the L1 cache, and at least two rows (a single row would use MKL's matrix-vector
product, which is the slow one, so x is duplicated). The third, one batched GEMM over blocks of W's rows, needs neither.
From some 32 rows on, arithmetic is the limit, and torch's own form is as fast; so it is for small weights from 9 rows
on (128 × 2048 with 20 rows, one core of an EPYC, µs: 219, 334 and 399). docs/log.md, "CPU decode", has the other
shapes, and what failed.

With quantised weights, scales are applied to the sums instead of to the weights.
:func:`~colonnade.kernels.linear.reference.quantised_linear` dequantises W, in several passes over it. Here few rows are
multiplied with q itself, which only takes splitting bytes in two and converting them. A byte holds two inputs that are
G/8 apart, and bytes of a word are 2 G/8 apart; so x's columns are permuted into the order of the bytes, and no weight
is moved. A matrix of 1536 × 576 on one core of an AMD EPYC, in float32, one row and 8 (µs): int4 353 and 542, where
dequantising takes 706 and 881; int8 154 and 313, where it takes 172 and 338; unquantised 75 and 236.
"""

import sys

import torch
from torch import Tensor
from torch.nn import functional as F

from colonnade.kernels.linear import reference
from colonnade.kernels.linear.quantise import INT4_PER_WORD, Quantised, round_inputs, to_float, to_rows

MAX_ROWS = 32
"""More rows use torch's x Wᵀ."""
SMALL, MAX_SMALL_ROWS = 1 << 18, 8
"""A weight of at most so many numbers uses torch's x Wᵀ from fewer rows on: its blocks would be too narrow."""
L1_BYTES = 1 << 14
"""Half of an L1 cache: the size of x up to which (W xᵀ)ᵀ is used."""
BLOCKS = 16
"""Blocks of W's rows; at least one per core of a small machine."""
MAX_QUANTISED_ROWS = 16
"""More rows use a dequantised weight often enough to pay for it."""


def skinny_linear(x_TD: Tensor, weight_FD: Tensor, bias_F: Tensor | None = None) -> Tensor:
    """y_TF (see :func:`reference.linear`)."""
    T, small = len(x_TD), weight_FD.numel() <= SMALL
    if x_TD.dim() != 2 or T > MAX_ROWS or (small and T > MAX_SMALL_ROWS):
        return F.linear(x_TD, weight_FD, bias_F)
    fits_l1 = max(T, 2) * x_TD.shape[1] * x_TD.element_size() <= L1_BYTES
    if fits_l1 or len(weight_FD) % BLOCKS:
        twice_TD = torch.cat((x_TD, x_TD)) if T == 1 else x_TD
        y_TF = (weight_FD @ twice_TD.T).T[:T].contiguous()
    else:
        blocks = weight_FD.unflatten(0, (BLOCKS, -1)).transpose(1, 2)
        y_TF = torch.bmm(x_TD.expand(BLOCKS, -1, -1), blocks).transpose(0, 1).flatten(1)
    return y_TF if bias_F is None else y_TF + bias_F


def quantised_linear(x_TD: Tensor, weight: Quantised, bias_F: Tensor | None = None) -> Tensor:
    """y_TF (see :func:`reference.quantised_linear`); computed in float32 or float64."""
    rows = x_TD.shape[:-1].numel()
    dequantises = weight.kind == "ternary" or weight.has_int8_groups
    if dequantises or not 0 < rows <= MAX_QUANTISED_ROWS or sys.byteorder != "little":
        return reference.quantised_linear(x_TD, weight, bias_F)
    wide, weight = torch.promote_types(x_TD.dtype, torch.float32), to_rows(weight)
    if weight.kind == "int8_dynamic":
        x_TD = round_inputs(x_TD)
    multiply = _multiply_int4 if weight.kind == "int4" else _multiply_8_bit
    y_TF = multiply(x_TD.reshape(rows, -1).to(wide), weight).to(x_TD.dtype).view(*x_TD.shape[:-1], -1)
    return y_TF if bias_F is None else y_TF + bias_F


def _multiply_8_bit(x_TD: Tensor, weight: Quantised) -> Tensor:
    bands = weight.values.split(reference.band_rows(weight))
    y_TF = torch.cat([F.linear(x_TD, to_float(values_FD, x_TD.dtype)) for values_FD in bands], 1)
    return y_TF.mul_(weight.scales[:, 0])


def _multiply_int4(x_TD: Tensor, weight: Quantised) -> Tensor:
    """Input i·G/8 + c of a group is in bits 4i … 4i+3 of word c, with i = 2b + h in half h of byte b."""
    words, groups = weight.group // INT4_PER_WORD, weight.scales.shape[1]
    # (T, groups, bytes, halves of a byte, words), then (halves, groups, T, bytes in memory order)
    grouped_x = F.pad(x_TD, (0, -weight.inputs % weight.group)).unflatten(1, (groups, INT4_PER_WORD // 2, 2, words))
    x_Tg = grouped_x.sum((2, 3, 4))
    halves = grouped_x.permute(3, 1, 0, 4, 2).flatten(3)
    bytes_FgB = weight.values.view(torch.uint8).unflatten(1, (groups, -1))
    parts, step = [], reference.band_rows(weight)
    for b_FgB, scales_Fg2 in zip(bytes_FgB.split(step), weight.scales.to(x_TD.dtype).split(step), strict=True):
        y_gTF = torch.bmm(halves[0], (b_FgB & 15).to(x_TD.dtype).permute(1, 2, 0))
        y_gTF.baddbmm_(halves[1], (b_FgB >> 4).to(x_TD.dtype).permute(1, 2, 0))
        scale_Fg, low_Fg = scales_Fg2.unbind(2)
        y_TF = (y_gTF * scale_Fg.T[:, None]).sum(0)
        parts.append(y_TF.addmm_(x_Tg, low_Fg.T))
    return torch.cat(parts, 1)
