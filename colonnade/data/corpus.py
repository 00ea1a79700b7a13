"""Reads and writes a corpus folder: memory-mapped token shards, an index of documents, a tokenizer, a manifest.

A split is one stream of tokens, in which each document is followed by its end token. Shards of ``shard_tokens`` tokens
may cut the stream within a document, so a token's shard is found by one division and the stream does not depend on the
shard size. An index stores the end of each document. :mod:`~colonnade.data.manifest` lists the files, and
:mod:`~colonnade.data.corpus_builder` builds a corpus from text.
"""

import functools
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

import numpy as np

from colonnade.data.manifest import SPLITS, Manifest, Shard, SplitRecord, file_sha256
from colonnade.data.tokenizer import Tokenizer
from colonnade.errors import DataError

_ENDS = np.dtype("<i8")
_TASKS = np.dtype("<u2")
MAX_TASKS = 1 << 16
"""A task's number is stored in 16 bits."""


def _shard_name(split: str, number: int) -> str:
    return f"{split}-{number:05d}.bin"


def _index_name(split: str) -> str:
    return f"{split}.documents.bin"


def _tasks_name(split: str) -> str:
    return f"{split}.tasks.bin"


class ShardWriter:
    """Writes one split into ``folder``: :meth:`append` tokens, :meth:`end_document`, and :meth:`finish` at the end."""

    def __init__(self, folder: Path, split: str, dtype: np.dtype, shard_tokens: int, *, tasks: bool = False):
        """``tasks``: whether each document has a task."""
        self._folder, self._split, self._dtype, self._shard_tokens = folder, split, dtype, shard_tokens
        self._shards: list[Shard] = []
        self._file: _HashedFile | None = None
        self._index = _HashedFile(folder / _index_name(split))
        self._tasks = _HashedFile(folder / _tasks_name(split)) if tasks else None
        self._in_shard = self._documents_in_shard = 0
        self.tokens = 0
        """Tokens written so far."""
        self.documents = 0
        """Documents ended so far."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for file in (self._file, self._index, self._tasks):
            if file is not None:
                file.close()

    def append(self, tokens: Sequence[int]) -> None:
        """Add tokens to the current document."""
        rest = np.asarray(tokens, self._dtype)
        while rest.size:
            if self._file is None:
                self._file = _HashedFile(self._folder / _shard_name(self._split, len(self._shards)))
            free = self._shard_tokens - self._in_shard
            part, rest = rest[:free], rest[free:]
            self._file.write(part.tobytes())
            self.tokens += part.size
            self._in_shard += part.size
            if self._in_shard == self._shard_tokens and rest.size:
                self._close_shard()

    def end_document(self, task: int | None = None) -> None:
        """End the current document; ``task`` is the number of its task."""
        self._index.write(np.array([self.tokens], _ENDS).tobytes())
        if self._tasks is not None:
            assert task is not None, "every document has a task"
            self._tasks.write(np.array([task], _TASKS).tobytes())
        self.documents += 1
        self._documents_in_shard += 1
        if self._in_shard == self._shard_tokens:
            self._close_shard()

    def finish(self) -> SplitRecord:
        """Close the files and return the split's record for the manifest."""
        if self._file is not None:
            self._close_shard()
        return SplitRecord(
            tokens=self.tokens,
            documents=self.documents,
            documents_sha256=self._index.close(),
            tasks_sha256=None if self._tasks is None else self._tasks.close(),
            shards=tuple(self._shards),
        )

    def _close_shard(self) -> None:
        assert self._file is not None
        self._shards.append(
            Shard(
                file=_shard_name(self._split, len(self._shards)),
                tokens=self._in_shard,
                documents=self._documents_in_shard,
                sha256=self._file.close(),
            )
        )
        self._file, self._in_shard, self._documents_in_shard = None, 0, 0


class _HashedFile:
    """A file that computes the SHA-256 of what is written; closing it syncs it to disk."""

    def __init__(self, path: Path):
        self._stream: BinaryIO = path.open("wb")
        self._hash = hashlib.sha256()

    def write(self, data: bytes) -> None:
        self._stream.write(data)
        self._hash.update(data)

    def close(self) -> str:
        """Sync and close the file, if still open, and return its SHA-256."""
        if not self._stream.closed:
            self._stream.flush()
            os.fsync(self._stream.fileno())
            self._stream.close()
        return self._hash.hexdigest()


class Split:
    """The token stream of one split, memory-mapped from its shards; :meth:`Corpus.split` returns one."""

    def __init__(self, folder: Path, name: str, record: SplitRecord, dtype: np.dtype):
        """Check every file's size; raises :class:`DataError`, naming the file, if one is missing or truncated."""
        self.name = name
        self.tokens = record.tokens
        """Tokens in the stream, end tokens included."""
        self.documents = record.documents
        """Documents in the stream."""
        self._folder, self._record, self._dtype = folder, record, dtype
        self._index_file = folder / _index_name(name)
        for shard in record.shards:
            _check_size(folder / shard.file, shard.tokens, self._dtype, "tokens")
        _check_size(self._index_file, record.documents, _ENDS, "documents")
        self._tasks_file = folder / _tasks_name(name)
        self.has_tasks = record.tasks_sha256 is not None
        """Whether each document has a task."""
        if self.has_tasks:
            _check_size(self._tasks_file, record.documents, _TASKS, "documents")
        self._shard_tokens = record.shards[0].tokens if record.shards else 1
        self._mapped: dict[int, np.ndarray] = {}
        self._ends = _map(self._index_file, _ENDS, record.documents)
        self._tasks = _map(self._tasks_file, _TASKS, record.documents if self.has_tasks else 0)

    def verify(self) -> None:
        """Compare every file with its checksum; raises :class:`DataError`, naming the first file that differs."""
        files = [(self._folder / shard.file, shard.sha256) for shard in self._record.shards]
        files.append((self._index_file, self._record.documents_sha256))
        if self._record.tasks_sha256 is not None:
            files.append((self._tasks_file, self._record.tasks_sha256))
        for file, expected in files:
            if (actual := file_sha256(file)) != expected:
                raise DataError(
                    f"{file} is damaged: its SHA-256 is {actual[:12]}..., the manifest says {expected[:12]}...; "
                    "copy it again, or build the corpus again"
                )

    def read(self, start: int, stop: int) -> np.ndarray:
        """A copy of tokens start..stop-1 of the stream as int64; 0 <= start <= stop <= tokens."""
        assert 0 <= start <= stop <= self.tokens, (start, stop, self.tokens)
        parts: list[np.ndarray] = []
        while start < stop:
            number, offset = divmod(start, self._shard_tokens)
            part = self._shard(number)[offset : offset + stop - start]
            parts.append(part)
            start += part.size
        return np.concatenate(parts).astype(np.int64) if parts else np.empty(0, np.int64)

    def document_ends(self, start: int, stop: int) -> np.ndarray:
        """Every e with start < e <= stop for which e - 1 is the last token of a document (int64)."""
        low, high = np.searchsorted(self._ends, [start, stop], side="right")
        return np.asarray(self._ends[low:high], np.int64)

    def tasks(self, start: int, stop: int) -> np.ndarray:
        """The task of each of the tokens start..stop-1 (int64); only if documents have tasks."""
        assert self.has_tasks, f"the documents of {self._folder} have no tasks"
        if start >= stop:
            return np.empty(0, np.int64)
        first, last = np.searchsorted(self._ends, [start, stop - 1], side="right")
        inner = np.asarray(self._ends[first:last], np.int64)
        lengths = np.diff(inner, prepend=start, append=stop)
        return np.repeat(np.asarray(self._tasks[first : last + 1], np.int64), lengths)

    def document(self, number: int) -> np.ndarray:
        """The tokens of one document, its end token included (int64)."""
        start = int(self._ends[number - 1]) if number else 0
        return self.read(start, int(self._ends[number]))

    def _shard(self, number: int) -> np.ndarray:
        if number not in self._mapped:
            shard = self._record.shards[number]
            self._mapped[number] = _map(self._folder / shard.file, self._dtype, shard.tokens)
        return self._mapped[number]


def _map(file: Path, dtype: np.dtype, count: int) -> np.ndarray:
    return np.memmap(file, dtype, mode="r", shape=(count,)) if count else np.empty(0, dtype)  # mmap refuses length 0


def _check_size(file: Path, count: int, dtype: np.dtype, what: str) -> None:
    if not file.is_file():
        raise DataError(f"{file} is missing; copy the corpus again, or build it again")
    if (size := file.stat().st_size) != count * dtype.itemsize:
        raise DataError(
            f"{file} has {size} bytes, not the {count * dtype.itemsize} of its {count} {what}: it was truncated or "
            "changed; copy it again, or build the corpus again"
        )


class Corpus:
    """An opened corpus folder; ``verify`` also reads every file and compares checksums.

    Raises :class:`DataError` for a folder that is not a corpus and for a file that is missing, truncated or (with
    ``verify``) changed.
    """

    def __init__(self, path: str | Path, verify: bool = False):
        self.path = Path(path)
        self.manifest = Manifest.load(self.path)
        dtype, records = self.manifest.numpy_dtype, (self.manifest.train, self.manifest.validation)
        self._splits = {
            name: Split(self.path, name, record, dtype) for name, record in zip(SPLITS, records, strict=True)
        }
        if verify:
            if self.has_tokenizer:
                self._verify_tokenizer()
            for split in self._splits.values():
                split.verify()

    def split(self, name: str) -> Split:
        """The "train" or "validation" split; raises :class:`DataError` if it is empty, and for any other name."""
        if name not in self._splits:
            raise DataError(f"{self.path} has no split '{name}'; choose one of {', '.join(self._splits)}")
        split = self._splits[name]
        if not split.tokens:
            raise DataError(
                f"{self.path} has no {name} documents (its validation_share is {self.manifest.validation_share:g}); "
                "build it with another share, or turn validation off (--train.eval_every 0)"
            )
        return split

    @property
    def has_tokenizer(self) -> bool:
        """False for token data that was written without a tokenizer (:func:`colonnade.data.write_tokens`)."""
        return self.manifest.tokenizer_sha256 is not None

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the tokens; raises :class:`DataError` if there is none or its file has changed."""
        if not self.has_tokenizer:
            raise DataError(f"{self.path} has tokens but no tokenizer; pass it: Trainer(…, tokenizer=…)")
        self._verify_tokenizer()
        return Tokenizer.from_file(self.path / "tokenizer")

    def _verify_tokenizer(self) -> None:
        file = self.path / "tokenizer" / "tokenizer.json"
        if not file.is_file():
            raise DataError(f"{file} is missing; copy the corpus again, or build it again")
        if file_sha256(file) != self.manifest.tokenizer_sha256:
            raise DataError(
                f"{file} is not the tokenizer that produced these tokens; copy it again, or build the corpus again"
            )
