"""Intermediate files between the stages: written atomically, sorted by document, and read in ranges.

A document's id is the hash of its normalised text, so documents in the order of their ids are spread evenly, and a
part of the corpus is a range of ids. The first stage writes sorted files of some MB with the offsets of all parts in
them; stage two reads its range from each. So the number of files does not grow with units × parts.
"""

import hashlib
import heapq
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from colonnade.errors import DataError

Record = dict[str, Any]
OPEN_FILES = 96
"""Files that a task keeps open at once."""


def document_id(text: str) -> str:
    """32 hexadecimal digits: the hash of ``text`` without differences in case and white space."""
    return hashlib.blake2b(" ".join(text.lower().split()).encode(), digest_size=16).hexdigest()


def text_key(text: str) -> str:
    """The hash of the exact text, which orders duplicates of equal rank."""
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def part_of(document: str, parts: int) -> int:
    """The part of the document with this id; parts are consecutive ranges of ids."""
    return int(document[:16], 16) * parts >> 64


def write_bytes(path: Path, content: bytes) -> None:
    """Write the file atomically: under a temporary name first, so that a killed task leaves no partial file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(content)
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise DataError(f"cannot write {path}: {error.strerror}; free some space, or choose another folder") from None


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write ``value`` in JSON."""
    write_bytes(path, (json.dumps(value, ensure_ascii=False, indent=1) + "\n").encode())


def write_array(path: Path, array: np.ndarray) -> None:
    """Write the raw numbers of ``array``."""
    write_bytes(path, np.ascontiguousarray(array).tobytes())


def json_line(record: Record) -> bytes:
    """``record`` as a line of JSON; its first key is the id, so sorted lines are sorted documents."""
    return json.dumps(record, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


def write_lines(path: Path, lines: Iterable[bytes]) -> None:
    """Write ``lines`` as a stream."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            file.writelines(lines)
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise DataError(f"cannot write {path}: {error.strerror}; free some space, or choose another folder") from None


def read_lines(path: Path) -> Iterator[Record]:
    """The records of a file of lines."""
    with path.open("rb") as file:
        for each in file:
            yield json.loads(each)


def write_unit(path: Path, records: Iterable[Record], parts: int) -> None:
    """Write the records of a unit of input sorted, with the offset of each part."""
    lines = sorted(json_line(record) for record in records)
    sizes = np.zeros(parts + 1, np.int64)
    for each in lines:
        sizes[part_of(each[7:39].decode(), parts) + 1] += len(each)  # after {"id":"
    write_lines(path.with_suffix(".jsonl"), lines)
    write_array(path.with_suffix(".offsets"), np.cumsum(sizes))


def read_part(folder: Path, part: int) -> Iterator[Record]:
    """The records of ``part`` from the files of all units."""
    for offsets in sorted(folder.glob("*.offsets")):
        start, stop = np.fromfile(offsets, np.int64, 2, offset=8 * part)
        with offsets.with_suffix(".jsonl").open("rb") as file:
            file.seek(start)
            for each in file.read(stop - start).splitlines(keepends=True):
                yield json.loads(each)


def merge_lines(files: Iterable[Path], out: Path) -> None:
    """Merge sorted files of lines into one, in groups, because the number of open files is limited."""
    group = sorted(files)
    level = 0
    while len(group) > OPEN_FILES:
        merged = []
        for start in range(0, len(group), OPEN_FILES):
            path = out.with_name(f".{out.name}.{level}.{start}")
            _merge(group[start : start + OPEN_FILES], path)
            merged.append(path)
        for path in group if level else []:
            path.unlink()
        group, level = merged, level + 1
    _merge(group, out)
    for path in group if level else []:
        path.unlink()


def _merge(files: Iterable[Path], out: Path) -> None:
    with ExitStack() as stack:
        write_lines(out, heapq.merge(*(stack.enter_context(file.open("rb")) for file in files)))
