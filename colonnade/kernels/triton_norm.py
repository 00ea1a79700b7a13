"""RMSNorm and LayerNorm, a program a row: how a row is summed depends on its width only, never on the number of rows.

torch's reductions choose by both, so that a row's last bit may depend on its neighbours.
"""

# pyright: reportCallIssue=false, reportArgumentType=false

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _norm(x_ptr, w_ptr, b_ptr, y_ptr, width, eps, LAYER: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * width
    at = tl.arange(0, BLOCK)
    inside = at < width
    x = tl.load(x_ptr + row + at, mask=inside, other=0).to(tl.float32)
    if LAYER:
        x = tl.where(inside, x - tl.sum(x, 0) / width, 0)
    y = x * tl.rsqrt(tl.sum(x * x, 0) / width + eps) * tl.load(w_ptr + at, mask=inside, other=0).to(tl.float32)
    if LAYER:
        y += tl.load(b_ptr + at, mask=inside, other=0).to(tl.float32)
    tl.store(y_ptr + row + at, y, mask=inside)


def norm(x: Tensor, weight_D: Tensor, bias_D: Tensor | None, eps: float) -> Tensor:
    """y (see :func:`reference.norm`)."""
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
