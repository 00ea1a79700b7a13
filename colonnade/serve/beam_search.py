"""Beam search for encoder–decoders: approximately the text with the highest mean log-probability per token.

    score = Σ log p(token) / tokens^length_penalty          the end token is one of the tokens

Each of the running beams is a request of the scheduler with the tokens of one hypothesis; all share the pages of their
source. A step gives the most probable tokens after each beam: (1 + end tokens)·width, at least 2·width. Of all these
continuations the best that do not end become the beams of the next step; one that ends is finished if it is among the
best ``width``. The search ends when ``width`` have finished and no running beam scores higher at its present length (as
in transformers, whose ``early_stopping`` is False), or at the limit of tokens. Nothing is random, so a preempted search
is restarted.

Pure Python: no tensors. The scheduler moves pages (:meth:`colonnade.serve.scheduler.Scheduler.continue_search`).
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from colonnade.serve.request import Request


class Hypothesis(NamedTuple):
    """An output that ended, or reached the limit."""

    score: float
    tokens: tuple[int, ...]


class Continuation(NamedTuple):
    """A beam of the next step: ``parent`` and one more token."""

    total: float
    """Sum of the log-probabilities."""
    parent: "Request"
    token: int


def candidates(width: int, ends: int) -> int:
    """Tokens to compare after each beam: even if all end tokens come first, ``width`` others are left."""
    return max(2, 1 + ends) * width


@dataclass(slots=True)
class BeamSearch:
    """The beams of one request; ``root`` is the request that the client sent, and always one of them."""

    width: int
    length_penalty: float
    ends: frozenset[int]
    """Tokens that end a text."""
    root: "Request | None" = None
    beams: "list[Request]" = field(default_factory=list)
    delivered: tuple[int, ...] = ()
    """Tokens of the best text that another engine has delivered."""
    _totals: list[float] = field(default_factory=list)
    """Of each of ``beams``."""
    _scores: "dict[int, Sequence[tuple[int, float]]]" = field(default_factory=dict)
    """By the position in ``beams``: the most probable tokens of this step with their log-probabilities."""
    _finished: list[Hypothesis] = field(default_factory=list)

    @property
    def candidates(self) -> int:
        """Tokens with requested log-probabilities after each beam."""
        return candidates(self.width, len(self.ends))

    def start(self, root: "Request") -> None:
        """Start, or restart, with ``root`` as the only beam."""
        self.root, self.beams, self._totals, self._finished = root, [root], [0.0], []
        self._scores.clear()

    def observe(self, beam: "Request", top: "Sequence[tuple[int, float]]") -> bool:
        """Record the most probable tokens after ``beam``; True when those of all beams are known."""
        beam.held = True
        self._scores[self.beams.index(beam)] = top
        return len(self._scores) == len(self.beams)

    def advance(self, limit_tokens: int) -> "list[Continuation]":
        """The beams of the next step; empty when the search is over."""
        generated = self.beams[0].generated
        found = [
            Continuation(self._totals[i] + logp, beam, token)
            for i, beam in enumerate(self.beams)
            for token, logp in self._scores[i]
        ]
        found.sort(key=lambda each: -each.total)  # stable: earlier beams first
        self._scores.clear()
        following: list[Continuation] = []
        for rank, each in enumerate(found[: self.candidates]):
            if each.token not in self.ends:
                following.append(each)
            elif rank < self.width:
                self._finish(each, generated)
        following = following[: self.width]
        if generated >= limit_tokens:
            for each in following:
                self._finish(each, generated)
            return []
        full = len(self._finished) == self.width
        if not following or (full and following[0].total / generated**self.length_penalty <= self._finished[-1].score):
            return []
        return following

    def replace(self, beams: "list[tuple[Request, float]]") -> None:
        """Continue with these beams and their sums of log-probabilities."""
        self.beams, self._totals = [beam for beam, _ in beams], [total for _, total in beams]

    @property
    def best(self) -> tuple[int, ...]:
        """The tokens of the best text."""
        return self._finished[0].tokens

    @property
    def diverged(self) -> bool:
        """Whether the best text does not continue after the tokens that another engine has delivered."""
        count = len(self.delivered)
        return self.best[:count] != self.delivered or len(self.best) == count

    def _finish(self, each: Continuation, generated: int) -> None:
        output = each.parent.ids[len(each.parent.prompt) : -1]  # without the token that the engine sampled
        self._finished.append(Hypothesis(each.total / generated**self.length_penalty, (*output, each.token)))
        self._finished.sort(key=lambda one: -one.score)
        del self._finished[self.width :]
