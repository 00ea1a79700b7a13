"""Latents of 8 bits (:mod:`latents`) stored by one launch a layer, where plain torch takes some twenty.

One program a token: both maxima, both scales and all numbers of it stay in registers. The same bits as plain torch's:
divisions are exact, and rounding is to even (a sum with 1.5 · 2²³ leaves no fraction).
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false
# A kernel is launched with more than its signature says, and its constants are plain numbers.

import torch
import triton
from torch import Tensor
from triton import language as tl

from colonnade.kernels.attention.latents import DTYPES, kind_of
from colonnade.kernels.linear import quantise

SMALLEST = tl.constexpr(quantise.SMALLEST)
EXPONENT = tl.constexpr(quantise.EXPONENT)
HIGHEST = tl.constexpr(torch.finfo(DTYPES["float8"]).max)
ROUNDS = tl.constexpr(1.5 * 2.0**23)


@triton.jit
def _part(from_ptr, to_ptr, scale_ptr, i, here, KIND: tl.constexpr):
    """One of the two parts of a token."""
    x = tl.load(from_ptr + i, here, 0.0).to(tl.float32)
    highest = tl.maximum(tl.max(tl.abs(x), 0), SMALLEST)
    if KIND == "int8":
        scale = tl.div_rn(highest, 127.0)
        q = tl.div_rn(x, scale) + ROUNDS - ROUNDS
        q = tl.minimum(tl.maximum(q, -127.0), 127.0).to(tl.int8)
    else:
        room = tl.div_rn(HIGHEST, highest).to(tl.int32, bitcast=True) & EXPONENT
        up = room.to(tl.float32, bitcast=True)
        scale = tl.div_rn(1.0, up)
        q = (x * up).to(tl.float8e4nv)
    tl.store(to_ptr + i, q, here)
    tl.store(scale_ptr, scale + tl.sum(x * 0.0, 0))  # no finite scale for what is not finite


@triton.jit
def _store(
    k_ptr, slots_ptr, values_ptr, scales_ptr, k_t,
    RANK: tl.constexpr, ROPE: tl.constexpr, KIND: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + t).to(tl.int64)
    i, x = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_R)
    of, to = k_ptr + t * k_t, values_ptr + slot * (RANK + ROPE)
    _part(of, to, scales_ptr + 2 * slot, i, i < RANK, KIND)
    _part(of + RANK, to + RANK, scales_ptr + 2 * slot + 1, x, x < ROPE, KIND)


def store(k_TH: Tensor, slots_T: Tensor, rank: int, k_Pp1H: Tensor, scales_Pp2: Tensor) -> None:
    """Keep tokens in these slots (see :func:`latents.store`) of a cache whose pools are whole."""
    T, H = k_TH.shape
    k_TH = k_TH if k_TH.stride(1) == 1 else k_TH.contiguous()
    if T:
        blocks = {"BLOCK_C": triton.next_power_of_2(rank), "BLOCK_R": triton.next_power_of_2(H - rank)}
        _store[T,](
            k_TH, slots_T, k_Pp1H, scales_Pp2, k_TH.stride(0), RANK=rank, ROPE=H - rank, KIND=kind_of(k_Pp1H), **blocks
        )
