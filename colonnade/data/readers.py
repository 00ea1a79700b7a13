"""Documents out of files: text, JSON Lines or Parquet, one after another, never a whole corpus in memory.

A document flows as pieces of at most ``PIECE_CHARACTERS``, because a tokenizer's memory is a hundred times its text's.
Nearly all documents are one piece. A longer one is cut between a letter or digit and the white space after it, where
GPT-2's pattern and its successors (GPT-4's, Llama 3's) always cut, so that the tokens are the whole document's.

A file that is not text is refused with its name and the offset of the first bad byte: a model trained on a mis-decoded
corpus is found out weeks later.
"""

import codecs
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from colonnade.errors import DataError

CHUNK_CHARACTERS = 1 << 20
_READ_BYTES = 1 << 20
_WORD_END = re.compile(r"(?<=[^\W_])(?=\s)")

Source = Path | str | tuple[str, str]
"""A file, a folder of files, or a document in memory as (name, text)."""


class TextChunk(NamedTuple):
    """A document, or a part of a long one."""

    text: str
    last: bool
    """Whether the document ends here."""
    size_bytes: int
    """How much of its source this is: a file's bytes, as near as its format tells."""
    task: str | None = None
    """The task that the document is of, where anybody asks."""


class ReadOptions(NamedTuple):
    """How to find documents in files."""

    field: str = "text"
    """The JSONL field or Parquet column that holds the text."""
    separator: str | None = None
    """What stands between two documents of one text file; None: a text file is one document."""
    task_field: str | None = None
    """The JSONL field or Parquet column that names a document's task."""
    tasks: Mapping[Source, str] = MappingProxyType({})
    """The task of all documents of a source, as :func:`find_files` returns it."""


def find_files(sources: Sequence[Source]) -> list[Source]:
    """The files of ``sources``, folders replaced by what they hold (by name, hidden files left out).

    Raises :class:`DataError` for a path that does not exist, and for a folder without a file of a known suffix.
    """
    return [
        found for source in sources for found in ([source] if isinstance(source, tuple) else _files_of(Path(source)))
    ]


def total_bytes(found: Sequence[Source]) -> int:
    """Size of what :func:`find_files` returned."""
    return sum(len(one[1].encode(errors="replace")) if isinstance(one, tuple) else Path(one).stat().st_size
               for one in found)  # fmt: skip


def read_documents(found: Iterable[Source], how: ReadOptions) -> Iterator[TextChunk]:
    """The pieces of all documents in order; documents of nothing but white space are left out.

    Raises :class:`DataError` with file and place for whatever is not text, JSON or Parquet, or lacks the field.
    """
    for one in found:
        pieces, task = _in_memory(*one) if isinstance(one, tuple) else _in_file(Path(one), how), how.tasks.get(one)
        if how.task_field and isinstance(one, tuple):
            raise DataError(f"{one[0]} is plain text, which has no field '{how.task_field}'; leave --tasks out")
        try:
            yield from pieces if task is None else (piece._replace(task=task) for piece in pieces)
        except OSError as error:
            raise DataError(f"{error.filename}: {error.strerror}; make it readable, or leave it out") from None


def _files_of(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise DataError(f"{path} does not exist; give text, JSONL or Parquet files, or folders of them")
    inside = sorted(p for p in path.rglob("*") if p.is_file() and not _is_hidden(p.relative_to(path)))
    known = [p for p in inside if p.suffix.lower() in _READERS]
    if not known:
        raise DataError(f"{path} holds no {', '.join(_READERS)} file ({len(inside)} others); name its files instead")
    return known


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def tasks_by_source(sources: Sequence[Source]) -> dict[Source, str]:
    """The task of each file of ``sources``: the source that it is, or that it was found in, as it was named.

    Raises :class:`DataError` for a file that is in two of them.
    """
    tasks: dict[Source, str] = {}
    for source in sources:
        task = source[0] if isinstance(source, tuple) else str(source)
        for one in find_files([source]):
            if tasks.setdefault(one, task) != task:
                raise DataError(f"{one} is in {tasks[one]} and in {task}, which are to be two tasks; name it once")
    return tasks


def _in_file(file: Path, how: ReadOptions) -> Iterator[TextChunk]:
    return _READERS.get(file.suffix.lower(), _read_text)(file, how)


def _in_memory(name: str, text: str) -> Iterator[TextChunk]:
    _check_characters(text, name)
    return _split_chunks([text])


def _read_text(file: Path, how: ReadOptions) -> Iterator[TextChunk]:
    if how.task_field:
        raise DataError(f"{file} is plain text, which has no field '{how.task_field}'; use --tasks source, or JSONL")
    return _split_chunks(_decode_utf8(file), how.separator)


def _decode_utf8(file: Path) -> Iterator[str]:
    """The file's characters in chunks; a byte-order mark is left out."""
    decoder, offset, first = codecs.getincrementaldecoder("utf-8")(), 0, True
    with file.open("rb") as stream:
        while True:
            chunk = stream.read(_READ_BYTES)
            if (nul := chunk.find(0)) >= 0:
                raise DataError(f"{file} is not text: NUL byte at offset {offset + nul}; leave it out or convert it")
            try:
                text = decoder.decode(chunk, final=not chunk)
            except UnicodeDecodeError as error:
                # The decoder may hold up to 3 bytes of the chunk before, in front of this one.
                at = offset + len(chunk) - len(error.object) + error.start
                raise DataError(
                    f"{file} is not UTF-8 text: byte 0x{error.object[error.start]:02x} at offset {at}; "
                    "convert it to UTF-8 (iconv), unpack it, or leave it out"
                ) from None
            if not chunk:
                return
            yield text.removeprefix("\ufeff") if first else text
            offset, first = offset + len(chunk), False


def _read_jsonl(file: Path, how: ReadOptions) -> Iterator[TextChunk]:
    with file.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            if not line.strip():
                continue
            place = f"{file}:{number}"
            try:
                record = json.loads(line)
            except ValueError as error:
                raise DataError(f"{place}: not JSON: {error}; a .jsonl file holds one object a line") from None
            if not isinstance(record, dict):
                raise DataError(f"{place}: {_json_type(record)}, not an object; a .jsonl file holds one object a line")
            if how.field not in record:
                raise DataError(
                    f"{place}: no field '{how.field}', but {_quoted_names(record)}; choose one with --field"
                )
            if how.task_field and how.task_field not in record:
                raise DataError(
                    f"{place}: no field '{how.task_field}', but {_quoted_names(record)}; choose one with --tasks"
                )
            task = _task_name(record[how.task_field], f"{place}: field '{how.task_field}'") if how.task_field else None
            yield from _record_chunks(record[how.field], f"{place}: field '{how.field}'", len(line), task)


def _read_parquet(file: Path, how: ReadOptions) -> Iterator[TextChunk]:
    import pyarrow  # here, because it takes half a second to import and most corpora are text
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(file) as table:
            names, wanted = table.schema_arrow.names, [how.field, *([how.task_field] if how.task_field else [])]
            for name, flag in zip(wanted, ("field", "tasks"), strict=False):
                if name not in names:
                    raise DataError(f"{file}: no column '{name}', but {_quoted_names(names)}; choose one with --{flag}")
            row, row_bytes = 0, file.stat().st_size // max(table.metadata.num_rows, 1)
            for batch in table.iter_batches(batch_size=256, columns=wanted):
                values = batch.column(how.field).to_pylist()
                named = batch.column(how.task_field).to_pylist() if how.task_field else [None] * len(values)
                for value, name in zip(values, named, strict=True):
                    place = f"{file}, row {row}: column"
                    task = _task_name(name, f"{place} '{how.task_field}'") if how.task_field else None
                    yield from _record_chunks(value, f"{place} '{how.field}'", row_bytes, task)
                    row += 1
    except (pyarrow.ArrowInvalid, pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise DataError(f"{file} is not a readable Parquet file: {error}; fetch or write it again") from None


def _task_name(value: object, place: str) -> str:
    """A task by its name, or by a number."""
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise DataError(
            f"{place} is {_json_type(value)}, and a task is a name or a number; mend or leave out this record"
        )
    return str(value)


def _record_chunks(value: object, place: str, size_bytes: int, task: str | None = None) -> Iterator[TextChunk]:
    """One record's document; the last piece carries the record's size in its file."""
    if not isinstance(value, str):
        raise DataError(f"{place} is {_json_type(value)}, not text; mend or leave out this record")
    _check_characters(value, place)
    for piece in _split_chunks([value]):
        yield piece._replace(size_bytes=size_bytes if piece.last else 0, task=task)


def _split_chunks(chunks: Iterable[str], separator: str | None = None) -> Iterator[TextChunk]:
    """Documents between separators, long ones in pieces."""
    rest, inside = "", False  # inside: a piece of the current document is out already
    spare = len(separator or "")  # so that the start of a separator is never cut from its end
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
    """The last place to cut at or before ``PIECE_CHARACTERS``; exactly there if no word ends in its last 4096."""
    near = CHUNK_CHARACTERS - min(4096, CHUNK_CHARACTERS // 2)
    ends = [match.start() for match in _WORD_END.finditer(text, near, CHUNK_CHARACTERS + 1)]
    return ends[-1] if ends else CHUNK_CHARACTERS


def _check_characters(text: str, place: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{place}: character {error.start} is a lone surrogate, which is not text; mend it") from None


def _json_type(value: object) -> str:
    names = {type(None): "null", bool: "a boolean", int: "a number", float: "a number", list: "a list"}
    return names.get(type(value), "an object")


def _quoted_names(names: Iterable[str]) -> str:
    return ", ".join(f"'{name}'" for name in names) or "none at all"


_Reader = Callable[[Path, ReadOptions], Iterator[TextChunk]]
_READERS: dict[str, _Reader] = {
    ".txt": _read_text,
    ".text": _read_text,
    ".md": _read_text,
    ".jsonl": _read_jsonl,
    ".ndjson": _read_jsonl,
    ".json": _read_jsonl,
    ".parquet": _read_parquet,
}
