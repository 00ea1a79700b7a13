"""Sampling with temperature, top-k, top-p and min-p in one launch, without sorting (see :func:`sampling.sample`).

Plain torch takes forty launches, and with top-p sorts the vocabulary. Here one program handles a row:

    peak      the maximum logit m
    keys      x_i = (l_i - m) / temperature <= 0; the bits of |x_i| as an integer, which order as x_i does
    top-k     the smallest key k with count(keys <= k) >= top_k
    top-p     the smallest key k with Σ exp(x_i) over keys <= k at least top_p times the sum over what top-k keeps
    draw      argmax (x_i - log e_i) over the kept tokens, with the noise e_i of :mod:`~colonnade.kernels.sampling`

A search narrows 33 bits by three in each pass over the row: it sums over the tokens below seven pivots at once. Of
equal logits at the limit, those with the lowest ids are kept, as a stable sort would. No sum depends on another row.
FlashInfer's sampler rejects and draws again instead (Ye 2025, arXiv 2501.01005), so its token depends on the number of
rounds; the noise here is a function of the seed, the position and the token.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false
# Triton adds launch options to a kernel's signature, and constexpr arguments are plain Python values.

import torch
import triton
from torch import Tensor
from triton import language as tl

from colonnade.kernels.sampling import NUM_ARGS
from colonnade.kernels.triton_dropout import lowbias32

MAX_BLOCK = 1 << 12
"""Logits per block."""

PARTS = tl.constexpr(8)
"""Parts into which one pass over the row splits the range of keys: three bits."""


@triton.jit
def _keys(row, at, vocab, peak, temperature, BLOCK: tl.constexpr):
    """Ids, scaled logits, and keys of a block; keys outside the row exceed all others."""
    v = at + tl.arange(0, BLOCK)
    x = tl.div_rn(tl.load(row + v, v < vocab, float("-inf")).to(tl.float32) - peak, temperature)
    return v, x, tl.where(v < vocab, tl.abs(x).to(tl.int32, bitcast=True), 0x7FFFFFFF)


@triton.jit
def _smallest_key(row, vocab, peak, temperature, target, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """The smallest key with enough tokens (``COUNT``) or probability at and below it."""
    low = tl.program_id(0).to(tl.int64) * 0
    for step in range(11):
        shift = 30 - 3 * step
        ends = low + ((tl.arange(0, PARTS) + 1).to(tl.int64) << shift) - 1  # the last key of each part
        sums = tl.zeros((PARTS, BLOCK), tl.float32)
        for at in range(0, vocab, BLOCK):
            _, x, key = _keys(row, at, vocab, peak, temperature, BLOCK)
            weight = tl.where(key < 0x7FFFFFFF, 1.0 if COUNT else tl.exp(x), 0.0)
            sums += tl.where(key[None, :] <= ends[:, None], weight[None, :], 0.0)
        short = tl.sum(sums, 1) < target
        low += tl.minimum(tl.sum(short.to(tl.int64), 0), PARTS - 1) << shift
    return low


@triton.jit
def _below_and_at(row, vocab, peak, temperature, limit, BLOCK: tl.constexpr):
    """(probability and number of the tokens with keys below ``limit``, number of those with it)."""
    mass, below, ties = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.int32), tl.zeros((BLOCK,), tl.int32)
    for at in range(0, vocab, BLOCK):
        v, x, key = _keys(row, at, vocab, peak, temperature, BLOCK)
        mass += tl.where(key < limit, tl.exp(x), 0.0)
        below += (key < limit).to(tl.int32)
        ties += ((key == limit) & (v < vocab)).to(tl.int32)
    return tl.sum(mass, 0), tl.sum(below, 0), tl.sum(ties, 0)


@triton.jit
def _sample(logits_ptr, args_ptr, tokens_ptr, vocab, stride, none, NUM_ARGS: tl.constexpr, BLOCK: tl.constexpr):
    row = logits_ptr + tl.program_id(0).to(tl.int64) * stride
    args = args_ptr + tl.program_id(0) * NUM_ARGS
    temperature, top_k = tl.load(args).to(tl.float32), tl.load(args + 1).to(tl.int32)
    top_p, log_min_p = tl.load(args + 2).to(tl.float32), tl.load(args + 3).to(tl.float32)

    top = tl.full((BLOCK,), float("-inf"), tl.float32)
    index = tl.zeros((BLOCK,), tl.int32)
    for at in range(0, vocab, BLOCK):
        v = at + tl.arange(0, BLOCK)
        x = tl.load(row + v, v < vocab, float("-inf")).to(tl.float32)
        x = tl.where(x == x, x, float("inf"))  # noqa: PLR0124 - NaN
        index = tl.where(x > top, v, index)
        top = tl.maximum(top, x)
    peak = tl.max(top, 0)
    token = tl.min(tl.where(top == peak, index, vocab), 0)
    finite = (peak > float("-inf")) & (peak < float("inf"))

    if finite & (temperature > 0):
        limit = tl.program_id(0).to(tl.int64) * 0 + 0x7F800000  # the key of -inf: no token is dropped
        kept_ties = vocab
        if top_k > 0 and top_k < vocab:
            limit = _smallest_key(row, vocab, peak, temperature, top_k.to(tl.float32), True, BLOCK)
        if top_p < 1:
            mass, below, ties = _below_and_at(row, vocab, peak, temperature, limit, BLOCK)
            at_limit = tl.exp(-limit.to(tl.int32).to(tl.float32, bitcast=True))
            if top_k > 0 and top_k < vocab:
                ties = tl.minimum(ties, top_k - below)
                kept_ties = ties
            target = top_p * (mass + ties.to(tl.float32) * at_limit)
            nucleus = _smallest_key(row, vocab, peak, temperature, target, False, BLOCK)
            mass, below, _ = _below_and_at(row, vocab, peak, temperature, nucleus, BLOCK)
            each = tl.exp(-nucleus.to(tl.int32).to(tl.float32, bitcast=True))
            needed = tl.maximum(tl.minimum(tl.ceil((target - mass) / each), vocab.to(tl.float32)), 1.0).to(tl.int32)
            kept_ties = tl.where(nucleus < limit, needed, tl.minimum(needed, kept_ties))
            limit = tl.minimum(nucleus, limit)
        elif top_k > 0 and top_k < vocab:
            _, below, _ = _below_and_at(row, vocab, peak, temperature, limit, BLOCK)
            kept_ties = top_k - below

        seed_low, seed_high = tl.load(args + 4).to(tl.int64).to(tl.int32), tl.load(args + 5).to(tl.int64).to(tl.int32)
        noise = lowbias32(lowbias32(lowbias32(seed_low) ^ seed_high) ^ tl.load(args + 6).to(tl.int64).to(tl.int32))
        best = tl.full((BLOCK,), float("-inf"), tl.float32)
        index = tl.zeros((BLOCK,), tl.int32)
        seen_ties = tl.program_id(0) * 0
        for at in range(0, vocab, BLOCK):
            v, x, key = _keys(row, at, vocab, peak, temperature, BLOCK)
            tie = (key == limit) & (v < vocab)
            kept = (key < limit) | tie
            if tl.max(kept.to(tl.int32), 0) > 0:
                if kept_ties < vocab:
                    kept = (key < limit) | (tie & (seen_ties + tl.cumsum(tie.to(tl.int32), 0) <= kept_ties))
                    seen_ties += tl.sum(tie.to(tl.int32), 0)
                kept = kept & ((x >= log_min_p) | (key == 0))
                bits = lowbias32(noise ^ lowbias32(lowbias32(v)))
                uniform = (bits.to(tl.float64) + (2147483648.0 + 0.5)) * (1.0 / 4294967296.0)
                score = tl.where(kept, x - tl.log((-tl.log(uniform)).to(tl.float32)), float("-inf"))
                index = tl.where(score > best, v, index)
                best = tl.maximum(best, score)
        token = tl.min(tl.where(best == tl.max(best, 0), index, vocab), 0)
    tl.store(tokens_ptr + tl.program_id(0), tl.where(finite, token, none).to(tl.int64))


def sample(logits_RV: Tensor, args_RA: Tensor, none: int) -> Tensor:
    """tokens_R (see :func:`sampling.sample`)."""
    R, V = logits_RV.shape
    logits_RV = logits_RV if logits_RV.stride(1) == 1 else logits_RV.contiguous()
    tokens_R = logits_RV.new_empty(R, dtype=torch.int64)
    if R:
        block = min(MAX_BLOCK, triton.next_power_of_2(V))
        _sample[R,](
            logits_RV, args_RA.contiguous(), tokens_R, V, logits_RV.stride(0), none,
            NUM_ARGS=NUM_ARGS, BLOCK=block, num_warps=max(1, block // 256),
        )  # fmt: skip
    return tokens_R
