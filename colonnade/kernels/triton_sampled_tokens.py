"""Sampling with temperature, top-k, top-p and min-p in one launch, without sorting (see :func:`sampling.sample`).

Plain torch takes forty launches, and with top-p sorts the vocabulary. Here one program handles a row:

    peak      the maximum logit m;  x_i = (l_i - m) / temperature
    keys      the bits of |l_i - m| as an integer: a small key is a large logit
    top-k     the smallest key k with count(keys <= k) >= top_k
    top-p     the smallest key k with Σ exp(x_i) over keys <= k at least top_p times the sum over what top-k keeps
    draw      argmax (x_i - log e_i) over the kept tokens, with the noise e_i of :mod:`~colonnade.kernels.sampling`

A search determines three bits of the key in each pass over the row, which sums up to seven limits at once. Of equal
logits at the limit, those with the lowest ids are kept, as a stable sort would. No sum depends on another row.
FlashInfer's sampler rejects and draws again instead (Ye 2025, arXiv 2501.01005), so its token depends on the number of
rounds; the noise here is a function of the seed, the position and the token.
"""

import math

import torch
import triton
from torch import Tensor
from triton import language as tl

from colonnade.kernels.sampling import NUM_ARGS
from colonnade.kernels.triton_dropout import lowbias32
from colonnade.kernels.triton_sampling import argmax

MAX_BLOCK, MAX_DRAW_BLOCK = 1 << 13, 1 << 12
"""Logits per block of a search, and of the draw, whose logarithms are in float64."""

LOG2_E = tl.constexpr(math.log2(math.e))

MAX_NOISE = tl.constexpr(22.9)
"""No -log e is larger, since u < 1 - 2^-33."""


@triton.jit
def _ids(at, BLOCK: tl.constexpr):
    """The ids of a block, four in a row, which one thread loads and adds up."""
    return at + tl.arange(0, BLOCK // 4)[:, None] * 4 + tl.arange(0, 4)[None, :]


@triton.jit
def _keys(row, v, vocab, peak):
    """Logits minus ``peak`` and keys of the ids ``v``; keys outside the row exceed all others."""
    x = tl.load(row + v, v < vocab, float("-inf")).to(tl.float32) - peak
    return x, tl.where(v < vocab, tl.abs(x).to(tl.int32, bitcast=True), 0x7FFFFFFF)


@triton.jit
def _probability_at(key, scale):
    """That of a token with ``key``, relative to the most probable one."""
    return tl.exp2(-key.to(tl.float32, bitcast=True) * scale)


@triton.jit
def _mass(weight, key, last):
    return tl.sum(tl.where(key <= last, weight, 0.0), 1)


@triton.jit
def _smallest_key(row, vocab, peak, scale, target, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """The smallest key with enough tokens (``COUNT``) or probability at and below it."""
    low = tl.program_id(0) * 0
    for step in range(11):
        size = 1 << tl.maximum(28 - 3 * step, 0)  # keys in each of eight parts
        zero = tl.zeros((BLOCK // 4,), tl.float32)
        sum1, sum2, sum3, sum4, sum5, sum6, sum7 = zero, zero, zero, zero, zero, zero, zero
        for at in range(0, vocab, BLOCK):
            x, key = _keys(row, _ids(at, BLOCK), vocab, peak)
            weight = (key < 0x7FFFFFFF).to(tl.float32) if COUNT else tl.exp2(x * scale)
            end = low - 1
            sum1 += _mass(weight, key, end + size)
            sum2 += _mass(weight, key, end + 2 * size)
            sum3 += _mass(weight, key, end + 3 * size)
            sum4 += _mass(weight, key, end + 4 * size)
            sum5 += _mass(weight, key, end + 5 * size)
            sum6 += _mass(weight, key, end + 6 * size)
            sum7 += _mass(weight, key, end + 7 * size)
        parts = (tl.sum(sum1, 0) < target).to(tl.int32) + (tl.sum(sum2, 0) < target).to(tl.int32)
        parts += (tl.sum(sum3, 0) < target).to(tl.int32) + (tl.sum(sum4, 0) < target).to(tl.int32)
        parts += (tl.sum(sum5, 0) < target).to(tl.int32) + (tl.sum(sum6, 0) < target).to(tl.int32)
        parts += (tl.sum(sum7, 0) < target).to(tl.int32)
        low += parts * size
    return low


@triton.jit
def _below_and_at(row, vocab, peak, scale, limit, BLOCK: tl.constexpr):
    """(probability and number of the tokens with keys below ``limit``, number of those with it)."""
    mass = tl.zeros((BLOCK // 4,), tl.float32)
    below, ties = tl.zeros((BLOCK // 4,), tl.int32), tl.zeros((BLOCK // 4,), tl.int32)
    for at in range(0, vocab, BLOCK):
        x, key = _keys(row, _ids(at, BLOCK), vocab, peak)
        mass += tl.sum(tl.where(key < limit, tl.exp2(x * scale), 0.0), 1)
        below += tl.sum((key < limit).to(tl.int32), 1)
        ties += tl.sum((key == limit).to(tl.int32), 1)
    return tl.sum(mass, 0), tl.sum(below, 0), tl.sum(ties, 0)


@triton.jit
def _limit(row, vocab, peak, scale, top_k, top_p, BLOCK: tl.constexpr):
    """The largest key that is kept, and how many of the tokens with it."""
    limit = tl.program_id(0) * 0 + 0x7F800000  # the key of -inf: all tokens
    kept_ties = limit * 0 + vocab
    cut = (top_k > 0) & (top_k < vocab)
    if cut:
        limit = _smallest_key(row, vocab, peak, scale, top_k.to(tl.float32), True, BLOCK)
    if cut | (top_p < 1):
        mass, below, ties = _below_and_at(row, vocab, peak, scale, limit, BLOCK)
        kept_ties = tl.where(cut, tl.minimum(ties, top_k - below), ties)
        if top_p < 1:
            target = top_p * (mass + kept_ties.to(tl.float32) * _probability_at(limit, scale))
            nucleus = _smallest_key(row, vocab, peak, scale, target, False, BLOCK)
            mass, below, ties = _below_and_at(row, vocab, peak, scale, nucleus, BLOCK)
            needed = tl.ceil((target - mass) / _probability_at(nucleus, scale))
            needed = tl.maximum(tl.minimum(needed, ties.to(tl.float32)), 1.0).to(tl.int32)
            kept_ties = tl.where(nucleus < limit, needed, tl.minimum(needed, kept_ties))
            limit = tl.minimum(nucleus, limit)
    return limit, kept_ties


@triton.jit
def _draw(row, vocab, peak, temperature, limit, kept_ties, log_min_p, noise, BLOCK: tl.constexpr):
    """The kept token with the highest score."""
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    index = tl.zeros((BLOCK,), tl.int32)
    best_so_far = peak * 0.0 - 1e30
    seen_ties = kept_ties * 0
    for at in range(0, vocab, BLOCK):
        v = at + tl.arange(0, BLOCK)
        x, key = _keys(row, v, vocab, peak)
        x = tl.div_rn(x, temperature)
        tie = key == limit
        kept = ((key < limit) | tie) & ((x >= log_min_p) | (key == 0))
        # In most blocks no token could win with any noise: they need no logarithms.
        if tl.max(tl.where(kept, x, float("-inf")), 0) + MAX_NOISE >= best_so_far:
            if limit < 0x7F800000:
                kept = kept & ((key < limit) | (seen_ties + tl.cumsum(tie.to(tl.int32), 0) <= kept_ties))
            bits = lowbias32(noise ^ lowbias32(lowbias32(v)))
            uniform = (bits.to(tl.float64) + (2147483648.0 + 0.5)) * (1.0 / 4294967296.0)
            score = tl.where(kept, x - tl.log((-tl.log(uniform)).to(tl.float32)), float("-inf"))
            index = tl.where(score > best, v, index)
            best = tl.maximum(best, score)
            best_so_far = tl.max(best, 0)
        if limit < 0x7F800000:
            seen_ties += tl.sum(tie.to(tl.int32), 0)
    return tl.min(tl.where(best == tl.max(best, 0), index, vocab), 0)


@triton.jit
def _sample(
    logits_ptr, args_ptr, tokens_ptr, vocab, stride, none,
    NUM_ARGS: tl.constexpr, BLOCK: tl.constexpr, DRAW_BLOCK: tl.constexpr,
):  # fmt: skip
    row = logits_ptr + tl.program_id(0).to(tl.int64) * stride
    args = args_ptr + tl.program_id(0) * NUM_ARGS
    temperature, top_k = tl.load(args).to(tl.float32), tl.load(args + 1).to(tl.int32)
    top_p, log_min_p = tl.load(args + 2).to(tl.float32), tl.load(args + 3).to(tl.float32)

    peak, token, finite = argmax(row, vocab, BLOCK)
    if finite & (temperature > 0):
        limit, kept_ties = _limit(row, vocab, peak, LOG2_E / temperature, top_k, top_p, BLOCK)
        seed_low, seed_high = tl.load(args + 4).to(tl.int64).to(tl.int32), tl.load(args + 5).to(tl.int64).to(tl.int32)
        noise = lowbias32(lowbias32(lowbias32(seed_low) ^ seed_high) ^ tl.load(args + 6).to(tl.int64).to(tl.int32))
        token = _draw(row, vocab, peak, temperature, limit, kept_ties, log_min_p, noise, DRAW_BLOCK)
    tl.store(tokens_ptr + tl.program_id(0), tl.where(finite, token, none).to(tl.int64))


def sample(logits_RV: Tensor, args_RA: Tensor, none: int) -> Tensor:
    """tokens_R (see :func:`sampling.sample`)."""
    R, V = logits_RV.shape
    logits_RV = logits_RV if logits_RV.stride(1) == 1 else logits_RV.contiguous()
    tokens_R = logits_RV.new_empty(R, dtype=torch.int64)
    if R:
        block = max(16, min(MAX_BLOCK, triton.next_power_of_2(V)))
        draw = min(block, MAX_DRAW_BLOCK)
        _sample[R,](
            logits_RV, args_RA.contiguous(), tokens_R, V, logits_RV.stride(0), none,
            NUM_ARGS=NUM_ARGS, BLOCK=block, DRAW_BLOCK=draw, num_warps=max(1, block // 512),
        )  # fmt: skip
    return tokens_R
