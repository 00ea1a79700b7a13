"""Batch-invariant y = x Wᵀ + b: a row's result is bitwise the same whatever the other rows are.

A library chooses tiles, and how the summed dimension is split, by the number of rows. Here the tile is fixed, and each
output is summed over the inputs in order by one program. The cost: the tile is too small for many rows and too large
for one.
"""

# pyright: reportCallIssue=false, reportArgumentType=false

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = {"BM": 64, "BN": 32, "BK": 128}
"""Rows, outputs and inputs of a tile; float32 has half the inputs."""


@triton.jit
def _linear(
    x_ptr, w_ptr, b_ptr, y_ptr, rows, outputs, inputs, x_t, w_f,
    BIASED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    x_row = x_ptr + m[:, None].to(tl.int64) * x_t
    w_row = w_ptr + n[None, :].to(tl.int64) * w_f
    total = tl.zeros([BM, BN], tl.float32)
    for k0 in range(0, inputs, BK):
        valid = k0 + k < inputs
        x = tl.load(x_row + (k0 + k)[None, :], mask=(m < rows)[:, None] & valid[None, :], other=0)
        w = tl.load(w_row + (k0 + k)[:, None], mask=(n < outputs)[None, :] & valid[:, None], other=0)
        total = tl.dot(x, w, total, input_precision="ieee")
    if BIASED:
        total += tl.load(b_ptr + n, mask=n < outputs, other=0).to(tl.float32)[None, :]
    y_at = y_ptr + m[:, None].to(tl.int64) * outputs + n[None, :]
    tl.store(y_at, total, mask=(m < rows)[:, None] & (n < outputs)[None, :])


def linear(x_TD: Tensor, weight_FD: Tensor, bias_F: Tensor | None = None) -> Tensor:
    """y_TF (see :func:`reference.linear`)."""
    x = x_TD.reshape(-1, x_TD.shape[-1])
    x, w = (a if a.stride(1) == 1 else a.contiguous() for a in (x, weight_FD))
    (rows, inputs), outputs = x.shape, len(w)
    y = x.new_empty(rows, outputs)
    if y.numel():
        tile = TILE if x.dtype != torch.float32 else TILE | {"BK": TILE["BK"] // 2}
        _linear[triton.cdiv(outputs, tile["BN"]), triton.cdiv(rows, tile["BM"])](
            x, w, y if bias_F is None else bias_F, y, rows, outputs, inputs, x.stride(0), w.stride(0),
            BIASED=bias_F is not None, **tile, num_warps=4, num_stages=3,
        )  # fmt: skip
    return y.view(*x_TD.shape[:-1], outputs)
