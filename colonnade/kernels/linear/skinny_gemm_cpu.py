"""y = x Wᵀ + b for a few rows on a CPU: decoding, where reading W once is all that a product should cost.

torch hands x Wᵀ to MKL as it stands, and for a few rows MKL computes it on one core, and far below what even that one
reads from memory. The same product in other words is fast (float32, two cores of an EPYC 9004, W 1536 × 576, not in
any cache; GB/s of W, where the cores read 60 to 70):

    rows of x                      1      2      4      8     16     32
    x Wᵀ                          13      7      9      9      7      5
    (W xᵀ)ᵀ                       33     33     24     15     10      7
    x Wᵀ, W in 16 blocks          27     20     20     17     12      7

The second line needs x to stay in the nearest cache, and at least two rows (a single one would go to MKL's
matrix-vector product, which is the slow one, so x is taken twice). The third, one batched product over blocks of W's
rows, needs neither. From some 32 rows on arithmetic decides, and torch's way does as well. docs/log.md, "CPU decode",
has the other shapes, and what failed.

y = x Wᵀ + b with a quantised W and few rows of x, on a CPU: scales are put to the sums instead of to the weights.

    y_tf = Σ_g ( s_fg Σ_(d in g) x_td q_fd  +  m_fg Σ_(d in g) x_td )      of int8 and float8: one group, and no m

:mod:`~colonnade.kernels.linear.reference` writes W out, a pass over it for each step from a nibble to a weight. Few
rows are multiplied with q as it is: what is left to do to each weight is to split a byte in two and to widen it. A
byte holds two inputs that are G/8 apart, bytes of a word are 2 G/8 apart, so x's columns are put into the order of the
bytes, and no weight moves.

A matrix of 1536 × 576 on one core of an AMD EPYC, in float32, one row and 8 (µs): int4 353 and 542, where writing W out
takes 706 and 881; int8 154 and 313, where that takes 172 and 338; as stored 75 and 236.
"""

import sys

import torch
from torch import Tensor
from torch.nn import functional as F

from colonnade.kernels.linear import reference
from colonnade.kernels.linear.quantise import INT4_PER_WORD, Quantised, to_float

MAX_ROWS = 32
"""With more rows than this, x Wᵀ is left as it is."""
L1_BYTES = 1 << 14
"""Half of a first-level cache: what x may take for the second line."""
BLOCKS = 16
"""At least one for each core of a small machine, and large ones all the same."""


def skinny_linear(x_TD: Tensor, weight_FD: Tensor, bias_F: Tensor | None = None) -> Tensor:
    """y_TF (see :func:`reference.linear`)."""
    T = len(x_TD)
    if x_TD.dim() != 2 or T > MAX_ROWS:
        return F.linear(x_TD, weight_FD, bias_F)
    near = max(T, 2) * x_TD.shape[1] * x_TD.element_size() <= L1_BYTES
    if near or len(weight_FD) % BLOCKS:
        twice_TD = torch.cat((x_TD, x_TD)) if T == 1 else x_TD
        y_TF = (weight_FD @ twice_TD.T).T[:T].contiguous()
    else:
        blocks = weight_FD.unflatten(0, (BLOCKS, -1)).transpose(1, 2)
        y_TF = torch.bmm(x_TD.expand(BLOCKS, -1, -1), blocks).transpose(0, 1).flatten(1)
    return y_TF if bias_F is None else y_TF + bias_F


MAX_QUANTISED_ROWS = 16
"""Rows for which it is faster; more use a weight that is written out often enough."""


def quantised_linear(x_TD: Tensor, weight: Quantised, bias_F: Tensor | None = None) -> Tensor:
    """y_TF (see :func:`reference.linear`); reckoned in float32 at least."""
    rows = x_TD.shape[:-1].numel()
    if not 0 < rows <= MAX_QUANTISED_ROWS or sys.byteorder != "little":
        return reference.quantised_linear(x_TD, weight, bias_F)
    fine = torch.promote_types(x_TD.dtype, torch.float32)
    times = _in_groups if weight.kind == "int4" else _in_rows
    y_TF = times(x_TD.reshape(rows, -1).to(fine), weight).to(x_TD.dtype).view(*x_TD.shape[:-1], -1)
    return y_TF if bias_F is None else y_TF + bias_F


def _in_rows(x_TD: Tensor, weight: Quantised) -> Tensor:
    """With a scale for each output."""
    bands = weight.values.split(reference.band_rows(weight))
    y_TF = torch.cat([F.linear(x_TD, to_float(values_FD, x_TD.dtype)) for values_FD in bands], 1)
    return y_TF.mul_(weight.scales[:, 0])


def _in_groups(x_TD: Tensor, weight: Quantised) -> Tensor:
    """With two for each group of G inputs, of which i·G/8 + c is in bits 4i … 4i+3 of word c; i = 2b + h in byte b."""
    words, groups = weight.group // INT4_PER_WORD, weight.scales.shape[1]
    # (T, groups, bytes, halves of a byte, words), then (halves, groups, T, bytes in their order in memory)
    spread = F.pad(x_TD, (0, -weight.inputs % weight.group)).unflatten(1, (groups, INT4_PER_WORD // 2, 2, words))
    x_Tg = spread.sum((2, 3, 4))
    halves = spread.permute(3, 1, 0, 4, 2).flatten(3)
    bytes_FgB = weight.values.view(torch.uint8).unflatten(1, (groups, -1))
    parts, step = [], reference.band_rows(weight)
    for b_FgB, scales_Fg2 in zip(bytes_FgB.split(step), weight.scales.to(x_TD.dtype).split(step), strict=True):
        y_gTF = torch.bmm(halves[0], (b_FgB & 15).to(x_TD.dtype).permute(1, 2, 0))
        y_gTF.baddbmm_(halves[1], (b_FgB >> 4).to(x_TD.dtype).permute(1, 2, 0))
        scale_Fg, low_Fg = scales_Fg2.unbind(2)
        y_TF = (y_gTF * scale_Fg.T[:, None]).sum(0)
        parts.append(y_TF.addmm_(x_Tg, low_Fg.T))
    return torch.cat(parts, 1)
