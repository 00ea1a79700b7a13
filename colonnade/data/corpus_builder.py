"""Builds a corpus folder from text files.

documents -> tokenizer (passed or trained on the training documents) -> tokens, each document followed by its end
token -> training or validation split (:mod:`~colonnade.data.holdout`) -> shards, index of documents, manifest
"""

import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Literal

import numpy as np
from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from colonnade.config import plural
from colonnade.config.base import MAX_DIM
from colonnade.data.corpus import MAX_TASKS, ShardWriter
from colonnade.data.corpus_folder import check_output, publish, temporary_folder
from colonnade.data.holdout import HashedChunk, Holdout, choose_holdout
from colonnade.data.manifest import SPLITS, Manifest, SplitRecord, token_dtype
from colonnade.data.pairs import SENTINELS, sentinel
from colonnade.data.readers import ReadOptions, Source, find_files, read_documents, tasks_by_source, total_bytes
from colonnade.data.text_chunks import TextChunk
from colonnade.data.tokenizer import Tokenizer
from colonnade.errors import ConfigError, DataError

Stage = Literal["vocabulary", "tokens"]


@dataclass(frozen=True)
class BuildProgress:
    """Progress of a build."""

    stage: Stage
    """vocabulary: training the tokenizer. tokens: writing the shards."""
    done_bytes: int
    """Bytes of the sources read in this stage."""
    total_bytes: int
    """Size of the sources."""
    documents: int = 0
    """Documents written."""
    tokens: int = 0
    """Tokens written."""


ProgressCallback = Callable[[BuildProgress], None]


@contextmanager
def progress_bar(console: Console | None = None) -> Iterator[ProgressCallback]:
    """A progress callback for :func:`build` that prints to stderr: a bar on a terminal, otherwise a line per stage."""
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

        def update(progress: BuildProgress) -> None:
            if progress.stage not in tasks:
                tasks[progress.stage] = bars.add_task(progress.stage, total=progress.total_bytes, count="")
                if not console.is_terminal:
                    console.print(f"corpus: {progress.stage}, {decimal(progress.total_bytes)} of text")
            written = f"{progress.tokens:,} tokens, {plural(progress.documents, 'document')}" if progress.tokens else ""
            bars.update(tasks[progress.stage], completed=progress.done_bytes, count=written)

        yield update


_VOCAB_SIZE = 8192
_BATCH_CHARACTERS = 1 << 21  # tokenised at once: enough for many cores; the library needs about 100 MB for it
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
    objective: Literal["text", "spans", "pairs"] = "text",
    languages: str | None = None,
    vocabulary_bytes: int = 1 << 28,
    overwrite: bool = False,
    include: Mapping[str, Path] = MappingProxyType({}),
    progress: ProgressCallback | None = None,
) -> Manifest:
    """Write the corpus of ``sources`` to the folder ``out``, atomically, and return its manifest.

    - ``sources``: text, JSONL and Parquet files, folders of them, or (name, text) pairs.
    - ``tokenizer``: used unchanged. Without one a byte-level BPE (BERT's WordPiece with ``wordpiece``) of at most
      ``vocab_size`` tokens (default 8192) is trained on about ``vocabulary_bytes`` of the training documents.
    - ``field``: the JSONL field or Parquet column with the text.
    - ``separator``: the text between two documents of a text file; None: each file is one document.
    - ``tasks``: each document's task, for a router that uses it: "source", the one of ``sources`` that it comes from,
      or "field:NAME", the value of that field or column.
    - ``objective``: what an encoder–decoder trains on: "spans", running text whose trained vocabulary gets T5's
      sentinels; "pairs", two columns of a TSV file or two JSONL fields, ``field="source,target"``.
    - ``languages``: of pairs, "eng_Latn,deu_Latn": sources and targets begin with these special tokens (NLLB). A
      trained vocabulary gets them.
    - ``validation_share``: share of the documents that are held out for validation: at least one; of a single document,
      spans spread over it.
    - ``shard_tokens``: tokens per shard. ``overwrite``: replace an existing corpus.
    - ``include``: folders on the same disk that are moved into the corpus at its end, by their names there.

    Raises :class:`DataError` if files cannot be read or written and if there are no documents; :class:`ConfigError` for
    settings out of range.
    """
    out = Path(out)
    _check_settings(tokenizer, vocab_size, wordpiece, validation_share, shard_tokens, separator)
    check_output(out, overwrite)
    files, options = find_files(sources), _read_options(sources, field, separator, tasks)
    if objective == "pairs":
        options = _pair_options(options, separator, tasks)
    spoken = _language_names(languages, objective)
    names: dict[str, int] | None = None if tasks is None else {}
    size_bytes = total_bytes(files)
    holdout = choose_holdout(read_documents(files, options), validation_share)
    if objective == "pairs" and holdout.spans:
        raise DataError("there is only one pair, which cannot be both trained on and held out; add more")
    report = progress or (lambda _: None)

    folder = temporary_folder(out)
    try:
        folder.mkdir(parents=True)
        trains = tokenizer is None
        if tokenizer is None:
            chunks = _with_progress(read_documents(files, options), size_bytes, report)
            share = min(1.0, vocabulary_bytes / max(size_bytes, 1))
            train_tokenizer = Tokenizer.train_wordpiece if wordpiece else Tokenizer.train
            tokenizer = train_tokenizer(_sample_texts(chunks, holdout, share), vocab_size or _VOCAB_SIZE)
        elif not isinstance(tokenizer, Tokenizer):
            tokenizer = Tokenizer.from_file(tokenizer)
        if objective == "spans":
            tokenizer = _with_sentinels(tokenizer, trained=trains)
        if spoken is not None:
            tokenizer = _with_languages(tokenizer, spoken, trained=trains)
        if not tokenizer.eos_ids:
            raise DataError("the tokenizer has no token that ends a text; set eos_token in its tokenizer_config.json")
        tokenizer.save(folder / "tokenizer")
        train, validation = _write_shards(
            read_documents(files, options), folder, tokenizer, holdout, shard_tokens, size_bytes, report, names, spoken
        )
        manifest = Manifest(
            dtype=token_dtype(tokenizer.vocab_size),
            vocab_size=tokenizer.vocab_size,
            end_id=tokenizer.eos_ids[0],
            tokenizer_sha256=tokenizer.fingerprint,
            validation_share=validation_share,
            spans=holdout.spans,
            source_bytes=size_bytes,
            tasks=None if names is None else tuple(names),
            objective=objective,
            languages=spoken,
            train=train,
            validation=validation,
        )
        manifest.save(folder)
        for name, path in include.items():
            path.rename(folder / name)
        publish(folder, out)
    except OSError as error:  # readers convert errors of the sources to DataErrors
        raise DataError(f"cannot write {out}: {error.strerror}; free some space, or choose another folder") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # does not exist any more if all went well
    return manifest


def _read_options(sources: Sequence[Source], field: str, separator: str | None, tasks: str | None) -> ReadOptions:
    if tasks is None:
        return ReadOptions(field, separator)
    if tasks == "source":
        return ReadOptions(field, separator, tasks=tasks_by_source(sources))
    kind, _, name = tasks.partition(":")
    if kind != "field" or not name:
        raise ConfigError(f"--tasks {tasks} is neither source nor field:NAME; use one of them, or remove it")
    return ReadOptions(field, separator, name)


def _pair_options(options: ReadOptions, separator: str | None, tasks: str | None) -> ReadOptions:
    if separator is not None or tasks is not None:
        raise ConfigError("pairs have neither a separator nor tasks; remove --separator and --tasks")
    names = ["source", "target"] if options.field == "text" else options.field.split(",")
    if len(names) != 2 or not all(names):
        raise ConfigError(f"--field {options.field} does not name two fields; use --field SOURCE,TARGET")
    return options._replace(field=names[0], target_field=names[1])


def _with_sentinels(tokenizer: Tokenizer, *, trained: bool) -> Tokenizer:
    """``tokenizer`` with sentinels, the first one last as in T5's vocabulary; a given one must have them."""
    if trained:
        return tokenizer.with_special([sentinel(i) for i in reversed(range(SENTINELS))])
    if tokenizer.token_id(sentinel(0)) is None:
        raise DataError(
            f"the tokenizer has no {sentinel(0)}, which span corruption needs; use one with T5's sentinels, or none "
            "to train one"
        )
    return tokenizer


def _language_names(languages: str | None, objective: str) -> tuple[str, str] | None:
    if languages is None:
        return None
    names = languages.split(",")
    if objective != "pairs":
        raise ConfigError(f"--languages {languages} is for --objective pairs; remove it")
    if len(names) != 2 or not all(names):
        raise ConfigError(f"--languages {languages} does not name two; use --languages eng_Latn,deu_Latn")
    return names[0], names[1]


def _with_languages(tokenizer: Tokenizer, names: tuple[str, str], *, trained: bool) -> Tokenizer:
    """``tokenizer`` with the tokens of the languages; a given one must have them."""
    if trained:
        return tokenizer.with_special(list(dict.fromkeys(names)))
    if missing := [name for name in names if tokenizer.token_id(name) not in tokenizer.special_ids]:
        raise DataError(
            f"the tokenizer has no special token {missing[0]}; name languages that it has, or omit --tokenizer to "
            "train one"
        )
    return tokenizer


def _language_id(tokenizer: Tokenizer, name: str) -> int:
    token = tokenizer.token_id(name)
    assert token is not None, "the tokenizer has the languages of the pairs"
    return token


def _check_settings(
    tokenizer: object,
    vocab_size: int | None,
    wordpiece: bool,
    validation_share: float,
    shard_tokens: int,
    separator: str | None,
) -> None:
    if tokenizer is not None and wordpiece:
        raise ConfigError("--wordpiece trains a vocabulary, but a tokenizer is specified; remove one of them")
    if tokenizer is not None and vocab_size is not None:
        raise ConfigError(
            f"--vocab_size {vocab_size} is for training a vocabulary, but --tokenizer is set; remove one of them"
        )
    if vocab_size is not None and not 0 < vocab_size <= MAX_DIM:
        raise ConfigError(f"--vocab_size {vocab_size} is not from 1 to {MAX_DIM}; 8192 is usual for a small corpus")
    if not 0 <= validation_share < 1:
        raise ConfigError(f"--validation_share {validation_share} is not in [0, 1); it is a share of the documents")
    if shard_tokens < 1:
        raise ConfigError(f"shard_tokens {shard_tokens} is not positive; 2**27 makes files of 256 MiB")
    if separator == "":
        raise ConfigError("an empty separator matches everywhere; use the text between documents, or omit --separator")


def _sample_texts(chunks: Iterable[TextChunk], holdout: Holdout, share: float) -> Iterator[str]:
    """The text of about ``share`` of the training documents."""
    low = holdout.threshold
    return (chunk.text for chunk, value in holdout.hashed(chunks) if low <= value < low + share * (1 - low))


def _with_progress(chunks: Iterable[TextChunk], size_bytes: int, report: ProgressCallback) -> Iterator[TextChunk]:
    """The same chunks; reports the bytes read so far."""
    done, reported = 0, -_PROGRESS_BYTES
    for chunk in chunks:
        if done - reported >= _PROGRESS_BYTES:
            report(BuildProgress("vocabulary", reported := done, size_bytes))
        yield chunk
        done += chunk.size_bytes
    report(BuildProgress("vocabulary", size_bytes, size_bytes))


def _batches(chunks: Iterable[HashedChunk]) -> Iterator[list[HashedChunk]]:
    batch: list[HashedChunk] = []
    characters = 0
    for hashed in chunks:
        batch.append(hashed)
        characters += len(hashed.chunk.text)
        if characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _write_shards(
    chunks: Iterable[TextChunk],
    folder: Path,
    tokenizer: Tokenizer,
    holdout: Holdout,
    shard_tokens: int,
    size_bytes: int,
    report: ProgressCallback,
    names: dict[str, int] | None,
    languages: tuple[str, str] | None = None,
) -> tuple[SplitRecord, SplitRecord]:
    """Tokenise every document into the shards of its split; numbers new tasks in ``names``.

    ``languages`` begin the source and the target of each pair.
    """
    dtype = np.dtype(token_dtype(tokenizer.vocab_size)).newbyteorder("<")
    end, done = tokenizer.eos_ids[0], 0
    begin_source, begin_target = ([_language_id(tokenizer, name)] for name in languages) if languages else ([], [])
    begin = begin_source
    with ExitStack() as files:
        train, validation = (
            files.enter_context(ShardWriter(folder, name, dtype, shard_tokens, tasks=names is not None))
            for name in SPLITS
        )
        for batch in _batches(holdout.hashed(chunks)):
            encoded = tokenizer.encode_documents([chunk.text for chunk, _ in batch])
            for (chunk, value), tokens in zip(batch, encoded, strict=True):
                writer = validation if value < holdout.threshold else train
                writer.append([*begin, *tokens])
                begin = begin_target if chunk.ends_source else begin_source if chunk.last else []
                if chunk.ends_source:
                    writer.append([end])
                if chunk.last:
                    writer.append([end])
                    writer.end_document(None if names is None else _task_id(names, chunk.task))
                done += chunk.size_bytes
            written = train.documents + validation.documents, train.tokens + validation.tokens
            report(BuildProgress("tokens", min(done, size_bytes), size_bytes, *written))
        return train.finish(), validation.finish()


def _task_id(names: dict[str, int], task: str | None) -> int:
    """A task's number; tasks are numbered in the order of their first document."""
    assert task is not None, "every document has a task"
    if task not in names and len(names) == MAX_TASKS:
        raise DataError(f"there are more than {MAX_TASKS:,} tasks; choose a field with fewer values for --tasks")
    return names.setdefault(task, len(names))
