"""The merge of all ranks' states (:mod:`held`) in one launch, where plain torch takes ten for a few kilobytes.

    lse = log Σ_r exp(lse_r)        o = Σ_r exp(lse_r − lse) o_r        in the order of ranks, the same bits on each

One program for each query and head; all ranks' numbers are loaded side by side.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false
# A kernel is launched with more than its signature says, and its constants are plain numbers.

from collections.abc import Sequence

import torch
import triton
from torch import Tensor
from triton import language as tl

from colonnade.kernels.attention import held
from colonnade.kernels.softmax_state import State


@triton.jit
def merge(o_ptr, each_ptr, lines, H: tl.constexpr, RANKS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_H: tl.constexpr):
    """One line of o (lines, H) from (RANKS, lines, H + 1)."""
    line = tl.program_id(0).to(tl.int64)
    r, h = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_H)
    at = each_ptr + (r * lines + line) * (H + 1)
    lse = tl.load(at + H, r < RANKS, float("-inf"))
    top = tl.max(lse, 0)
    weight = tl.exp(lse - tl.where(top == float("-inf"), 0.0, top))
    total = tl.sum(weight, 0)
    part = tl.load(at[:, None] + h[None, :], (r < RANKS)[:, None] & (h < H)[None, :], 0.0)
    o = tl.sum(weight[:, None] * part, 0) / tl.where(total > 0.0, total, 1.0)
    tl.store(o_ptr + line * H + h, o.to(o_ptr.dtype.element_ty), h < H)


def merged(each_STNz: Tensor, more: Sequence[State], dtype: torch.dtype) -> Tensor:
    """o_TNH (see :func:`held.merged`); with ``more`` states, those of long steps, plain torch's."""
    if more:
        return held.merged(each_STNz, more, dtype)
    ranks, T, N, z = each_STNz.shape
    o_TNH = each_STNz.new_empty(T, N, z - 1, dtype=dtype)
    if T:
        blocks = {"BLOCK_R": triton.next_power_of_2(ranks), "BLOCK_H": triton.next_power_of_2(z - 1)}
        merge[T * N,](o_TNH, each_STNz.contiguous(), T * N, H=z - 1, RANKS=ranks, **blocks)
    return o_TNH
