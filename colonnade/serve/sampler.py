"""Samples the next token of each request from this rank's vocabulary shard: the end of a serving forward pass.

    greedy      argmax_i x_i                                            (temperature 0)
    sampled     argmax_i (x_i / temperature - log e_i),  e_i ~ Exp(1)   over the tokens kept by top-k, top-p, min-p

The second line samples from softmax(x / temperature) exactly: it is the Gumbel-max trick (Maddison 2014). Unlike the
inversion of a cumulative sum it is insensitive to the last bits of the logits: a change of relative size ε changes the
token with a probability of about ε, not of ε for every token of the vocabulary. So in float32 a seed gives the same
text whatever else is in the batch, although matrix products of different batch sizes round differently (ε about 1e-6).
In bf16 they differ by 1e-2, and the text, greedy text too, may change.

The maximum over the vocabulary is the maximum of the ranks' maxima, so logits are never gathered. The noise is a hash
of (seed, number of tokens generated so far, token): every rank computes it for its own tokens, and neither preemption
nor the order of the batch changes it. Filters look at a few of each rank's most probable tokens, and at more only if
those do not reach the nucleus; they are applied in the order of Hugging Face's generate: top-k, then top-p on the
renormalised rest, then min-p. Everything is computed in float32 or float64, and every rank gets the same tokens.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from colonnade.kernels.device import upload
from colonnade.kernels.registry import choose
from colonnade.kernels.sampling import log_exponential_noise, sample_noise
from colonnade.model.output_heads import OutputProjection, local_logits
from colonnade.model.token_logprobs import TokenScores, score_logits, score_rows
from colonnade.parallel.axis import SOLO, Axis
from colonnade.serve.cpu_sampling import sample_few
from colonnade.serve.logits_changes import apply_changes
from colonnade.serve.sample_args import NOT_FINITE, SampleArgs

MIN_TEMPERATURE = 1e-5
"""Lower temperatures equal greedy sampling in float32, but could divide by zero."""

INITIAL_CANDIDATES = 256
"""Tokens of each rank that are sorted at first to find the nucleus (top-p)."""

FEW_LOGITS = 1 << 17
"""Up to this number of logits a CPU samples rows without filters on one thread (:func:`sample_few`)."""


class PromptTargets(NamedTuple):
    """Prompt tokens with requested log-probabilities."""

    rows_S: Tensor
    """The tokens of the stream before them."""
    targets_S: Tensor
    alternatives: int


class Sampled(NamedTuple):
    """The result of a forward pass."""

    tokens_R: Tensor
    """int64, equal on every rank; :data:`NOT_FINITE` for a row without a token that can be sampled."""
    scores: TokenScores | None = None
    """Of the sampled tokens with requested log-probabilities, in order."""
    prompt: TokenScores | None = None
    """Of :class:`PromptTargets`."""


@dataclass(frozen=True)
class NextTokens:
    """A model head that samples a token after each of the rows ``index_R`` of the stream."""

    index_R: Tensor
    sample_args: Sequence[SampleArgs]
    prompt: PromptTargets | None = None
    rowwise: bool = False
    """Sample each row separately (:func:`sample_rowwise`)."""

    def __call__(self, x_tD: Tensor, T: int, onto: OutputProjection) -> Sampled:
        """The tokens and the log-probabilities that are wanted."""
        logits_Rv = local_logits(x_tD, T, self.index_R, onto)
        sampled = sample_and_score(logits_Rv, self.sample_args, onto.axes.tp, onto.vocab_size, rowwise=self.rowwise)
        if self.prompt is None:
            return sampled
        rows_S, targets_S, top = self.prompt
        return sampled._replace(prompt=score_rows(x_tD, T, rows_S, targets_S, onto, top=top, rowwise=self.rowwise))


def sample_and_score(
    logits_Rv: Tensor, args: Sequence[SampleArgs], tp: Axis, vocab_size: int, *, rowwise: bool = False
) -> Sampled:
    """Sample, after the changes of each row, and score the tokens of the rows with requested log-probabilities."""
    changed_Rv = apply_changes(logits_Rv, args, tp.part(vocab_size)[0])
    tokens_R = (sample_rowwise if rowwise else sample)(changed_Rv, args, tp, vocab_size)
    rows = [r for r, each in enumerate(args) if each.logprobs >= 0]
    if not rows:
        return Sampled(tokens_R)
    which = slice(None) if len(rows) == len(args) else upload(rows, torch.int64, logits_Rv.device)
    top = max(each.logprobs for each in args)
    scored_Rv = logits_Rv[which]
    divisors = [max(args[r].temperature, MIN_TEMPERATURE) if args[r].tempered else 1.0 for r in rows]
    if any(divisor != 1.0 for divisor in divisors):
        exact = torch.promote_types(scored_Rv.dtype, torch.float32)
        scored_Rv = scored_Rv.to(exact) / upload(divisors, exact, scored_Rv.device)[:, None]
    return Sampled(tokens_R, score_logits(scored_Rv, tokens_R[which], tp, vocab_size, top=top, rowwise=rowwise))


def sample(
    logits_Rv: Tensor,
    args: Sequence[SampleArgs],
    tp: Axis = SOLO,
    vocab_size: int | None = None,
    *,
    rowwise: bool = False,
) -> Tensor:
    """tokens_R (or :data:`NOT_FINITE`), int64, equal on every rank, from logits sharded over ``tp``.

    ``rowwise``: without top-k and top-p, no rounding depends on another row.
    """
    V = vocab_size or logits_Rv.shape[1]
    if tp.size == 1 and all(each.greedy for each in args):
        return choose("greedy_tokens", logits_Rv.device.type, logits_Rv.dtype)(logits_Rv, NOT_FINITE)
    if tp.size == 1 and logits_Rv.is_cuda:
        args_RA = upload([kernel_args(each) for each in args], torch.float64, logits_Rv.device)
        return choose("sampled_tokens", "cuda", logits_Rv.dtype)(logits_Rv, args_RA, NOT_FINITE)
    simple = not any(each.greedy or each.filtered or each.min_p for each in args)
    if tp.size == 1 and logits_Rv.device.type == "cpu" and simple and logits_Rv.numel() <= FEW_LOGITS:
        temperatures = [max(each.temperature, MIN_TEMPERATURE) for each in args]
        seeds, indices = [each.seed for each in args], [each.index for each in args]
        return sample_few(logits_Rv, temperatures, seeds, indices, NOT_FINITE, rowwise=rowwise)
    shard = -(-V // tp.size)
    x_Rv = logits_Rv if logits_Rv.dtype == torch.float64 else logits_Rv.float()
    if missing := shard - x_Rv.shape[1]:  # the last rank may have fewer tokens, or none
        x_Rv = F.pad(x_Rv, (0, missing), value=-math.inf)
    first = tp.part(V)[0]
    top_R, column_R = x_Rv.max(-1)
    # Which column max() returns for a NaN is not specified; for infinity it is.
    best = _gather_ranks(
        torch.stack([top_R.nan_to_num(math.inf, math.inf, -math.inf), (first + column_R).to(top_R)], 1), tp
    )
    peak_R, winner_R = best[..., 0].max(1)
    tokens_R = best[..., 1].gather(1, winner_R[:, None]).squeeze(1).long()
    for filtered, run in ((False, partial(_sample_unfiltered, rowwise=rowwise)), (True, _sample_filtered)):
        rows = [r for r, each in enumerate(args) if not each.greedy and each.filtered == filtered]
        if rows:
            # Usually all requests of a batch are of one kind, and nothing is copied.
            which = slice(None) if len(rows) == len(args) else upload(rows, torch.int64, x_Rv.device)
            chosen, tensors = x_Rv[which], SamplingTensors.of([args[r] for r in rows], x_Rv)
            tokens_R[which] = run((chosen - peak_R[which, None]) / tensors.temperature, tensors, first, tp)
    return tokens_R.masked_fill(~peak_R.isfinite(), NOT_FINITE)


def kernel_args(args: SampleArgs) -> tuple[float, ...]:
    """The columns of :func:`kernels.sampling.sample`."""
    temperature = 0.0 if args.greedy else max(args.temperature, MIN_TEMPERATURE)
    log_min_p = math.log(args.min_p) if args.min_p else -math.inf
    seed, low = args.seed, (1 << 32) - 1
    return temperature, args.top_k, args.top_p, log_min_p, seed & low, seed >> 32 & low, args.index


def sample_rowwise(
    logits_Rv: Tensor, args: Sequence[SampleArgs], tp: Axis = SOLO, vocab_size: int | None = None
) -> Tensor:
    """Like :func:`sample`, one row at a time if any are summed: no rounding depends on another row."""
    if (tp.size == 1 and logits_Rv.is_cuda) or not any(each.filtered for each in args):
        return sample(logits_Rv, args, tp, vocab_size, rowwise=True)  # a kernel has one program per row
    return torch.cat([sample(logits_Rv[r : r + 1], [each], tp, vocab_size) for r, each in enumerate(args)])


@dataclass(frozen=True)
class SamplingTensors:
    """The sampling arguments of R requests as (R, 1) tensors."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    log_min_p: Tensor
    noise_R: Tensor
    """int32: a hash of each request's seed and token index."""
    max_top_k: int
    """The largest top-k."""
    all_top_k: bool
    """Whether every request has a top-k."""

    @staticmethod
    def of(args: Sequence[SampleArgs], like: Tensor) -> "SamplingTensors":
        """In the dtype and on the device of the logits ``like``."""
        seed_R, index_R = upload([[each.seed, each.index] for each in args], torch.int64, like.device).T
        columns = [
            [max(each.temperature, MIN_TEMPERATURE) for each in args],
            [each.top_k or math.inf for each in args],
            [each.top_p for each in args],
            [math.log(each.min_p) if each.min_p else -math.inf for each in args],
        ]
        noise_R = sample_noise(seed_R, index_R)
        top_ks = [each.top_k for each in args]
        temperature, top_k, top_p, log_min_p = upload(columns, like.dtype, like.device).unsqueeze(-1)
        return SamplingTensors(temperature, top_k, top_p, log_min_p, noise_R, max(top_ks), all(top_ks))


def _sample_unfiltered(x_Rv: Tensor, tensors: SamplingTensors, first: int, tp: Axis, *, rowwise: bool) -> Tensor:
    """tokens_R of rows without top-k and top-p; the maximum of each whole row is 0."""
    ids_v = torch.arange(first, first + x_Rv.shape[1], device=x_Rv.device)
    score_Rv = x_Rv - log_exponential_noise(tensors.noise_R, ids_v, x_Rv.dtype, rowwise=rowwise)
    best_R, column_R = score_Rv.masked_fill_(x_Rv < tensors.log_min_p, -math.inf).max(-1)
    best = _gather_ranks(torch.stack([best_R, (first + column_R).to(best_R)], 1), tp)
    return best[..., 1].gather(1, best[..., :1].argmax(1)).squeeze(1).long()


def _sample_filtered(x_Rv: Tensor, tensors: SamplingTensors, first: int, tp: Axis) -> Tensor:
    """tokens_R of rows with top-k or top-p; the maximum of each whole row is 0."""
    x_RC, ids_RC = top_candidates(x_Rv, tensors, first, tp)
    score_RC = x_RC - log_exponential_noise(tensors.noise_R, ids_RC, x_Rv.dtype)
    return ids_RC.gather(1, score_RC.argmax(-1, keepdim=True)).squeeze(1)


def top_candidates(
    x_Rv: Tensor, tensors: SamplingTensors, first: int, tp: Axis, *, allow_retry: bool | None = None
) -> tuple[Tensor, Tensor]:
    """Values and ids of the tokens that pass the filters, in descending order, padded with -inf: both (R, C).

    A nucleus is usually small, and sorting a whole vocabulary takes milliseconds per row on a CPU: a few hundred tokens
    of each rank are sorted first, and more only if some row's nucleus is not complete. That retry makes the host wait
    for the device. A GPU sorts all tokens at once instead (``allow_retry`` is False), without synchronisation; if every
    row has a top-k, the first tokens are always enough.
    """
    shard = x_Rv.shape[1]
    log_total = _gather_ranks(x_Rv.logsumexp(-1)[:, None], tp)[..., 0].logsumexp(-1, keepdim=True)
    retry = not x_Rv.is_cuda if allow_retry is None else allow_retry
    width = min(shard, max(INITIAL_CANDIDATES, tensors.max_top_k)) if retry or tensors.all_top_k else shard
    while True:
        best, column = x_Rv.topk(width)
        best, ids = _merge_ranks(best, first + column, tp)
        # Only the first `width` of the merged tokens are certain: a rank may hold more that belong after them.
        certain = best.shape[1] if width == shard else width
        best, ids = best[:, :certain], ids[:, :certain]
        rank = torch.arange(certain, device=x_Rv.device)
        best = best.masked_fill(rank >= tensors.top_k, -math.inf)
        log_mass = torch.where(tensors.top_k.isinf(), log_total, best.logsumexp(-1, keepdim=True))
        probability = (best - log_mass).exp()
        before = probability.cumsum(-1) - probability  # the sum of the preceding ones; 0 for the first
        enough = width == shard or tensors.all_top_k
        if enough or bool(((before[:, -1:] >= tensors.top_p) | (tensors.top_k <= certain)).all()):
            # p_i < min_p · p_max, as x_max is 0
            dropped = ((before >= tensors.top_p) & (rank > 0)) | (best < tensors.log_min_p)
            return best.masked_fill(dropped, -math.inf), ids
        width = min(shard, 16 * width)


def _merge_ranks(best_RC: Tensor, ids_RC: Tensor, tp: Axis) -> tuple[Tensor, Tensor]:
    """The sorted values and ids of all ranks, sorted together."""
    if tp.size == 1:
        return best_RC, ids_RC
    best, order = _gather_ranks(best_RC, tp).flatten(1).sort(dim=-1, descending=True, stable=True)
    return best, _gather_ranks(ids_RC, tp).flatten(1).gather(1, order)


def _gather_ranks(x_RC: Tensor, tp: Axis) -> Tensor:
    """All-gather ``x_RC`` to (R, ranks, C)."""
    R, C = x_RC.shape
    return tp.join(x_RC, 1, C * tp.size).unflatten(1, (tp.size, C)) if R else x_RC[:, None]
