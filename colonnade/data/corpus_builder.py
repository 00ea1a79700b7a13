"""Telling people how far a corpus is: a record for whoever wants it, a bar on a terminal, a line elsewhere.

From files of text to the folder that training reads.

    documents -> a tokenizer, given or learnt from the training documents -> tokens, each document closed by its end
    token -> train or validation -> shards, index, manifest

Which documents are held out: :mod:`colonnade.data.holdout`.
"""

import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from colonnade.config import file_suffix, plural
from colonnade.config.base import MAX_DIM
from colonnade.data.corpus import MAX_TASKS, ShardWriter
from colonnade.data.holdout import HashedChunk, Holdout, choose_holdout
from colonnade.data.manifest import MANIFEST, SPLITS, Manifest, SplitRecord, token_dtype
from colonnade.data.readers import (
    ReadOptions,
    Source,
    TextChunk,
    find_files,
    read_documents,
    tasks_by_source,
    total_bytes,
)
from colonnade.data.tokenizer import Tokenizer
from colonnade.data.wordpiece import train_wordpiece
from colonnade.errors import ConfigError, DataError

Stage = Literal["vocabulary", "tokens"]


@dataclass(frozen=True)
class BuildProgress:
    """How far a build is."""

    stage: Stage
    """vocabulary: learning the tokenizer. tokens: writing the shards."""
    done_bytes: int
    """Bytes of the sources behind us in this stage."""
    total_bytes: int
    """Bytes of the sources."""
    documents: int = 0
    """Documents written."""
    tokens: int = 0
    """Tokens written."""


ProgressCallback = Callable[[BuildProgress], None]


@contextmanager
def progress_bar(console: Console | None = None) -> Iterator[ProgressCallback]:
    """A listener for :func:`corpus.build` that draws on stderr: a bar on a terminal, else one line a stage."""
    console = console or Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[count]}"),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as bars:
        tasks = {}

        def listen(built: BuildProgress) -> None:
            if built.stage not in tasks:
                tasks[built.stage] = bars.add_task(built.stage, total=built.total_bytes, count="")
                if not console.is_terminal:
                    console.print(f"corpus: {built.stage}, {decimal(built.total_bytes)} of text")
            so_far = f"{built.tokens:,} tokens, {plural(built.documents, 'document')}" if built.tokens else ""
            bars.update(tasks[built.stage], completed=built.done_bytes, count=so_far)

        yield listen


_VOCAB_SIZE = 8192
_BATCH_CHARACTERS = 1 << 21  # tokenised at once: enough for many cores, and about 100 MB of the library's records
_PROGRESS_BYTES = 1 << 20


def build(
    sources: Sequence[Source],
    out: str | Path,
    *,
    tokenizer: str | Path | Tokenizer | None = None,
    vocab_size: int | None = None,
    wordpiece: bool = False,
    validation_share: float = 0.05,
    shard_tokens: int = 1 << 27,
    field: str = "text",
    separator: str | None = None,
    tasks: str | None = None,
    vocabulary_bytes: int = 1 << 28,
    overwrite: bool = False,
    progress: ProgressCallback | None = None,
) -> Manifest:
    """Write the corpus of ``sources`` to the folder ``out``, whole or not at all, and return its manifest.

    ``sources`` are text, JSONL and Parquet files, folders of them, or (name, text) pairs. ``tokenizer`` is used as it
    is; without one a byte-level BPE (BERT's WordPiece with ``wordpiece``) of ``vocab_size`` tokens (default 8192) is
    learnt from about ``vocabulary_bytes`` of the training documents. ``field`` names the JSONL field or Parquet column;
    ``separator`` is what stands between the documents of a text file (by default a file is one). ``tasks`` says what
    task a document is of, for a router that decides by it: "source", the one of ``sources`` that it came from, or
    "field:NAME", what that field or column of it holds. ``validation_share``
    is the share of documents kept from training: at least one, and of a single document spans spread over it.
    ``shard_tokens`` is the size of a file of tokens. ``overwrite`` replaces a corpus that is in the way.

    Raises :class:`DataError` for what cannot be read or written and for no documents at all; :class:`ConfigError` for
    settings out of range.
    """
    out = Path(out)
    _check_settings(tokenizer, vocab_size, wordpiece, validation_share, shard_tokens, separator)
    _check_output(out, overwrite)
    found, how = find_files(sources), _read_options(sources, field, separator, tasks)
    names: dict[str, int] | None = None if tasks is None else {}
    size_bytes = total_bytes(found)
    division = choose_holdout(read_documents(found, how), validation_share)
    tell = progress or (lambda _: None)

    # Beside ``out``, so that the last step is a rename within one file system: a kill leaves this folder, never ``out``
    folder = (here := out.absolute()).with_name(f".{here.name}.building-{secrets.token_hex(4)}")
    try:
        folder.mkdir(parents=True)
        if tokenizer is None:
            pieces = _with_progress(read_documents(found, how), size_bytes, tell)
            share = min(1.0, vocabulary_bytes / max(size_bytes, 1))
            learn = train_wordpiece if wordpiece else Tokenizer.train
            tokenizer = learn(_sample_texts(pieces, division, share), vocab_size or _VOCAB_SIZE)
        elif not isinstance(tokenizer, Tokenizer):
            tokenizer = Tokenizer.from_file(tokenizer)
        if not tokenizer.eos_ids:
            raise DataError("the tokenizer names no token that ends a text; set eos_token in its tokenizer_config.json")
        tokenizer.save(folder / "tokenizer")
        train, validation = _write_shards(
            read_documents(found, how), folder, tokenizer, division, shard_tokens, size_bytes, tell, names
        )
        manifest = Manifest(
            dtype=token_dtype(tokenizer.vocab_size),
            vocab_size=tokenizer.vocab_size,
            end_id=tokenizer.eos_ids[0],
            tokenizer_sha256=tokenizer.fingerprint,
            validation_share=validation_share,
            spans=division.spans,
            source_bytes=size_bytes,
            tasks=None if names is None else tuple(names),
            train=train,
            validation=validation,
        )
        manifest.save(folder)
        publish(folder, out)
    except OSError as error:  # the sources' own are DataErrors by now
        raise DataError(f"cannot write {out}: {error.strerror}; make room, or choose another place") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # it has its final name already if all went well
    return manifest


def _read_options(sources: Sequence[Source], field: str, separator: str | None, tasks: str | None) -> ReadOptions:
    if tasks is None:
        return ReadOptions(field, separator)
    if tasks == "source":
        return ReadOptions(field, separator, tasks=tasks_by_source(sources))
    kind, _, name = tasks.partition(":")
    if kind != "field" or not name:
        raise ConfigError(f"--tasks {tasks} is neither source nor field:NAME; use one of them, or leave it out")
    return ReadOptions(field, separator, name)


def _check_settings(
    tokenizer: object,
    vocab_size: int | None,
    wordpiece: bool,
    validation_share: float,
    shard_tokens: int,
    separator: str | None,
) -> None:
    if tokenizer is not None and wordpiece:
        raise ConfigError("a tokenizer is given, and a WordPiece vocabulary is to be learnt; leave out one of them")
    if tokenizer is not None and vocab_size is not None:
        raise ConfigError(f"--tokenizer is given, and --vocab_size {vocab_size} to learn one; leave out one of them")
    if vocab_size is not None and not 0 < vocab_size <= MAX_DIM:
        raise ConfigError(f"--vocab_size {vocab_size} is not from 1 to {MAX_DIM}; 8192 is usual for a small corpus")
    if not 0 <= validation_share < 1:
        raise ConfigError(f"--validation_share {validation_share} is not in [0, 1); it is a share of the documents")
    if shard_tokens < 1:
        raise ConfigError(f"shard_tokens {shard_tokens} is not positive; 2**27 makes files of 256 MiB")
    if separator == "":
        raise ConfigError("an empty separator stands everywhere; give what is between two documents, or no --separator")


def _check_output(out: Path, overwrite: bool) -> None:
    if suffix := file_suffix(out):
        raise DataError(f"{out} names one {suffix} file, and a corpus is a folder; leave {suffix} out")
    if out.is_dir() and not any(out.iterdir()):
        return
    if (out / MANIFEST).is_file():
        if not overwrite:
            raise DataError(f"{out} holds a corpus already; choose another folder, or replace it (--overwrite)")
    elif out.exists():
        raise DataError(f"{out} exists and is not a corpus; choose another folder")


def _sample_texts(pieces: Iterable[TextChunk], division: Holdout, share: float) -> Iterator[str]:
    """The text of about ``share`` of the training documents."""
    low = division.threshold
    return (piece.text for piece, lot in division.draw(pieces) if low <= lot < low + share * (1 - low))


def _with_progress(pieces: Iterable[TextChunk], size_bytes: int, tell: ProgressCallback) -> Iterator[TextChunk]:
    """The same pieces, telling how many bytes have gone by."""
    done, told = 0, -_PROGRESS_BYTES
    for piece in pieces:
        if done - told >= _PROGRESS_BYTES:
            tell(BuildProgress("vocabulary", told := done, size_bytes))
        yield piece
        done += piece.size_bytes
    tell(BuildProgress("vocabulary", size_bytes, size_bytes))


def _batches(drawn: Iterable[HashedChunk]) -> Iterator[list[HashedChunk]]:
    batch: list[HashedChunk] = []
    characters = 0
    for one in drawn:
        batch.append(one)
        characters += len(one.piece.text)
        if characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _write_shards(
    pieces: Iterable[TextChunk],
    folder: Path,
    tokenizer: Tokenizer,
    division: Holdout,
    shard_tokens: int,
    size_bytes: int,
    tell: ProgressCallback,
    names: dict[str, int] | None,
) -> tuple[SplitRecord, SplitRecord]:
    """Tokenise every document into the shards of its split; ``names`` are the tasks, filled as they come."""
    dtype = np.dtype(token_dtype(tokenizer.vocab_size)).newbyteorder("<")
    end, done = tokenizer.eos_ids[0], 0
    with ExitStack() as files:
        train, validation = (
            files.enter_context(ShardWriter(folder, name, dtype, shard_tokens, tasks=names is not None))
            for name in SPLITS
        )
        for batch in _batches(division.draw(pieces)):
            encoded = tokenizer.encode_documents([piece.text for piece, _ in batch])
            for (piece, lot), tokens in zip(batch, encoded, strict=True):
                writer = validation if lot < division.threshold else train
                writer.append(tokens)
                if piece.last:
                    writer.append([end])
                    writer.end_document(None if names is None else _task_id(names, piece.task))
                done += piece.size_bytes
            written = train.documents + validation.documents, train.tokens + validation.tokens
            tell(BuildProgress("tokens", min(done, size_bytes), size_bytes, *written))
        return train.finish(), validation.finish()


def _task_id(names: dict[str, int], task: str | None) -> int:
    """A task's number, in the order in which they first came."""
    assert task is not None, "every document has a task"
    if task not in names and len(names) == MAX_TASKS:
        raise DataError(f"there are more than {MAX_TASKS:,} tasks; choose a field with fewer values for --tasks")
    return names.setdefault(task, len(names))


def publish(folder: Path, out: Path) -> None:
    """Give the finished folder its name; what it replaces is deleted only when it stands there."""
    aside = folder.with_name(f"{folder.name}.old")
    if replaced := (out / MANIFEST).is_file():
        out.rename(aside)
    try:
        folder.rename(out)
    except OSError:
        if replaced:
            aside.rename(out)
        raise
    if hasattr(os, "O_DIRECTORY"):  # the rename itself reaches the disk where directories can be opened
        handle = os.open(folder.parent, os.O_RDONLY | os.O_DIRECTORY)
        os.fsync(handle)
        os.close(handle)
    if replaced:
        shutil.rmtree(aside)
