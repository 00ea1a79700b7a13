"""Documents as chunks of text: a long document is cut where no tokenizer joins the text on both sides.

Documents are read in chunks of at most ``CHUNK_CHARACTERS``, because a tokenizer needs a hundred times the memory of
its text. Nearly all documents are one chunk. A longer one is cut between a letter or digit and the white space after
it, where GPT-2's pattern and its successors (GPT-4's, Llama 3's) always split, so the tokens are those of the whole
document.
"""

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from colonnade.errors import DataError

CHUNK_CHARACTERS = 1 << 20
_WORD_END = re.compile(r"(?<=[^\W_])(?=\s)")


class TextChunk(NamedTuple):
    """A document or a part of a long one."""

    text: str
    last: bool
    """Whether the document ends here."""
    size_bytes: int
    """Size of the chunk in its source file; approximate for Parquet."""
    task: str | None = None
    """The document's task, if tasks are read."""
    title: str | None = None
    """The document's title, if titles are read and it has one."""
    ends_source: bool = False
    """Whether the source of a pair ends here; its target follows in the same document."""


def record_chunks(value: object, place: str, size_bytes: int, task: str | None, title: object) -> Iterator[TextChunk]:
    """The chunks of one record's document; the last one has the record's size in bytes. A title must be a string."""
    if not isinstance(value, str):
        raise DataError(f"{place} is {json_type(value)}, not text; fix or remove this record")
    check_characters(value, place)
    title = title if isinstance(title, str) else None
    for chunk in split_chunks([value]):
        yield chunk._replace(size_bytes=size_bytes if chunk.last else 0, task=task, title=title)


def split_chunks(chunks: Iterable[str], separator: str | None = None) -> Iterator[TextChunk]:
    """Split at the separators into documents, and long documents into chunks."""
    rest, inside = "", False  # inside: a chunk of the current document was yielded already
    spare = len(separator or "")  # so that a separator is never cut in two
    for chunk in chunks:
        *whole, rest = (rest + chunk).split(separator) if separator else [rest + chunk]
        for document in whole:
            if inside or document.strip():
                yield TextChunk(document, True, len((document + (separator or "")).encode()))
            inside = False
        while len(rest) > CHUNK_CHARACTERS + spare:
            at = _chunk_end(rest)
            yield TextChunk(rest[:at], False, len(rest[:at].encode()))
            rest, inside = rest[at:], True
    if inside or rest.strip():
        yield TextChunk(rest, True, len(rest.encode()))


def _chunk_end(text: str) -> int:
    """The last word end at or before ``CHUNK_CHARACTERS``, which itself is returned if the 4096 before have none."""
    near = CHUNK_CHARACTERS - min(4096, CHUNK_CHARACTERS // 2)
    ends = [match.start() for match in _WORD_END.finditer(text, near, CHUNK_CHARACTERS + 1)]
    return ends[-1] if ends else CHUNK_CHARACTERS


def check_characters(text: str, place: str) -> None:
    """Raise :class:`DataError` for a lone surrogate; ``place`` names the text."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{place}: character {error.start} is a lone surrogate, which is not text; fix it") from None


def pair_chunks(source: object, target: object, place: str, size_bytes: int) -> Iterator[TextChunk]:
    """The chunks of one pair, a document."""
    for value, what in ((source, "source"), (target, "target")):
        if not isinstance(value, str) or not value.strip():
            raise DataError(f"{place}: the {what} of a pair is empty or not text; fix or remove the pair")
        check_characters(value, place)
        for chunk in split_chunks([value]):
            last = chunk.last and what == "target"
            yield TextChunk(chunk.text, last, size_bytes if last else 0, ends_source=chunk.last and not last)


def json_type(value: object) -> str:
    """The JSON type of a parsed value, for errors."""
    names: dict[type, str] = {type(None): "null", bool: "a boolean", int: "a number", float: "a number", list: "a list"}
    return names.get(type(value), "an object")
