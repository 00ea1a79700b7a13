"""Speculative decoding: guesses the next tokens of a request, which one forward pass then checks together.

    draft    here: the tokens that followed the last occurrence of the newest three tokens     (Saxena 2023)
             colonnade.serve.draft_model: those that a smaller model generates                 (Leviathan 2023)
    check    a pass decodes the newest token and the drafts, each as its own row, and samples after each
    accept   samples while they equal the next draft; the first other one replaces it

A sample is a function of the logits, the seed and the number of tokens before it (:mod:`colonnade.serve.sampler`), not
of how it was scheduled. So an accepted token is the one that decoding without drafts gives, for every seed and every
temperature: the text does not change.

Whether look-ups pay off is known before any draft is tried: each new token is compared with the look-up's guess, and
only requests with enough recent right guesses get drafts.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from colonnade.serve.request import Request

NGRAM = 3
"""Tokens that must occur again."""

INDEXED_TOKENS = 4096
"""Tokens at the end of a prompt that are searched."""

RATE_STEP = 1 / 16
"""Weight of the newest guess in the rate of right ones."""

MIN_RATE = 0.5
"""Rate of right guesses from which on drafts are tried: a wrong draft costs a row of a pass."""


class Drafter(Protocol):
    """A speculator's state for one request."""

    @property
    def active(self) -> bool:
        """Whether drafts are worth a try; the request then waits until its newest token is known."""
        ...


class Speculator(Protocol):
    """Drafts tokens for the requests of a step: first how many each may get, then, once they have pages, the drafts
    themselves.
    """

    def start(self, request: "Request") -> Drafter:
        """Called once for each request."""
        ...

    def plan(self, requests: Sequence["Request"], limits: Sequence[int], total: int, rows: int) -> list[int]:
        """The number of drafts for each request, at most its limit, and ``total`` together.

        ``requests`` decode one token each in a pass of ``rows`` decodes.
        """
        ...

    def draft(self, requests: Sequence["Request"], counts: Sequence[int]) -> list[list[int]]:
        """At most that many tokens for each request, which has pages for them."""
        ...

    def observe(self, request: "Request", accepted: int, refused: bool) -> None:
        """Called when drafts have been checked: how many were right, and whether one was wrong after them."""
        ...


class NgramSpeculator:
    """Prompt look-up for every request: the newest tokens are compared with earlier ones."""

    def __init__(self, most: int):
        self.most = most

    def start(self, request: "Request") -> "NgramDrafter":
        """A drafter that reads the request's tokens."""
        return NgramDrafter(request.ids, self.most)

    def plan(self, requests: Sequence["Request"], limits: Sequence[int], total: int, rows: int) -> list[int]:
        """As many as each look-up finds, in the order of the requests."""
        counts = []
        for request, limit in zip(requests, limits, strict=True):
            _lookup(request).update()
            counts.append(len(_lookup(request).draft(min(limit, total))))
            total -= counts[-1]
        return counts

    def draft(self, requests: Sequence["Request"], counts: Sequence[int]) -> list[list[int]]:
        """The tokens that the look-ups find."""
        return [_lookup(request).draft(count) for request, count in zip(requests, counts, strict=True)]

    def observe(self, request: "Request", accepted: int, refused: bool) -> None:
        """Nothing: each new token is compared with the look-up's guess, drafted or not."""


def _lookup(request: "Request") -> "NgramDrafter":
    assert isinstance(request.drafter, NgramDrafter)
    return request.drafter


class NgramDrafter:
    """Drafts for one request; ``ids`` is its list of tokens, to which others append."""

    def __init__(self, ids: Sequence[int], most: int):
        self.most = most
        self.rate = 0.0
        """Share of the recent tokens that the look-up guessed right."""
        self._ids = ids
        self._following: dict[tuple[int, ...], int] = {}
        """Where the token after the last occurrence of an n-gram is."""
        self._indexed = max(0, len(ids) - INDEXED_TOKENS)
        self.update()

    @property
    def active(self) -> bool:
        """Whether drafts are worth a try."""
        return self.rate >= MIN_RATE

    def update(self) -> None:
        """Record new tokens."""
        for position in range(max(self._indexed, NGRAM), len(self._ids)):
            key = tuple(self._ids[position - NGRAM : position])
            found = self._following.get(key)
            right = found is not None and self._ids[found] == self._ids[position]
            self.rate += RATE_STEP * (right - self.rate)
            self._following[key] = position
        self._indexed = len(self._ids)

    def draft(self, most: int) -> list[int]:
        """At most ``most`` tokens that may come next; the better the guesses were, the more."""
        found = self._following.get(tuple(self._ids[-NGRAM:]))
        if found is None or not self.active or most <= 0:
            return []
        count = min(most, self.most, int(1 / max(1 - self.rate, 1e-3)))
        tokens: list[int] = []
        for position in range(found, found + count):
            past = position - len(self._ids)  # a text that repeats itself continues with its own drafts
            tokens.append(tokens[past] if past >= 0 else self._ids[position])
        return tokens
