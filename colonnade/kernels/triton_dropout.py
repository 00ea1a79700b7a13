"""Dropout in one kernel on a GPU, for models that are not compiled: x is read once and y written once.

Under torch.compile the plain operations do better, because Inductor fuses them with what stands before and after.
"""

# pyright: reportCallIssue=false, reportArgumentType=false
# A kernel is launched with more than its signature says, and its constants are plain numbers.

import torch
import triton
from torch import Tensor
from triton import language as tl

from colonnade.kernels import dropout as recompute
from colonnade.kernels import dropout as reference
from colonnade.kernels.dropout import place_hash, row_hash, threshold


@triton.jit
def mix(x):
    """lowbias32 of int32 numbers (see :func:`dropout.mix`)."""
    x = x.to(tl.uint32, bitcast=True)
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    x = x ^ (x >> 16)
    return x.to(tl.int32, bitcast=True)


@triton.jit
def _kernel(x_ptr, y_ptr, row_ptr, column_ptr, least, scale, T, D, stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    t = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    d = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    here = (t < T)[:, None] & (d < D)[None, :]
    row = tl.load(row_ptr + t, t < T, 0)
    column = tl.load(column_ptr + d, d < D, 0)
    kept = mix(row[:, None] ^ column[None, :]) >= least
    x = tl.load(x_ptr + t[:, None] * stride + d[None, :], here, 0.0)
    y = tl.where(kept, (x.to(tl.float32) * scale).to(x.dtype), 0.0)
    tl.store(y_ptr + t[:, None] * D + d[None, :], y, here)


def _apply(x_TD: Tensor, key: Tensor, index_T: Tensor, *, site: int, rate: float, start: int) -> Tensor:
    T, D = x_TD.shape
    x_TD = x_TD if x_TD.stride(1) == 1 else x_TD.contiguous()
    y_TD = torch.empty(T, D, dtype=x_TD.dtype, device=x_TD.device)
    if y_TD.numel():
        row_T = row_hash(key, index_T)
        column_D = place_hash(site, torch.arange(start, start + D, device=x_TD.device))
        rows, columns = 4, 256
        grid = (triton.cdiv(T, rows), triton.cdiv(D, columns))
        least, scale = threshold(rate), 1 / (1 - rate)
        _kernel[grid](x_TD, y_TD, row_T, column_D, least, scale, T, D, x_TD.stride(0), rows, columns)
    return y_TD


def dropout(x_TD: Tensor, key: Tensor, index_T: Tensor, *, site: int, rate: float, start: int = 0) -> Tensor:
    """y_TD (see :func:`dropout.dropout`)."""
    apply = reference.dropout if torch.compiler.is_compiling() else _apply
    return recompute.Recomputed.apply(x_TD, key, index_T, apply, site, rate, start)
