"""From tokens to the text that a client sees: whole characters only, and never any part of a stop string.

A character may take several tokens and a stop string may span tokens, so text is held back until it is decided: the
detokenizer keeps incomplete UTF-8, :class:`StopFilter` keeps the longest end of the text that could still become a
stop string. The first stop string to be *completed* wins (the longest, if several end together), so that the result
does not depend on how the text was cut into tokens.
"""

from collections.abc import Sequence
from typing import Protocol


class Detokenizer(Protocol):
    """Turns tokens into text one at a time; ``colonnade.data.tokenizer`` makes them."""

    def push(self, token: int, /) -> str:
        """The text that ``token`` completes, perhaps none."""
        ...

    def flush(self) -> str:
        """What was held back, as well as it can be shown."""
        ...


class StopFilter:
    """Passes text on, except what is or might become one of ``stops``."""

    def __init__(self, stops: Sequence[str]):
        self.stops = tuple(stops)
        self.stopped = False
        self._held = ""

    def push(self, text: str) -> str:
        """What may be shown after ``text`` arrived; after a stop (:attr:`stopped`) always nothing."""
        if self.stopped:
            return ""
        if not self.stops:
            return text
        text = self._held + text
        found = [(start + len(stop), start) for stop in self.stops if (start := text.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)[1]]
        keep = self._undecided(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """The text held back, once nothing can follow any more."""
        text, self._held = self._held, ""
        return text

    def _undecided(self, text: str) -> int:
        """Length of the longest end of ``text`` that begins a stop string."""
        longest = min(len(text), max((len(stop) for stop in self.stops), default=0))
        return next((n for n in range(longest, 0, -1) if any(s.startswith(text[-n:]) for s in self.stops)), 0)


class TextStream:
    """A detokenizer and a stop filter in line: one for each request."""

    def __init__(self, detokenizer: Detokenizer, stops: Sequence[str]):
        self._detokenizer, self._filter = detokenizer, StopFilter(stops)

    @property
    def stopped(self) -> bool:
        """True once a stop string was completed."""
        return self._filter.stopped

    def push(self, token: int) -> str:
        """The text that may be shown after ``token``."""
        return self._filter.push(self._detokenizer.push(token))

    def finish(self) -> str:
        """The rest, when no token follows."""
        return self._filter.push(self._detokenizer.flush()) + self._filter.flush()
