"""Turns tokens into text for clients: whole characters only, and no part of a stop string.

A character may take several tokens and a stop string may span tokens, so text is held back until it is certain: the
detokenizer buffers incomplete UTF-8, and :class:`StopFilter` buffers the longest suffix that could still become a stop
string. The first stop string to be *completed* ends the text (the longest, if several end together), so that the result
does not depend on how the text was split into tokens.
"""

from collections.abc import Sequence
from typing import Protocol


class Detokenizer(Protocol):
    """Turns tokens into text one at a time; ``colonnade.data.tokenizer`` implements it."""

    def push(self, token: int, /) -> str:
        """The text that ``token`` completes, possibly none."""
        ...

    def flush(self) -> str:
        """The buffered text, with replacement characters for incomplete ones."""
        ...


class StopFilter:
    """Passes text through, except for parts that are or might become one of the strings ``stops``."""

    def __init__(self, stops: Sequence[str]):
        self.stops = tuple(stops)
        self.stopped = False
        self._buffer = ""

    def push(self, text: str, *, may_stop: bool = True) -> str:
        """The text that is certain after ``text`` was added; empty once :attr:`stopped`.

        Without ``may_stop`` stop strings are not searched for in ``text``.
        """
        if not self.stops:
            return text
        if self.stopped:
            return ""
        text, self._buffer = self._buffer + text, ""
        if not may_stop:
            return text
        matches = [(start + len(stop), start) for stop in self.stops if (start := text.find(stop)) >= 0]
        if matches:
            self.stopped = True
            return text[: min(matches)[1]]
        certain = len(text) - self._partial_stop(text)
        self._buffer = text[certain:]
        return text[:certain]

    def flush(self) -> str:
        """The buffered text, once nothing follows."""
        text, self._buffer = self._buffer, ""
        return text

    def _partial_stop(self, text: str) -> int:
        """Length of the longest suffix of ``text`` that begins a stop string."""
        longest = min(len(text), max((len(stop) for stop in self.stops), default=0))
        return next((n for n in range(longest, 0, -1) if any(s.startswith(text[-n:]) for s in self.stops)), 0)


class TextStream:
    """A detokenizer followed by a stop filter; one for each request."""

    def __init__(self, detokenizer: Detokenizer, stops: Sequence[str]):
        self._detokenizer, self._filter = detokenizer, StopFilter(stops)
        self.characters = 0
        """Characters decoded so far, including those withheld."""

    @property
    def stopped(self) -> bool:
        """True once a stop string was completed."""
        return self._filter.stopped

    def push(self, token: int, *, may_stop: bool = True) -> str:
        """The text that is certain after ``token``; without ``may_stop`` its text cannot complete a stop string."""
        text = self._detokenizer.push(token)
        self.characters += len(text)
        return self._filter.push(text, may_stop=may_stop)

    def finish(self) -> str:
        """The remaining text, once no token follows."""
        return self._filter.push(self._detokenizer.flush()) + self._filter.flush()
