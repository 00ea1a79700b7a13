"""Batch-invariant RMSNorm and LayerNorm: a program per row.

The order of a row's sum depends on its width only. torch's reductions also depend on the number of rows, so that a
row's last bit may change with the batch.
"""

# pyright: reportCallIssue=false, reportArgumentType=false

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _norm(x_ptr, w_ptr, b_ptr, y_ptr, width, eps, LAYER: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * width
    column = tl.arange(0, BLOCK)
    mask = column < width
    x = tl.load(x_ptr + row + column, mask=mask, other=0).to(tl.float32)
    if LAYER:
        x = tl.where(mask, x - tl.sum(x, 0) / width, 0)
    y = x * tl.rsqrt(tl.sum(x * x, 0) / width + eps) * tl.load(w_ptr + column, mask=mask, other=0).to(tl.float32)
    if LAYER:
        y += tl.load(b_ptr + column, mask=mask, other=0).to(tl.float32)
    tl.store(y_ptr + row + column, y, mask=mask)


def norm(x: Tensor, weight_D: Tensor, bias_D: Tensor | None, eps: float) -> Tensor:
    """y (see :func:`norm.norm`)."""
    width = len(weight_D)
    x = x.contiguous()
    y = torch.empty_like(x)
    if x.numel():
        block = triton.next_power_of_2(width)
        _norm[x.numel() // width,](
            x, weight_D, weight_D if bias_D is None else bias_D, y, width, eps, LAYER=bias_D is not None, BLOCK=block,
            num_warps=min(16, max(1, block // 512)),
        )  # fmt: skip
    return y
