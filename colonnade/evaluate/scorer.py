"""Log-likelihoods of continuations, many in one forward pass.

Requests are packed without padding, longest first, up to a budget of tokens. Requests with the same context (the
continuations of one question) share its tokens: the context is run once, and each continuation attends to it and to
itself (:mod:`~colonnade.kernels.attention.shared_prefix`). Rank 0 plans the passes and sends them to the other ranks,
which run :meth:`Scorer.follow`: each data rank, a replica of the model, gets every dp-th batch. The logits stay sharded
(:class:`~colonnade.model.TokenLogprobs`).
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from typing import NamedTuple

import torch

from colonnade.config import plural
from colonnade.errors import ConfigError, RequestError
from colonnade.model import Packed, SharedPrefix, Stream, TokenLogprobs, Transformer
from colonnade.parallel.axis import SOLO, Axis
from colonnade.serve.model_inputs import broadcast_message, receive_message

BUDGET_TOKENS = {"cpu": 2048, "cuda": 16384}
"""Tokens of one forward pass."""
MIN_SHARED_TOKENS = 16
"""Minimum length of a shared context [tokens]; below this the masks cost more than they save."""
SCORE, GENERATE, STOP = 101, 102, 103
"""Kinds of message: score this; run an engine; leave the loop."""


class Request(NamedTuple):
    """Tokens to score after a context; both are lists of ids."""

    context: list[int]
    """At least one token."""
    targets: list[int]


class LogLikelihood(NamedTuple):
    """The sum of the targets' log-probabilities, and whether each is the argmax."""

    logp: float
    greedy: bool


Tokens = tuple[int, ...]


class _Answer(NamedTuple):
    """A request: its number, its targets, and where its inputs are."""

    number: int
    targets: list[int]
    context: int
    """Tokens before the first target."""
    continuation: int | None
    """The number of the continuation with the inputs after the context; None: they are in the prefix."""


class _Group(NamedTuple):
    """A sequence, the continuations that share it as their prefix, and the requests that they belong to."""

    prefix: Tokens
    continuations: list[Tokens]
    answers: list[_Answer]

    @property
    def tokens(self) -> int:
        """Tokens of the forward pass."""
        return len(self.prefix) + sum(map(len, self.continuations))


class _Pass(NamedTuple):
    """The work of one forward pass; sent to all ranks."""

    prefixes: list[int]
    """Lengths."""
    counts: list[int]
    """Continuations of each prefix."""
    continuations: list[int]
    """Lengths."""
    rows: list[int]
    targets: list[int]
    tokens: list[int]

    def pack(self) -> list[int]:
        """As one list."""
        return [*map(len, self), *chain.from_iterable(self)]

    @staticmethod
    def unpack(numbers: list[int]) -> "_Pass":
        """The inverse of :meth:`pack`."""
        ends = list(accumulate(numbers[: len(_Pass._fields)], initial=len(_Pass._fields)))
        return _Pass(*(numbers[start:end] for start, end in pairwise(ends)))


@dataclass
class Scorer:
    """Scores requests with ``model``, on all ranks of its layout."""

    model: Transformer
    budget_tokens: int = 0
    """Tokens of one forward pass; 0: :data:`BUDGET_TOKENS` of the device."""
    data: Axis = SOLO
    """Replicas of the model that share the requests."""

    def __post_init__(self) -> None:
        if not self.model.config.causal:
            raise ConfigError("log-likelihoods need a causal model, but this one attends in both directions")
        self._device = next(self.model.parameters()).device
        self.budget_tokens = self.budget_tokens or BUDGET_TOKENS[self._device.type]
        self.ranks = self.model.axes.token_replicas

    @property
    def is_leader(self) -> bool:
        """Whether this is rank 0, which has the requests."""
        return not (self.ranks.rank or self.data.rank)

    def score(
        self, requests: Sequence[Request], progress: Callable[[int, int], None] = lambda done, total: None
    ) -> list[LogLikelihood]:
        """On rank 0: the log-likelihood of each request; contexts are cut on the left to the model's context."""
        results = [LogLikelihood(0.0, True)] * len(requests)
        done = 0
        batches = list(self._batches(self._groups(requests)))
        for start in range(0, len(batches), self.data.size):
            batch = batches[start : start + self.data.size]
            passes, owners_of = zip(*map(_lay_out, batch), strict=True)
            packed = [work.pack() for work in passes]
            self.send(SCORE, [len(packed), *map(len, packed), *chain.from_iterable(packed)])
            logp_R, greedy_R = self._run_share(passes)
            owners = torch.tensor([number for owners in owners_of for number in owners])
            sums = torch.zeros(len(requests), dtype=torch.float64).index_add_(0, owners, logp_R)
            misses = torch.zeros(len(requests)).index_add_(0, owners, (~greedy_R).float())
            for number in owners.unique().tolist():
                results[number] = LogLikelihood(float(sums[number]), not misses[number])
            done += sum(len(group.answers) for each in batch for group in each)
            progress(done, len(requests))
        return results

    def follow(self, generate: Callable[[bytes], object]) -> None:
        """On other ranks: run what rank 0 sends, until it sends STOP; ``generate`` gets the data of GENERATE."""
        while True:
            if self.data.rank:
                kind, payload, data = receive_message(self.data)
            else:
                kind, payload, data = receive_message(self.ranks)
                broadcast_message(self.data, kind, payload, data)
            if kind == STOP:
                return
            if kind == GENERATE:
                generate(data)
                continue
            ends = list(accumulate(payload[1 : 1 + payload[0]], initial=1 + payload[0]))
            self._run_share([_Pass.unpack(payload[start:end]) for start, end in pairwise(ends)])

    def send(self, kind: int, payload: Sequence[int] = (), data: bytes = b"") -> None:
        """On rank 0: send a message to all others."""
        broadcast_message(self.ranks, kind, payload, data)
        broadcast_message(self.data, kind, payload, data)

    def _run_share(self, passes: Sequence[_Pass]) -> tuple[torch.Tensor, torch.Tensor]:
        """Run this replica's pass; the results of all passes, in their order."""
        logp_R, greedy_R = torch.zeros(0, dtype=torch.float64), torch.zeros(0, dtype=torch.bool)
        if self.data.rank < len(passes):
            logp_R, greedy_R = self._run(passes[self.data.rank])
        counts = [len(work.rows) for work in passes] + [0] * (self.data.size - len(passes))
        scores = self.data.all_gather_uneven_(torch.stack([logp_R, greedy_R.double()], 1), counts)
        return scores[:, 0], scores[:, 1].bool()

    @torch.no_grad()
    def _run(self, work: _Pass) -> tuple[torch.Tensor, torch.Tensor]:
        device, lengths = self._device, iter(work.continuations)
        continuations = [[next(lengths) for _ in range(count)] for count in work.counts]
        positions = [torch.arange(length) for length in work.prefixes]
        for prefix, group in zip(work.prefixes, continuations, strict=True):
            positions += [torch.arange(prefix, prefix + length) for length in group]
        stream = Stream(torch.tensor(work.tokens, device=device), torch.cat(positions).to(device))
        shared = SharedPrefix.of(work.prefixes, continuations, device) if work.continuations else None
        attend = shared or Packed.of(work.prefixes, device)
        head = TokenLogprobs(torch.tensor(work.targets, device=device), torch.tensor(work.rows, device=device))
        logp_R, greedy_R = self.model(stream, attend, head)
        return logp_R.double().cpu(), greedy_R.cpu()

    def _groups(self, requests: Sequence[Request]) -> list[_Group]:
        """Requests by their contexts, the longest first."""
        limit = self.model.config.context
        found = defaultdict[Tokens, defaultdict[Tokens, list[tuple[int, list[int]]]]](lambda: defaultdict(list))
        for number, (context, targets) in enumerate(requests):
            if not context:
                raise RequestError(f"request {number} has no context; start it with the tokenizer's BOS or end token")
            if len(targets) > limit:
                raise RequestError(
                    f"request {number} scores {plural(len(targets), 'token')}, more than the context of {limit}; "
                    "score it in windows"
                )
            if targets:
                inputs = tuple((context + targets)[:-1][-limit:])
                end = len(inputs) - len(targets) + 1
                found[inputs[:end]][inputs[end:]].append((number, targets))
        groups = [group for context, asked in found.items() for group in self._divide(context, dict(asked))]
        return sorted(groups, key=lambda group: -group.tokens)

    def _divide(self, context: Tokens, asked: dict[Tokens, list[tuple[int, list[int]]]]) -> Iterator[_Group]:
        """Groups within the budget, as few as possible; a context is shared if that saves enough tokens."""
        # The keys are the inputs after the context; targets of one token have none.
        share = len(context) >= MIN_SHARED_TOKENS and self.model.relative is None
        room = self.budget_tokens - len(context) if share else 0
        parts, size = [list[Tokens]()], 0
        for inputs in asked:
            if inputs and parts[-1] and size + len(inputs) > room:
                parts, size = [*parts, []], 0
            parts[-1].append(inputs)
            size += len(inputs)
        for part in parts:
            continuations = [inputs for inputs in part if inputs]
            places: dict[Tokens, int | None] = dict(zip(continuations, range(len(continuations)), strict=True))
            prefix = context
            if len(continuations) == 1:  # one sequence, in which a shorter continuation is a row
                prefix, continuations, places = context + continuations[0], [], {}
            answers = [
                _Answer(number, targets, len(context), places.get(inputs))
                for inputs in part
                for number, targets in asked[inputs]
            ]
            yield _Group(prefix, continuations, answers)

    def _batches(self, groups: Sequence[_Group]) -> Iterator[list[_Group]]:
        batch, tokens = list[_Group](), 0
        for group in groups:
            if batch and tokens + group.tokens > self.budget_tokens:
                yield batch
                batch, tokens = [], 0
            batch.append(group)
            tokens += group.tokens
        if batch:
            yield batch


def _lay_out(batch: Sequence[_Group]) -> tuple[_Pass, list[int]]:
    """A forward pass over all prefixes and then all continuations, and the number of the request of each row."""
    lengths = [len(group.prefix) for group in batch]
    tokens = [token for group in batch for token in group.prefix]
    rows, targets, owners, start, more = list[int](), list[int](), list[int](), 0, len(tokens)
    for group in batch:
        starts = list(accumulate(map(len, group.continuations), initial=more))
        for answer in group.answers:
            first, count = start + answer.context - 1, len(answer.targets)
            if answer.continuation is None:
                rows += range(first, first + count)
            else:
                rows += [first, *range(starts[answer.continuation], starts[answer.continuation] + count - 1)]
            targets += answer.targets
            owners += [answer.number] * count
        start, more = start + len(group.prefix), starts[-1]
        tokens += chain.from_iterable(group.continuations)
    counts = [len(group.continuations) for group in batch]
    continuations = [len(each) for group in batch for each in group.continuations]
    return _Pass(lengths, counts, continuations, rows, targets, tokens), owners
