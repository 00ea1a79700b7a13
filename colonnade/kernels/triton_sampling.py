"""Greedy sampling, and writing sampled tokens into the next step's input, in one launch each.

Plain torch (:mod:`~colonnade.kernels.sampling`) takes about twelve launches for the first and seven for the second. A
program of the argmax loops over one row in blocks; each thread keeps the first index of its maximum, and the lowest
such index wins.
"""

import torch
import triton
from torch import Tensor
from triton import language as tl

MAX_BLOCK = 1 << 14
"""Logits per block: sixteen a thread."""


@triton.jit
def argmax(row, vocab, BLOCK: tl.constexpr):
    """(maximum, its first index, whether it is finite) of a row; NaN counts as infinity."""
    top = tl.full((BLOCK,), float("-inf"), tl.float32)
    index = tl.zeros((BLOCK,), tl.int32)
    for at in range(0, vocab, BLOCK):
        v = at + tl.arange(0, BLOCK)
        x = tl.load(row + v, v < vocab, float("-inf")).to(tl.float32)
        x = tl.where(x == x, x, float("inf"))  # noqa: PLR0124 - NaN
        index = tl.where(x > top, v, index)
        top = tl.maximum(top, x)
    maximum = tl.max(top, 0)
    token = tl.min(tl.where(top == maximum, index, vocab), 0)
    return maximum, token, (maximum > float("-inf")) & (maximum < float("inf"))


@triton.jit
def _greedy(logits_ptr, tokens_ptr, vocab, stride, none, BLOCK: tl.constexpr):
    row = logits_ptr + tl.program_id(0).to(tl.int64) * stride
    _, token, finite = argmax(row, vocab, BLOCK)
    tl.store(tokens_ptr + tl.program_id(0), tl.where(finite, token, none).to(tl.int64))


def greedy(logits_RV: Tensor, none: int) -> Tensor:
    """tokens_R (see :func:`sampling.greedy`)."""
    R, V = logits_RV.shape
    logits_RV = logits_RV if logits_RV.stride(1) == 1 else logits_RV.contiguous()
    tokens_R = logits_RV.new_empty(R, dtype=torch.int64)
    if R:
        block = min(MAX_BLOCK, triton.next_power_of_2(V))
        _greedy[R,](logits_RV, tokens_R, V, logits_RV.stride(0), none, BLOCK=block, num_warps=max(1, block // 512))
    return tokens_R


BLOCK = 256


@triton.jit
def _write_next_tokens(ids_ptr, last_ptr, T, BLOCK: tl.constexpr):
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ids = tl.load(ids_ptr + t, t < T, 0)
    placeholder = ids < 0
    tl.store(ids_ptr + t, tl.maximum(tl.load(last_ptr - 1 - ids, placeholder, 0), 0), placeholder)


def write_next_tokens_(ids_T: Tensor, last_R: Tensor) -> None:
    """Replaces placeholder ids by sampled tokens (see :func:`sampling.write_next_tokens_`)."""
    assert ids_T.is_contiguous(), "ids are written where they lie"
    if len(ids_T):
        _write_next_tokens[triton.cdiv(len(ids_T), BLOCK),](ids_T, last_R.contiguous(), len(ids_T), BLOCK=BLOCK)
