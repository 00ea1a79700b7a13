"""The next token of each request, from this rank's share of the vocabulary: the last part of a serving forward pass.

    greedy      argmax_i x_i                                            (temperature 0)
    sampled     argmax_i (x_i / temperature - log e_i),  e_i ~ Exp(1)   over the tokens kept by top-k, top-p, min-p

The second line draws from softmax(x / temperature) exactly: it is the Gumbel-max trick (Maddison 2014), the first
arrival among exponential clocks of rate p_i. Unlike the inversion of a cumulative sum it is insensitive to the last
bits of the logits: a change of relative size ε flips the draw with a probability of about ε, not of ε for every token
of the vocabulary. So in float32 a seed gives the same text whatever else is in the batch, although matrix products of
different batch sizes round differently (ε about 1e-6). In bf16 they differ by 1e-2, and text, greedy text too, may.

A maximum over the vocabulary is a maximum over ranks of each one's own, so logits are never gathered. The noise is a
hash of (seed, number of tokens generated so far, token): every rank has that of its own tokens, and neither preemption
nor the order of the batch can shift it. Filters look at each rank's likeliest tokens alone, and at more of them only
where those do not reach the nucleus; they are applied as in Hugging Face's generate: top-k, then top-p on what is left,
renormalised, then min-p. All of it in float32 at least, and every rank comes to the same tokens.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from colonnade.kernels.device import upload
from colonnade.kernels.dropout import column_hash, lowbias32
from colonnade.kernels.registry import choose
from colonnade.model.head import Projection, shares
from colonnade.parallel.axis import SOLO, Axis
from colonnade.serve.sampling_params import Draw

SMALLEST_TEMPERATURE = 1e-5
"""Colder is the same as greedy in float32, but divides by zero."""

FIRST_LOOK = 256
"""Tokens of each rank in which a nucleus (top-p) is looked for before more are sorted."""

NOT_FINITE = -1
"""In place of a token, when the logits hold NaN or no finite number: there is nothing to choose from."""


@dataclass(frozen=True)
class NextTokens:
    """A head: the next tokens of the requests whose last tokens stand at ``index_R`` of the stream."""

    index_R: Tensor
    draws: Sequence[Draw]
    each: bool = False
    """Draw for each by itself (:func:`sample_each`)."""

    def __call__(self, x_tD: Tensor, T: int, onto: Projection) -> Tensor:
        """tokens_R, int64, the same on every rank."""
        draw = sample_each if self.each else sample
        return draw(shares(x_tD, T, self.index_R, onto), self.draws, onto.axes.tp, onto.vocab_size)


def sample(logits_Rv: Tensor, draws: Sequence[Draw], tp: Axis = SOLO, vocab_size: int | None = None) -> Tensor:
    """tokens_R (or :data:`NOT_FINITE`), int64, on every rank, of the ranks' shares of ``vocab_size`` logits."""
    V = vocab_size or logits_Rv.shape[1]
    if tp.size == 1 and all(draw.greedy for draw in draws):
        return choose("greedy_tokens", logits_Rv.device.type, logits_Rv.dtype)(logits_Rv, NOT_FINITE)
    share = -(-V // tp.size)
    x_Rv = logits_Rv if logits_Rv.dtype == torch.float64 else logits_Rv.float()
    if missing := share - x_Rv.shape[1]:  # the last rank may have fewer tokens, or none
        x_Rv = F.pad(x_Rv, (0, missing), value=-math.inf)
    first = tp.part(V)[0]
    top_R, place_R = x_Rv.max(-1)
    # A NaN's place among numbers is nobody's promise, infinity's is.
    each = _of_all(torch.stack([top_R.nan_to_num(math.inf, math.inf, -math.inf), (first + place_R).to(top_R)], 1), tp)
    peak_R, winner_R = each[..., 0].max(1)
    tokens_R = each[..., 1].gather(1, winner_R[:, None]).squeeze(1).long()
    for rows, pick in ((_rows(draws, filtered=False), _freely), (_rows(draws, filtered=True), _filtered)):
        if rows:
            # The common batch is all of a kind, and nothing of it is copied.
            which = slice(None) if len(rows) == len(draws) else upload(rows, torch.int64, x_Rv.device)
            chosen, asked = x_Rv[which], Asked.of([draws[r] for r in rows], x_Rv)
            scaled = (chosen - peak_R[which, None]) / asked.temperature
            tokens_R[which] = pick(scaled, asked, first, tp)
    return tokens_R.masked_fill(~peak_R.isfinite(), NOT_FINITE)


def sample_each(logits_Rv: Tensor, draws: Sequence[Draw], tp: Axis = SOLO, vocab_size: int | None = None) -> Tensor:
    """As :func:`sample`, a row at a time where sums are taken over it: their rounding then depends on no other row."""
    if all(draw.greedy for draw in draws):
        return sample(logits_Rv, draws, tp, vocab_size)
    return torch.cat([sample(logits_Rv[r : r + 1], [draw], tp, vocab_size) for r, draw in enumerate(draws)])


def _rows(draws: Sequence[Draw], *, filtered: bool) -> list[int]:
    return [r for r, draw in enumerate(draws) if not draw.greedy and draw.filtered == filtered]


@dataclass(frozen=True)
class Asked:
    """What the draws ask for, as (R, 1) tensors beside their logits."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    floor: Tensor
    """log min_p."""
    noise_R: Tensor
    """int32: what a request's seed and place bring along."""
    widest: int
    """The largest top-k."""
    bounded: bool
    """Whether each has a top-k."""

    @staticmethod
    def of(draws: Sequence[Draw], like: Tensor) -> "Asked":
        """In the precision and on the device of the logits ``like``."""
        seed_R, index_R = upload([[draw.seed, draw.index] for draw in draws], torch.int64, like.device).T
        columns = [
            [max(d.temperature, SMALLEST_TEMPERATURE) for d in draws],
            [d.top_k or math.inf for d in draws],
            [d.top_p for d in draws],
            [math.log(d.min_p) if d.min_p else -math.inf for d in draws],
        ]
        temperature, top_k, top_p, floor = upload(columns, like.dtype, like.device).unsqueeze(-1)
        return Asked(
            temperature,
            top_k,
            top_p,
            floor,
            # The seed is mixed before the index joins it: people choose 0, 1, 2, … for both.
            lowbias32(lowbias32(lowbias32(seed_R.int()) ^ (seed_R >> 32).int()) ^ index_R.int()),
            max(draw.top_k for draw in draws),
            all(draw.top_k for draw in draws),
        )


def _freely(x_Rv: Tensor, ask: Asked, first: int, tp: Axis) -> Tensor:
    """tokens_R of rows without top-k and top-p; each whole row's largest is 0."""
    ids_v = torch.arange(first, first + x_Rv.shape[1], device=x_Rv.device)
    score_Rv = (x_Rv - _log_clocks(ask.noise_R, ids_v, x_Rv.dtype)).masked_fill_(x_Rv < ask.floor, -math.inf)
    best_R, place_R = score_Rv.max(-1)
    each = _of_all(torch.stack([best_R, (first + place_R).to(best_R)], 1), tp)
    return each[..., 1].gather(1, each[..., :1].argmax(1)).squeeze(1).long()


def _filtered(x_Rv: Tensor, ask: Asked, first: int, tp: Axis) -> Tensor:
    """tokens_R of rows with top-k or top-p; each whole row's largest is 0."""
    kept_RC, ids_RC = likeliest(x_Rv, ask, first, tp)
    score_RC = kept_RC - _log_clocks(ask.noise_R, ids_RC, x_Rv.dtype)
    return ids_RC.gather(1, score_RC.argmax(-1, keepdim=True)).squeeze(1)


def likeliest(
    x_Rv: Tensor, ask: Asked, first: int, tp: Axis, *, look_again: bool | None = None
) -> tuple[Tensor, Tensor]:
    """The kept tokens' values and ids, likeliest first, -inf where there are no more: both (R, as many as needed).

    A nucleus is small as a rule, and sorting a whole vocabulary costs milliseconds a row on a CPU: look at a few
    hundred tokens of each rank first, and at more only if some row's mass is not reached. To ``look_again`` the host
    must know what the device found. A GPU sorts all at once instead, so that nobody waits for it; where each row has a
    top-k, these are enough in any case.
    """
    share = x_Rv.shape[1]
    whole = _of_all(x_Rv.logsumexp(-1)[:, None], tp)[..., 0].logsumexp(-1, keepdim=True)
    again = not x_Rv.is_cuda if look_again is None else look_again
    width = min(share, max(FIRST_LOOK, ask.widest)) if again or ask.bounded else share
    while True:
        best, place = x_Rv.topk(width)
        best, ids = _merged(best, first + place, tp)
        # Of so many nobody is missing: what comes after them may stand behind what a rank has not shown.
        sure = best.shape[1] if width == share else width
        best, ids = best[:, :sure], ids[:, :sure]
        rank = torch.arange(sure, device=x_Rv.device)
        best = best.masked_fill(rank >= ask.top_k, -math.inf)
        mass = torch.where(ask.top_k.isinf(), whole, best.logsumexp(-1, keepdim=True))
        probability = (best - mass).exp()
        before = probability.cumsum(-1) - probability  # the mass of the likelier ones; 0 for the first
        if width == share or ask.bounded or bool(((before[:, -1:] >= ask.top_p) | (ask.top_k <= sure)).all()):
            # p_i < min_p · p_max, as x_max is 0
            dropped = ((before >= ask.top_p) & (rank > 0)) | (best < ask.floor)
            return best.masked_fill(dropped, -math.inf), ids
        width = min(share, 16 * width)


def _merged(best_RC: Tensor, ids_RC: Tensor, tp: Axis) -> tuple[Tensor, Tensor]:
    """All ranks' sorted values and their ids, sorted together."""
    if tp.size == 1:
        return best_RC, ids_RC
    each = _of_all(best_RC, tp)
    best, order = each.flatten(1).sort(dim=-1, descending=True, stable=True)
    return best, _of_all(ids_RC, tp).flatten(1).gather(1, order)


def _of_all(x_RC: Tensor, tp: Axis) -> Tensor:
    """(R, ranks, C): that of every rank."""
    R, C = x_RC.shape
    return tp.join(x_RC, 1, C * tp.size).unflatten(1, (tp.size, C)) if R else x_RC[:, None]


def _log_clocks(noise_R: Tensor, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """log e of exponential noise e = -log u for the tokens ``ids``: of every row alike (v,), or (R, C).

    The uniform numbers have 32 bits and a half more, so that none is 0 or 1, and their logarithm is taken in float64:
    with float32's 24 bits, one step in a few hundred would see an e of exactly 0 somewhere in a large vocabulary, and
    emit that token however improbable it is.
    """
    u = lowbias32(noise_R[:, None] ^ column_hash(0, ids)).double().add_(2.0**31 + 0.5).mul_(2.0**-32)
    return u.log_().neg_().to(dtype).log_()
