"""Log-likelihoods of continuations, many in one forward pass.

Requests are laid flat without padding, longest first, up to a budget of tokens. Requests whose inputs are the same (the
answers of one token to one question) share one sequence. Rank 0 decides what is run and sends it to the others, which
:meth:`Scorer.follow`; the logits stay sharded (:class:`~colonnade.model.TokenLogprobs`).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from colonnade.config import plural
from colonnade.errors import ConfigError, RequestError
from colonnade.model import Packed, Stream, TokenLogprobs, Transformer
from colonnade.serve.model_inputs import broadcast_message, receive_message

BUDGET_TOKENS = {"cpu": 2048, "cuda": 16384}
"""Tokens of one forward pass."""
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


class _Sequence(NamedTuple):
    """One sequence of a forward pass, with the requests that it answers."""

    tokens: tuple[int, ...]
    requests: list[tuple[int, list[int]]]
    """(number, targets); the targets follow the last tokens."""


@dataclass
class Scorer:
    """Scores requests with ``model``, on all ranks of its layout."""

    model: Transformer
    budget_tokens: int = 0
    """Tokens of one forward pass; 0: :data:`BUDGET_TOKENS` of the device."""

    def __post_init__(self) -> None:
        if not self.model.config.causal:
            raise ConfigError("log-likelihoods need a causal model, and this one attends in both directions")
        self._device = next(self.model.parameters()).device
        self.budget_tokens = self.budget_tokens or BUDGET_TOKENS[self._device.type]
        self._ranks = self.model.axes.token_replicas

    def score(
        self, requests: Sequence[Request], progress: Callable[[int, int], None] = lambda done, total: None
    ) -> list[LogLikelihood]:
        """On rank 0: the log-likelihood of each request; contexts are cut on the left to the model's context."""
        sequences = self._sequences(requests)
        results: list[LogLikelihood | None] = [None] * len(requests)
        done = 0
        for batch in self._batches(sequences):
            rows, targets, owners, start = list[int](), list[int](), list[int](), 0
            for sequence in batch:
                start += len(sequence.tokens)
                for number, wanted in sequence.requests:
                    rows += range(start - len(wanted), start)
                    targets += wanted
                    owners += [number] * len(wanted)
            lengths = [len(sequence.tokens) for sequence in batch]
            tokens = [token for sequence in batch for token in sequence.tokens]
            broadcast_message(self._ranks, SCORE, [len(lengths), len(rows), *lengths, *rows, *targets, *tokens])
            logp_R, greedy_R = self._run(lengths, rows, targets, tokens)
            sums = torch.zeros(len(requests), dtype=torch.float64).index_add_(0, torch.tensor(owners), logp_R)
            misses = torch.zeros(len(requests)).index_add_(0, torch.tensor(owners), (~greedy_R).float())
            for number in dict.fromkeys(owners):
                results[number] = LogLikelihood(float(sums[number]), not misses[number])
            done += sum(len(sequence.requests) for sequence in batch)
            progress(done, len(requests))
        return [LogLikelihood(0.0, True) if each is None else each for each in results]

    def follow(self, generate: Callable[[], None]) -> None:
        """On ranks above 0: run what rank 0 sends; ``generate`` follows its engine; until :meth:`stop`."""
        while (message := receive_message(self._ranks))[0] != STOP:
            if message[0] == GENERATE:
                generate()
                continue
            numbers = message[1]
            sequences, count = numbers[:2]
            at, parts = 2, list[list[int]]()
            for length in (sequences, count, count):
                parts.append(numbers[at : at + length])
                at += length
            lengths, rows, targets = parts
            self._run(lengths, rows, targets, numbers[at:])

    def announce(self, kind: int) -> None:
        """On rank 0: send a message of this kind."""
        broadcast_message(self._ranks, kind)

    @torch.no_grad()
    def _run(
        self, lengths: list[int], rows: list[int], targets: list[int], tokens: list[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        device = self._device
        positions = torch.cat([torch.arange(n) for n in lengths])
        stream = Stream(torch.tensor(tokens, device=device), positions.to(device))
        head = TokenLogprobs(torch.tensor(targets, device=device), torch.tensor(rows, device=device))
        logp_R, greedy_R = self.model(stream, Packed.of(lengths, device), head)
        return logp_R.double().cpu(), greedy_R.cpu()

    def _sequences(self, requests: Sequence[Request]) -> list[_Sequence]:
        limit, found = self.model.config.context, dict[tuple[int, ...], list[tuple[int, list[int]]]]()
        for number, (context, targets) in enumerate(requests):
            if not context:
                raise RequestError(f"request {number} has no context; begin it with the tokenizer's BOS or end token")
            if len(targets) > limit:
                raise RequestError(
                    f"request {number} scores {plural(len(targets), 'token')}, more than the context of {limit}; "
                    "score it in windows"
                )
            if targets:
                tokens = tuple((context + targets)[:-1][-limit:])
                found.setdefault(tokens, []).append((number, targets))
        sequences = [_Sequence(tokens, wanted) for tokens, wanted in found.items()]
        return sorted(sequences, key=lambda each: -len(each.tokens))

    def _batches(self, sequences: Sequence[_Sequence]) -> Iterator[list[_Sequence]]:
        batch, tokens = list[_Sequence](), 0
        for sequence in sequences:
            if batch and tokens + len(sequence.tokens) > self.budget_tokens:
                yield batch
                batch, tokens = [], 0
            batch.append(sequence)
            tokens += len(sequence.tokens)
        if batch:
            yield batch
