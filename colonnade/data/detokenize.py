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

:class:`TokenBytes` has the bytes of each token of a vocabulary, and makes its detokenizers.
"""

import codecs
import functools
import json
from collections.abc import Callable, Sequence
from typing import Any

import tokenizers

from colonnade.data.train_tokenizer import BYTE_LEVEL

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


class TokenBytes:
    """The bytes of each token of a vocabulary; ``decoder`` is that of its ``tokenizer.json``."""

    def __init__(self, core: tokenizers.Tokenizer, decoder: dict[str, Any] | None):
        text = json.dumps(decoder)
        self._core = core
        self._added_ids = frozenset(core.get_added_tokens_decoder())
        self._is_byte_level = '"ByteLevel"' in text
        self._joins_bytes = decoder is not None and decoder["type"] == "ByteLevel"
        """Whether decoding joins the bytes of tokens."""
        byte_ids = (core.token_to_id(f"<0x{byte:02X}>") for byte in range(256)) if '"ByteFallback"' in text else ()
        self._byte_ids = frozenset(i for i in byte_ids if i is not None)
        """SentencePiece's byte tokens, if the decoder converts them to bytes."""
        self._inside: dict[int, bytes] = {}
        self._decoded = _DecodedBytes(core)

    def detokenizer(self, silent: frozenset[int]) -> ByteDetokenizer | Detokenizer:
        """A new incremental decoder; ``silent`` ids have no text."""
        if self._joins_bytes:
            return ByteDetokenizer(self._decoded.__getitem__, silent)
        decode = functools.partial(self._core.decode, skip_special_tokens=False)
        return Detokenizer(decode, silent=silent, byte_ids=self._byte_ids)

    def inside(self, token_id: int) -> bytes:
        """The bytes of one token inside a text, possibly part of a character; empty for an id without a token."""
        if (data := self._inside.get(token_id)) is None:
            data = self._inside[token_id] = self._decode_token(token_id)
        return data

    def _decode_token(self, token_id: int) -> bytes:
        spelling = self._core.id_to_token(token_id)
        if spelling is None:
            return b""
        if token_id in self._byte_ids:  # <0x0A>
            return bytes([int(spelling[3:5], 16)])
        if token_id in self._added_ids:
            return spelling.encode()
        if self._is_byte_level and all(character in BYTE_LEVEL for character in spelling):
            return bytes(BYTE_LEVEL[character] for character in spelling)
        # SentencePiece drops the space of a text's first token, so the second one of two is read.
        decode = functools.partial(self._core.decode, skip_special_tokens=False)
        return decode([token_id, token_id])[len(decode([token_id])) :].encode()


class _DecodedBytes(dict[int, bytes]):
    """The bytes of each token by the rule of a ByteLevel decoder, which also applies to added tokens.

    A token spelled with the alphabet of bytes only is those bytes, any other one its spelling in UTF-8.
    """

    def __init__(self, core: tokenizers.Tokenizer):
        super().__init__()
        self._core = core

    def __missing__(self, token_id: int) -> bytes:
        spelling = self._core.id_to_token(token_id) or ""
        is_bytes = all(character in BYTE_LEVEL for character in spelling)
        data = bytes(BYTE_LEVEL[character] for character in spelling) if is_bytes else spelling.encode()
        self[token_id] = data
        return data
