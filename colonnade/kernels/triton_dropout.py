"""Dropout in one Triton kernel, for models that are not compiled; reads x once and writes y once.

Under torch.compile the plain operations are faster, because Inductor fuses them with their neighbours.
"""

# pyright: reportCallIssue=false, reportArgumentType=false
# Triton adds launch options to a kernel's signature, and constexpr arguments are plain Python values.

import torch
import triton
from torch import Tensor
from triton import language as tl

from colonnade.kernels import dropout as recompute
from colonnade.kernels import dropout as reference
from colonnade.kernels.dropout import arange_hash, row_hash, threshold


@triton.jit
def lowbias32(x):
    """Hashes int32 values (see :func:`dropout.lowbias32`)."""
    x = x.to(tl.uint32, bitcast=True)
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    x = x ^ (x >> 16)
    return x.to(tl.int32, bitcast=True)


@triton.jit
def _dropout(
    x_ptr, y_ptr, row_ptr, column_ptr, min_hash, scale, T, D, stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    t = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    d = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = (t < T)[:, None] & (d < D)[None, :]
    row = tl.load(row_ptr + t, t < T, 0)
    column = tl.load(column_ptr + d, d < D, 0)
    keep = lowbias32(row[:, None] ^ column[None, :]) >= min_hash
    x = tl.load(x_ptr + t[:, None] * stride + d[None, :], mask, 0.0)
    y = tl.where(keep, (x.to(tl.float32) * scale).to(x.dtype), 0.0)
    tl.store(y_ptr + t[:, None] * D + d[None, :], y, mask)


def _launch(x_TD: Tensor, key: Tensor, index_T: Tensor, *, site: int, rate: float, start: int) -> Tensor:
    T, D = x_TD.shape
    x_TD = x_TD if x_TD.stride(1) == 1 else x_TD.contiguous()
    y_TD = torch.empty(T, D, dtype=x_TD.dtype, device=x_TD.device)
    if y_TD.numel():
        row_T = row_hash(key, index_T)
        column_D = arange_hash(site, torch.arange(start, start + D, device=x_TD.device))
        rows, columns = 4, 256
        grid = (triton.cdiv(T, rows), triton.cdiv(D, columns))
        min_hash, scale = threshold(rate), 1 / (1 - rate)
        _dropout[grid](x_TD, y_TD, row_T, column_D, min_hash, scale, T, D, x_TD.stride(0), rows, columns)
    return y_TD


def dropout(x_TD: Tensor, key: Tensor, index_T: Tensor, *, site: int, rate: float, start: int = 0) -> Tensor:
    """y_TD (see :func:`dropout.dropout`)."""
    apply = reference.dropout if torch.compiler.is_compiling() else _launch
    return recompute.RecomputedDropout.apply(x_TD, key, index_T, apply, site, rate, start)
