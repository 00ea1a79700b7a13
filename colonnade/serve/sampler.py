"""The next token of each request from its row of logits.

    greedy      argmax_i x_i                                            (temperature 0)
    sampled     argmax_i (x_i / temperature - log e_i),  e_i ~ Exp(1)   over the tokens kept by top-k, top-p, min-p

The second line draws from softmax(x / temperature) exactly: it is the Gumbel-max trick (Maddison 2014), the first
arrival among exponential clocks of rate p_i. Unlike the inversion of a cumulative sum it is insensitive to the last
bits of the logits: a change of relative size ε flips the draw with a probability of about ε, not of ε for every token
of the vocabulary. So in float32 a seed gives the same text whatever else is in the batch, although matrix products of
different batch sizes round differently (ε about 1e-6). In bf16 they differ by 1e-2, and text, greedy text too, may.

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

FIRST_LOOK = 256
"""Tokens in which a nucleus (top-p) is looked for before more are sorted."""

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
    k_of = [min(k, V) or V for k in top_k]
    cut = [r for r in range(len(k_of)) if k_of[r] < V or top_p[r] < 1]
    if cut:
        best, index = _likeliest(x_RV[cut], [k_of[r] for r in cut], [top_p[r] for r in cut])
        kept_RV = torch.full((len(cut), V), -math.inf, dtype=x_RV.dtype, device=x_RV.device)
        x_RV = x_RV.index_copy(0, torch.tensor(cut, device=x_RV.device), kept_RV.scatter_(1, index, best))
    if any(min_p):
        floor = _column([math.log(p) if p else -math.inf for p in min_p], x_RV)
        x_RV = x_RV.masked_fill(x_RV < floor, -math.inf)  # p_i < min_p · p_max, as x_max is 0
    return x_RV


def _likeliest(x_RV: Tensor, top_k: Sequence[int], top_p: Sequence[float]) -> tuple[Tensor, Tensor]:
    """The kept tokens' values and indices, likeliest first, padded with -inf: both (R, as many as needed).

    A nucleus is small as a rule, and sorting a whole vocabulary costs milliseconds a row on a CPU: look at a few
    hundred tokens first, and at more only if some row's mass is not reached.
    """
    V = x_RV.shape[1]
    k, p = _column(top_k, x_RV), _column(top_p, x_RV)
    whole = x_RV.logsumexp(-1, keepdim=True)
    width = min(V, max(FIRST_LOOK, *(k for k in top_k if k < V), 0))
    while True:
        best, index = x_RV.topk(width)
        rank = torch.arange(width, device=x_RV.device)
        best = best.masked_fill(rank >= k, -math.inf)
        probability = (best - torch.where(k < V, best.logsumexp(-1, keepdim=True), whole)).exp()
        before = probability.cumsum(-1) - probability  # the mass of the likelier ones; 0 for the first
        if width == V or bool(((before[:, -1:] >= p) | (k <= width)).all()):
            return best.masked_fill((before >= p) & (rank > 0), -math.inf), index
        width = min(V, 16 * width)


def _draw(logits_RV: Tensor, requests: Sequence[Request]) -> Tensor:
    params = [request.params for request in requests]
    x_RV = logits_RV if logits_RV.dtype == torch.float64 else logits_RV.float()
    x_RV = x_RV - x_RV.amax(-1, keepdim=True)
    x_RV = x_RV / _column([max(p.temperature, SMALLEST_TEMPERATURE) for p in params], x_RV)
    x_RV = truncate(x_RV, [p.top_k for p in params], [p.top_p for p in params], [p.min_p for p in params])
    return (x_RV - _log_clocks(requests, x_RV)).argmax(-1)


def _log_clocks(requests: Sequence[Request], like_RV: Tensor) -> Tensor:
    """log e_RV of exponential noise e = -log u, row r by request r's seed and position alone.

    Uniform numbers of 53 bits and their logarithm in float64: with float32's 24 bits, one step in a few hundred would
    see an e of exactly 0 somewhere in a large vocabulary, and emit that token however improbable it is.
    """
    u_RV = torch.empty(like_RV.shape, dtype=torch.float64, device=like_RV.device)
    generator = torch.Generator(like_RV.device)
    for row_V, request in zip(u_RV, requests, strict=True):
        row_V.uniform_(generator=generator.manual_seed(_key(request.seed, request.generated)))
    e_RV = u_RV.clamp_min_(torch.finfo(torch.float64).tiny).log_().neg_()
    return e_RV.to(like_RV.dtype).log_()


def _key(seed: int, index: int) -> int:
    """A well-mixed generator seed: torch's CPU generator uses 32 bits of it, and neighbours must not be alike."""
    digest = blake2b(seed.to_bytes(8, "little", signed=True) + index.to_bytes(8, "little"), digest_size=4).digest()
    return int.from_bytes(digest, "little")


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]
