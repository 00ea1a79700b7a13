"""Which documents are kept from training: decided from the text alone, before a token is made.

    lot(document) = a hash of its text, in [0, 1)            held out: lot < share

The same document always falls on the same side, whatever stands beside it, however the shards are cut; and its copies
fall there too, so that none of them leaks into validation. A small corpus could so hold out nothing, or everything:
then the document of the lowest lot alone is held out, or all but that of the highest.

Of a single document ``share`` of its characters is, in spans spread evenly over it, because its end may be unlike the
rest (an index, a licence, an epilogue). They begin and end between paragraphs where some are near, else between
sentences, else between words. A document too short for two spans of :data:`MIN_SPAN_CHARACTERS` loses its end.
"""

import hashlib
import math
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from colonnade.data.readers import TextChunk
from colonnade.errors import DataError

MIN_SPAN_CHARACTERS = 4096
"""Least length of a span that is held out of a single document, where there are several."""
MAX_SPANS = 16
_SEARCH_CHARACTERS = 2048
_BOUNDARIES = [re.compile(pattern) for pattern in (r"\n\s*\n", r"[.!?]['\")\]”’]*\s+", r"\s")]
"""What a cut is moved behind, the best first: paragraphs, sentences, words."""


class HashedChunk(NamedTuple):
    """A piece, and its document's lot."""

    piece: TextChunk
    lot: float


class Holdout(NamedTuple):
    """Documents whose lot is below ``threshold`` are held out."""

    threshold: float
    cuts: tuple[int, ...] = ()
    """Of a corpus of one document: about how many characters stand before each span, in turn trained on and held out,
    but the first.
    """

    @property
    def spans(self) -> int | None:
        """How many spans of a single document are held out; None where there are more documents."""
        return -(-len(self.cuts) // 2) or None

    def draw(self, pieces: Iterable[TextChunk]) -> Iterator[HashedChunk]:
        """``pieces`` with their lots."""
        return self._in_spans(pieces) if self.cuts else _hash_documents(pieces)

    def _in_spans(self, pieces: Iterable[TextChunk]) -> Iterator[HashedChunk]:
        """Each span as a document of its own."""
        cuts, begin, held_out = list(self.cuts), 0, False
        near = min([_SEARCH_CHARACTERS, *((b - a) // 2 for a, b in zip((0, *cuts), cuts, strict=False))])
        for piece in pieces:
            rest = piece
            while cuts and cuts[0] - begin <= len(rest.text):
                at = _boundary_before(rest.text, cuts.pop(0) - begin, near)
                size_bytes = min(len(rest.text[:at].encode()), rest.size_bytes)
                yield HashedChunk(
                    rest._replace(text=rest.text[:at], last=True, size_bytes=size_bytes), self._lot(held_out)
                )
                rest = rest._replace(text=rest.text[at:], size_bytes=rest.size_bytes - size_bytes)
                begin, held_out = begin + at, not held_out
            if rest.text:
                yield HashedChunk(rest, self._lot(held_out))
            begin += len(rest.text)

    def _lot(self, held_out: bool) -> float:
        return 0.0 if held_out else self.threshold


def _boundary_before(text: str, at: int, near: int) -> int:
    """The last end of a paragraph, else of a sentence, else of a word, at most ``near`` characters before ``at``."""
    begin = max(at - near, 0)
    for pattern in _BOUNDARIES:
        if found := list(pattern.finditer(text, begin, at)):
            return found[-1].end()
    return at


def choose_holdout(pieces: Iterable[TextChunk], share: float) -> Holdout:
    """How to hold out ``share`` of the documents: at least one, but not all, where there is a choice.

    Reads until both sides have one. Raises :class:`DataError` for no text at all, and for nothing but copies of one.
    """
    documents = characters = 0
    lowest, highest = 1.0, 0.0
    for piece, lot in _hash_documents(pieces):
        documents, characters = documents + piece.last, characters + len(piece.text)
        lowest, highest = min(lowest, lot), max(highest, lot)
        if share == 0 or lowest < share <= highest:
            return Holdout(share)
    if not characters:
        raise DataError("the corpus is empty: its sources hold nothing but white space; add some text")
    if documents == 1:
        shorter = round(characters * min(share, 1 - share))  # what is trained on is in spans as well
        spans = max(1, min(shorter // MIN_SPAN_CHARACTERS, MAX_SPANS))
        bounds = [characters * (span + part) / spans for span in range(spans) for part in (1 - share, 1)]
        return Holdout(share, tuple(max(1, min(round(bound), characters - 1)) for bound in bounds[:-1]))
    if lowest == highest:
        raise DataError(
            f"all {documents} documents are the same text, which cannot be both trained on and held out; "
            "add others, or hold none out (--validation_share 0)"
        )
    return Holdout(highest if lowest < share else math.nextafter(lowest, 1))


def _hash_documents(pieces: Iterable[TextChunk]) -> Iterator[HashedChunk]:
    lot, fresh = 0.0, True
    for piece in pieces:
        if fresh:  # a long document's first piece speaks for all of it
            lot = int.from_bytes(hashlib.blake2b(piece.text.encode(), digest_size=8).digest()) / 2**64
        yield HashedChunk(piece, lot)
        fresh = piece.last
