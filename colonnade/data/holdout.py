"""Splits documents into training and validation by a hash of their text, before tokenisation.

    hash(document) in [0, 1)            held out for validation: hash < share

A document and its copies are always in the same split, whatever else is in the corpus and however it is sharded, so no
copy leaks into validation. In a small corpus this could hold out no document or all of them: then only the document
with the lowest hash is held out, or all but the one with the highest.

In a corpus of a single document, ``share`` of its characters is held out, in spans spread evenly over it, because its
end may differ from the rest (an index, a licence, an epilogue). Spans begin and end at the nearest paragraph boundary
before, otherwise at a sentence boundary, otherwise at a word boundary. If a document is too short for two spans of
:data:`MIN_SPAN_CHARACTERS`, its end is held out.
"""

import hashlib
import math
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from colonnade.data.text_chunks import TextChunk
from colonnade.errors import DataError

MIN_SPAN_CHARACTERS = 4096
"""Shortest span that is held out of a single document, if there are several spans."""
MAX_SPANS = 16
_SEARCH_CHARACTERS = 2048
_BOUNDARIES = [re.compile(pattern) for pattern in (r"\n\s*\n", r"[.!?]['\")\]”’]*\s+", r"\s")]
"""Boundaries at which a document may be cut, best first: paragraphs, sentences, words."""


class HashedChunk(NamedTuple):
    """A chunk of text with its document's hash in [0, 1)."""

    chunk: TextChunk
    hash: float


class Holdout(NamedTuple):
    """Documents whose hash is below ``threshold`` are held out."""

    threshold: float
    cuts: tuple[int, ...] = ()
    """For a corpus of one document: approximate start of each span but the first [characters]; spans are alternately
    trained on and held out.
    """

    @property
    def spans(self) -> int | None:
        """Number of held-out spans of a single document; None for several documents."""
        return -(-len(self.cuts) // 2) or None

    def hashed(self, chunks: Iterable[TextChunk]) -> Iterator[HashedChunk]:
        """``chunks`` with their documents' hashes; each span of a single document becomes a document."""
        return self._in_spans(chunks) if self.cuts else _hash_documents(chunks)

    def _in_spans(self, chunks: Iterable[TextChunk]) -> Iterator[HashedChunk]:
        cuts, begin, held_out = list(self.cuts), 0, False
        near = min([_SEARCH_CHARACTERS, *((b - a) // 2 for a, b in zip((0, *cuts), cuts, strict=False))])
        for chunk in chunks:
            rest = chunk
            while cuts and cuts[0] - begin <= len(rest.text):
                at = _boundary_before(rest.text, cuts.pop(0) - begin, near)
                size_bytes = min(len(rest.text[:at].encode()), rest.size_bytes)
                yield HashedChunk(
                    rest._replace(text=rest.text[:at], last=True, size_bytes=size_bytes), self._span_hash(held_out)
                )
                rest = rest._replace(text=rest.text[at:], size_bytes=rest.size_bytes - size_bytes)
                begin, held_out = begin + at, not held_out
            if rest.text:
                yield HashedChunk(rest, self._span_hash(held_out))
            begin += len(rest.text)

    def _span_hash(self, held_out: bool) -> float:
        return 0.0 if held_out else self.threshold


def _boundary_before(text: str, at: int, near: int) -> int:
    """The last end of a paragraph, otherwise of a sentence, otherwise of a word, at most ``near`` characters before
    ``at``.
    """
    begin = max(at - near, 0)
    for pattern in _BOUNDARIES:
        if boundaries := list(pattern.finditer(text, begin, at)):
            return boundaries[-1].end()
    return at


def choose_holdout(chunks: Iterable[TextChunk], share: float) -> Holdout:
    """Choose a threshold that holds out ``share`` of the documents: at least one but not all, if possible.

    Reads until both splits have a document. Raises :class:`DataError` for no text and for copies of a single text.
    """
    documents = characters = 0
    lowest, highest = 1.0, 0.0
    for chunk, value in _hash_documents(chunks):
        documents, characters = documents + chunk.last, characters + len(chunk.text)
        lowest, highest = min(lowest, value), max(highest, value)
        if share == 0 or lowest < share <= highest:
            return Holdout(share)
    if not characters:
        raise DataError("the corpus is empty: its sources contain only whitespace; add some text")
    if documents == 1:
        shorter = round(characters * min(share, 1 - share))  # the training text is in spans as well
        spans = max(1, min(shorter // MIN_SPAN_CHARACTERS, MAX_SPANS))
        bounds = [characters * (span + part) / spans for span in range(spans) for part in (1 - share, 1)]
        return Holdout(share, tuple(max(1, min(round(bound), characters - 1)) for bound in bounds[:-1]))
    if lowest == highest:
        raise DataError(
            f"all {documents} documents are identical, and one text cannot be both trained on and held out; add "
            "others, or hold none out (--validation_share 0)"
        )
    return Holdout(highest if lowest < share else math.nextafter(lowest, 1))


def _hash_documents(chunks: Iterable[TextChunk]) -> Iterator[HashedChunk]:
    value, is_first = 0.0, True
    for chunk in chunks:
        if is_first:  # a long document is hashed by its first chunk
            value = int.from_bytes(hashlib.blake2b(chunk.text.encode(), digest_size=8).digest()) / 2**64
        yield HashedChunk(chunk, value)
        is_first = chunk.last
