"""Incremental detokenizers for streaming: never half a character, and in total exactly ``decode(all the ids)``.

In a byte-level vocabulary each token is some bytes, and an incremental UTF-8 decoder suffices
(:class:`ByteDetokenizer`). In general a token cannot be decoded alone (:class:`Detokenizer`). A byte-level token may be
part of a UTF-8 character; SentencePiece's first token loses its leading space and the others keep it; its byte tokens
(``<0xE2>``) become a character only if the whole run of them is valid, and one U+FFFD each otherwise. So each token is
decoded together with some before it, and text is withheld while a later token could still change it:

- A final U+FFFD may be the first bytes of a character: lossy decoding writes a single one for an unfinished character,
  however many of its bytes are present (Unicode 15, section 3.9, "U+FFFD substitution of maximal subparts"), so only
  the last character is uncertain.
- A run of byte tokens is uncertain until it ends.

The difference from the sliding windows of other servers: these two rules make the concatenation exact for invalid bytes
too, and the window moves only after several settled tokens, so most tokens are decoded with a single call.
"""

import codecs
from collections.abc import Callable, Sequence

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_BROKEN_RUN = 32  # tokens; bounds the work for a model that repeats an invalid byte
_SETTLED = 8  # tokens of context before the newest: enough that the window's first token no longer matters


_utf8_decoder = codecs.getincrementaldecoder("utf-8")


class ByteDetokenizer:
    """Pass ids to :meth:`push`, which returns new text, and call :meth:`flush` at the end.

    ``token_bytes`` are the bytes of an id; ``silent`` ids have no text (skipped special tokens). Python replaces
    invalid bytes as lossy decoding in Rust does, by one U+FFFD for each maximal part of a character.
    """

    def __init__(self, token_bytes: Callable[[int], bytes], silent: frozenset[int] = frozenset()):
        self._token_bytes, self._silent = token_bytes, silent
        self._decode = _utf8_decoder("replace").decode

    def push(self, token: int) -> str:
        """The text that ``token`` completes; often one word, sometimes none."""
        return "" if token in self._silent else self._decode(self._token_bytes(token))

    def flush(self) -> str:
        """U+FFFD for an incomplete character; ends the stream and resets the detokenizer."""
        return self._decode(b"", True)


class Detokenizer:
    """Pass ids to :meth:`push`, which returns new text, and call :meth:`flush` at the end.

    ``decode`` turns ids into text; ``silent`` ids have no text (skipped special tokens); ``byte_ids`` are
    SentencePiece's byte tokens, none for a byte-level vocabulary.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        silent: frozenset[int] = frozenset(),
        byte_ids: frozenset[int] = frozenset(),
    ):
        self._decode, self._silent, self._byte_ids = decode, silent, byte_ids
        self._window: list[int] = []
        self._emitted = 0  # characters of decode(window) already returned
        self._settled = 0  # tokens at the window's start whose text is final

    def push(self, token: int) -> str:
        """The text that ``token`` makes certain; often one word, sometimes none."""
        if token in self._silent:
            return ""
        self._window.append(token)
        if token in self._byte_ids:
            return ""
        text = self._decode(self._window)
        certain = text.removesuffix(REPLACEMENT)
        new, self._emitted = certain[self._emitted :], len(certain)
        if len(certain) == len(text):
            self._slide()
        elif len(self._window) > _BROKEN_RUN:
            self._cut(text)
        return new

    def flush(self) -> str:
        """The text that was withheld; ends the stream and resets the detokenizer."""
        rest = self._decode(self._window)[self._emitted :]
        self._window, self._emitted, self._settled = [], 0, 0
        return rest

    def _slide(self) -> None:
        """Drop tokens whose text is final, except at least ``_SETTLED`` of them as context."""
        if len(self._window) - self._settled >= _SETTLED:
            self._window = self._window[self._settled :]
            self._emitted = len(self._decode(self._window))
            self._settled = len(self._window)

    def _cut(self, text: str) -> None:
        """Drop the start of a long run of invalid bytes, which would make each push slower than the last.

        Only if the two parts decode to the same text as the whole, so that no character spans the cut; otherwise the
        next push tries another position.
        """
        before, after = self._window[:-_SETTLED], self._window[-_SETTLED:]
        dropped = self._decode(before)
        if dropped + self._decode(after) == text:
            self._window, self._emitted, self._settled = after, self._emitted - len(dropped), 0
