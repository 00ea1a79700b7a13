"""GPTQ within a block of columns (:mod:`~colonnade.kernels.linear.gptq_columns`) in one launch.

Rows are independent: a program keeps some of them in registers and processes the columns in order. In plain torch a
column takes about fifteen launches.
"""

import torch
import triton
from torch import Tensor
from triton import language as tl

from colonnade.kernels.linear import gptq_columns
from colonnade.kernels.linear.gptq_columns import FLOAT8_MAX, Rounding

ROWS = 2
"""Rows of a program, which is one warp: sums over columns then need no barrier."""
HALF = tl.constexpr(12582912.0)
"""1.5 · 2^23: adding and subtracting it rounds a smaller float32 to an integer, halves to the even one."""


@triton.jit
def _column(w, c, j):
    """Column j of a tile."""
    return tl.sum(tl.where((c == j)[None, :], w, 0.0), 1)


@triton.jit
def _score(w, c, u_ptr, u_stride, j):
    """|w_j / U_jj|."""
    return tl.abs(tl.div_rn(_column(w, c, j), tl.load(u_ptr + j * (u_stride + 1))))


@triton.jit
def _round_columns(
    w_ptr, u_ptr, scale_ptr, low_ptr, q_ptr, delta_ptr, rows, columns, w_stride, u_stride,
    KIND: tl.constexpr, HIGHEST: tl.constexpr, TOGETHER: tl.constexpr, BF: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Columns are visited in steps of TOGETHER, 4 for sparse24 and else 1."""
    f = tl.program_id(0) * BF + tl.arange(0, BF)
    c = tl.arange(0, BC)
    valid = f < rows
    mask = valid[:, None] & (c < columns)[None, :]
    w = tl.load(w_ptr + f.to(tl.int64)[:, None] * w_stride + c[None, :], mask=mask, other=0.0)
    row = f.to(tl.int64) * columns
    for first in range(0, columns, TOGETHER):
        if KIND == "sparse24":
            s0 = _score(w, c, u_ptr, u_stride, first)
            s1 = _score(w, c, u_ptr, u_stride, first + 1)
            s2 = _score(w, c, u_ptr, u_stride, first + 2)
            s3 = _score(w, c, u_ptr, u_stride, first + 3)
        for i in tl.static_range(TOGETHER):
            j = first + i
            w_j = _column(w, c, j)
            if KIND == "sparse24":
                # How many of the others come first; of equal scores the earlier column does.
                if i == 0:
                    above = (s1 > s0).to(tl.int32) + (s2 > s0).to(tl.int32) + (s3 > s0).to(tl.int32)
                elif i == 1:
                    above = (s0 >= s1).to(tl.int32) + (s2 > s1).to(tl.int32) + (s3 > s1).to(tl.int32)
                elif i == 2:
                    above = (s0 >= s2).to(tl.int32) + (s1 >= s2).to(tl.int32) + (s3 > s2).to(tl.int32)
                else:
                    above = (s0 >= s3).to(tl.int32) + (s1 >= s3).to(tl.int32) + (s2 >= s3).to(tl.int32)
                q = tl.where(above < 2, w_j, 0.0)
                value = q
            else:
                scale = tl.load(scale_ptr + row + j, mask=valid, other=1.0)
                if KIND == "int4":
                    low = tl.load(low_ptr + row + j, mask=valid, other=0.0)
                    q = tl.minimum(tl.maximum(tl.div_rn(w_j - low, scale), 0.0), HIGHEST)
                    q = (q + HALF) - HALF
                    value = q * scale + low
                else:
                    q = tl.minimum(tl.maximum(tl.div_rn(w_j, scale), -HIGHEST), HIGHEST)
                    if KIND == "float8":
                        # e4m3 has steps of an eighth of its power of two; below 2^-6, of 2^-9.
                        power = (q.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
                        step = tl.maximum(power, 0.015625) * 0.125
                        q = ((tl.div_rn(q, step) + HALF) - HALF) * step
                    else:
                        q = (q + HALF) - HALF
                    value = q * scale
            u_jj = tl.load(u_ptr + j * (u_stride + 1))
            delta = tl.div_rn(w_j - value, u_jj)
            later = (c > j) & (c < columns)
            # Without a known factor of 4, by which sparse24's loads would need another layout, and so a barrier.
            u_row = tl.multiple_of(j * u_stride, 1)
            u_j = tl.load(u_ptr + u_row + c, mask=later, other=0.0)
            w -= delta[:, None] * u_j[None, :]
            tl.store(q_ptr + row + j, q, mask=valid)
            tl.store(delta_ptr + row + j, delta, mask=valid)


def round_columns(w_FC: Tensor, u_CC: Tensor, rounding: Rounding) -> tuple[Tensor, Tensor]:
    """(q, δ) (:func:`gptq_columns.round_columns`)."""
    kind, scale_FC, low_FC, _ = rounding
    if kind == "ternary":
        return gptq_columns.round_columns(w_FC, u_CC, rounding)
    rows, columns = w_FC.shape
    q, delta = (torch.empty(rows, columns, dtype=torch.float32, device=w_FC.device) for _ in range(2))
    scale, low = (w_FC if x is None else x.contiguous() for x in (scale_FC, low_FC))  # w_FC: never read there
    highest = {"int4": 15.0, "float8": FLOAT8_MAX}.get(kind, 127.0)
    together, tile = 4 if kind == "sparse24" else 1, max(16, triton.next_power_of_2(columns))
    assert w_FC.stride(1) == 1
    assert u_CC.stride(1) == 1
    _round_columns[(triton.cdiv(rows, ROWS),)](
        w_FC, u_CC, scale, low, q, delta, rows, columns, w_FC.stride(0), u_CC.stride(0),
        KIND=kind, HIGHEST=highest, TOGETHER=together, BF=ROWS, BC=tile, num_warps=1,
    )  # fmt: skip
    return q, delta
