"""The likeliest token of each row in one launch (see :mod:`~colonnade.kernels.sampling`), where plain torch takes a
dozen.

A program has a row and goes through it in blocks; a thread keeps the first of its largest, and the least of those wins.

A step's tokens told in one launch (see :mod:`~colonnade.kernels.sampling`), where plain torch takes seven.
"""

import torch
import triton
from torch import Tensor
from triton import language as tl

# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false
# A kernel is launched with more than its signature says, and its constants are plain numbers.


MOST = 1 << 14
"""Logits of a block: sixteen a thread."""


@triton.jit
def _greedy(logits_ptr, tokens_ptr, vocab, stride, none, BLOCK: tl.constexpr):
    row = logits_ptr + tl.program_id(0).to(tl.int64) * stride
    top = tl.full((BLOCK,), float("-inf"), tl.float32)
    place = tl.zeros((BLOCK,), tl.int32)
    for at in range(0, vocab, BLOCK):
        v = at + tl.arange(0, BLOCK)
        x = tl.load(row + v, v < vocab, float("-inf")).to(tl.float32)
        x = tl.where(x == x, x, float("inf"))  # noqa: PLR0124 - NaN
        place = tl.where(x > top, v, place)
        top = tl.maximum(top, x)
    best = tl.max(top, 0)
    token = tl.min(tl.where(top == best, place, vocab), 0)
    finite = (best > float("-inf")) & (best < float("inf"))
    tl.store(tokens_ptr + tl.program_id(0), tl.where(finite, token, none).to(tl.int64))


def greedy(logits_RV: Tensor, none: int) -> Tensor:
    """tokens_R (see :func:`reference.greedy`)."""
    R, V = logits_RV.shape
    logits_RV = logits_RV if logits_RV.stride(1) == 1 else logits_RV.contiguous()
    tokens_R = logits_RV.new_empty(R, dtype=torch.int64)
    if R:
        block = min(MOST, triton.next_power_of_2(V))
        _greedy[R,](logits_RV, tokens_R, V, logits_RV.stride(0), none, BLOCK=block, num_warps=max(1, block // 512))
    return tokens_R


# pyright: reportCallIssue=false, reportArgumentType=false
# A kernel is launched with more than its signature says, and its constants are plain numbers.


BLOCK = 256


@triton.jit
def _tell(ids_ptr, last_ptr, T, BLOCK: tl.constexpr):
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    told = tl.load(ids_ptr + t, t < T, 0)
    drawn = told < 0
    tl.store(ids_ptr + t, tl.maximum(tl.load(last_ptr - 1 - told, drawn, 0), 0), drawn)


def tell_(ids_T: Tensor, last_R: Tensor) -> None:
    """Tokens in the place of draws (see :func:`reference.tell_`)."""
    assert ids_T.is_contiguous(), "ids are written where they lie"
    if len(ids_T):
        _tell[triton.cdiv(len(ids_T), BLOCK),](ids_T, last_R.contiguous(), len(ids_T), BLOCK=BLOCK)
