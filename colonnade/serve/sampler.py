"""The next token of each request from its row of logits.

    greedy      argmax_i x_i                                            (temperature 0)
    sampled     argmax_i (x_i / temperature - log e_i),  e_i ~ Exp(1)   over the tokens kept by top-k, top-p, min-p

The second line draws from softmax(x / temperature) exactly: it is the Gumbel-max trick (Maddison 2014), the first
arrival among exponential clocks of rate p_i. Unlike the inversion of a cumulative sum it is insensitive to the last
bits of the logits: a change of relative size ε flips the draw with a probability of about ε, not of ε for every token
of the vocabulary. So a seed gives the same text whatever else is in the batch, although matrix products of different
batch sizes round differently.

The noise is a pure function of (seed, number of tokens generated so far), not a generator carried along, so neither
preemption nor the order of the batch can shift it. Filters are applied as in Hugging Face's generate: top-k, then top-p
on what is left, renormalised, then min-p. All of it in float32 at least.
"""

import math
from collections.abc import Sequence
from hashlib import blake2b

import torch
from torch import Tensor

from colonnade.serve.request import Request

SMALLEST_TEMPERATURE = 1e-5
"""Colder is the same as greedy in float32, but divides by zero."""

NOT_FINITE = -1
"""In place of a token, when the logits hold NaN or no finite number: there is nothing to choose from."""


def sample(logits_RV: Tensor, requests: Sequence[Request]) -> list[int]:
    """One token (or :data:`NOT_FINITE`) for each of the R requests; row r of the logits is request r's."""
    top_R, tokens_R = logits_RV.max(-1)
    drawn = [r for r, request in enumerate(requests) if not request.params.greedy]
    if drawn:
        # index_select with all rows would copy for nothing: the common batch is all of a kind.
        rows_RV = logits_RV if len(drawn) == len(requests) else logits_RV[drawn]
        tokens_R[drawn] = _draw(rows_RV, [requests[r] for r in drawn])
    return tokens_R.masked_fill_(~top_R.isfinite(), NOT_FINITE).tolist()


def truncate(x_RV: Tensor, top_k: Sequence[int], top_p: Sequence[float], min_p: Sequence[float]) -> Tensor:
    """``x_RV`` (logits over temperature, each row's largest 0) with -inf for the tokens that the filters drop.

    ``top_k`` 0, ``top_p`` 1 and ``min_p`` 0 keep everything. The likeliest token is always kept.
    """
    V = x_RV.shape[1]
    ks = [min(k, V) or V for k in top_k]
    cut = [r for r in range(len(ks)) if ks[r] < V or top_p[r] < 1]
    if cut:
        k_R1, p_R1 = _column([ks[r] for r in cut], x_RV), _column([top_p[r] for r in cut], x_RV)
        # Only as many columns as the largest k: sorting a whole vocabulary costs milliseconds a row on a CPU.
        best_RK, index_RK = x_RV[cut].topk(max(ks[r] for r in cut))
        rank_K = torch.arange(best_RK.shape[1], device=x_RV.device)
        best_RK = best_RK.masked_fill(rank_K >= k_R1, -math.inf)
        probability_RK = best_RK.softmax(-1)
        before_RK = probability_RK.cumsum(-1) - probability_RK  # mass of the likelier tokens; 0 for the first
        best_RK = best_RK.masked_fill((before_RK >= p_R1) & (rank_K > 0), -math.inf)
        kept_RV = torch.full((len(cut), V), -math.inf, dtype=x_RV.dtype, device=x_RV.device)
        x_RV = x_RV.index_copy(0, torch.tensor(cut, device=x_RV.device), kept_RV.scatter_(1, index_RK, best_RK))
    if any(min_p):
        floor = [math.log(p) if p else -math.inf for p in min_p]
        x_RV = x_RV.masked_fill(x_RV < _column(floor, x_RV), -math.inf)  # p_i < min_p · p_max, as x_max is 0
    return x_RV


def _draw(logits_RV: Tensor, requests: Sequence[Request]) -> Tensor:
    params = [request.params for request in requests]
    x_RV = logits_RV if logits_RV.dtype == torch.float64 else logits_RV.float()
    x_RV = x_RV - x_RV.amax(-1, keepdim=True)
    x_RV = x_RV / _column([max(p.temperature, SMALLEST_TEMPERATURE) for p in params], x_RV)
    x_RV = truncate(x_RV, [p.top_k for p in params], [p.top_p for p in params], [p.min_p for p in params])
    return (x_RV - _clocks(requests, x_RV).log()).argmax(-1)


def _clocks(requests: Sequence[Request], like_RV: Tensor) -> Tensor:
    """e_RV: exponential noise, row r by request r's seed and position alone."""
    e_RV = torch.empty_like(like_RV)
    generator = torch.Generator(like_RV.device)
    for row_V, request in zip(e_RV, requests, strict=True):
        row_V.exponential_(generator=generator.manual_seed(_key(request.seed, request.generated)))
    return e_RV.clamp_min_(torch.finfo(e_RV.dtype).tiny)


def _key(seed: int, index: int) -> int:
    """A well-mixed generator seed: torch's CPU generator uses 32 bits of it, and neighbours must not be alike."""
    digest = blake2b(seed.to_bytes(8, "little", signed=True) + index.to_bytes(8, "little"), digest_size=4).digest()
    return int.from_bytes(digest, "little")


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]
