"""Which documents are kept from training: decided from the text alone, before a token is made.

    lot(document) = a hash of its text, in [0, 1)            held out: lot < share

The same document always falls on the same side, whatever stands beside it, however the shards are cut; and its copies
fall there too, so that none of them leaks into validation. A small corpus could so hold out nothing, or everything:
then the document of the lowest lot alone is held out, or all but that of the highest. Of a single document the last
``share`` of its characters is.
"""

import hashlib
import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from colonnade.data.sources import Piece
from colonnade.errors import DataError


class Drawn(NamedTuple):
    """A piece, and its document's lot."""

    piece: Piece
    lot: float


class Division(NamedTuple):
    """Documents whose lot is below ``threshold`` are held out."""

    threshold: float
    head: int | None = None
    """Of a corpus of one document: the characters that are trained on, about; the rest is a document of its own."""

    def draw(self, pieces: Iterable[Piece]) -> Iterator[Drawn]:
        """``pieces`` with their lots."""
        return _draw(pieces) if self.head is None else self._in_two(pieces, self.head)

    def _in_two(self, pieces: Iterable[Piece], head: int) -> Iterator[Drawn]:
        lot, left = self.threshold, head
        for piece in pieces:
            if not 0 < left <= len(piece.text):
                yield Drawn(piece, lot)
            else:
                at = max(piece.text.rfind(white, 0, left) for white in " \n") + 1 or left
                front, back = piece.text[:at], piece.text[at:]
                front_bytes = len(front.encode())
                yield Drawn(piece._replace(text=front, last=True, size_bytes=front_bytes), lot)
                lot = 0.0
                if back:
                    yield Drawn(piece._replace(text=back, size_bytes=max(0, piece.size_bytes - front_bytes)), lot)
            left -= len(piece.text)


def divide(pieces: Iterable[Piece], share: float) -> Division:
    """How to hold out ``share`` of the documents: at least one, but not all, where there is a choice.

    Reads until both sides have one. Raises :class:`DataError` for no text at all, and for nothing but copies of one.
    """
    documents = characters = 0
    lowest, highest = 1.0, 0.0
    for piece, lot in _draw(pieces):
        documents, characters = documents + piece.last, characters + len(piece.text)
        lowest, highest = min(lowest, lot), max(highest, lot)
        if share == 0 or lowest < share <= highest:
            return Division(share)
    if not characters:
        raise DataError("the corpus is empty: its sources hold nothing but white space; add some text")
    if documents == 1:
        return Division(share, max(1, round(characters * (1 - share))))
    if lowest == highest:
        raise DataError(
            f"all {documents} documents are the same text, which cannot be both trained on and held out; "
            "add others, or hold none out (--validation_share 0)"
        )
    return Division(highest if lowest < share else math.nextafter(lowest, 1))


def _draw(pieces: Iterable[Piece]) -> Iterator[Drawn]:
    lot, fresh = 0.0, True
    for piece in pieces:
        if fresh:  # a long document's first piece speaks for all of it
            lot = int.from_bytes(hashlib.blake2b(piece.text.encode(), digest_size=8).digest()) / 2**64
        yield Drawn(piece, lot)
        fresh = piece.last
