"""Writes a corpus from tokens in memory: lists, arrays, PyTorch datasets.

The tokens are read once and written as memory-mapped shards, like those of a text corpus, so that any number of
processes can read them and a resumed run continues with the next sample.
"""

import shutil
from collections.abc import Iterable, Iterator, Mapping, Sized
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from colonnade.config import short_repr
from colonnade.data.corpus import ShardWriter
from colonnade.data.corpus_folder import publish, temporary_folder
from colonnade.data.manifest import MANIFEST, SPLITS, Manifest, SplitRecord, token_dtype
from colonnade.data.tokenizer import Tokenizer
from colonnade.errors import DataError


@runtime_checkable
class MapDataset(Protocol):
    """A map-style PyTorch dataset: a length, and an item for each index below it."""

    def __len__(self) -> int:
        """Number of items."""
        ...

    def __getitem__(self, index: int, /) -> Any:
        """One item."""
        ...


TokenData = Iterable[Any] | MapDataset
"""Documents, each a list, array or tensor of token ids, or a mapping with one as "input_ids"."""
_REMEDY = "pass a list of token ids, or a mapping with input_ids"


def write_tokens(
    data: TokenData,
    out: str | Path,
    *,
    vocab_size: int | None = None,
    tokenizer: Tokenizer | str | Path | None = None,
    validation: TokenData | None = None,
    most_tokens: int | None = None,
    shard_tokens: int = 1 << 27,
    keep: bool = False,
) -> Manifest:
    """Write the documents of ``data`` to the corpus folder ``out``, atomically, and return its manifest.

    Items are stored unchanged, without an end token or padding; empty ones are skipped. Data without a length is read
    until it has ``most_tokens`` tokens. ``vocab_size`` defaults to that of ``tokenizer``; one of the two is needed. An
    existing corpus that differs is replaced, or refused if ``keep`` is set.

    Raises :class:`DataError` for items that are not ids of the vocabulary, for data without tokens, and for an existing
    corpus that differs if ``keep`` is set.
    """
    out = Path(out)
    tokenizer = tokenizer if isinstance(tokenizer, Tokenizer | None) else Tokenizer.from_file(tokenizer)
    size = vocab_size or (tokenizer.vocab_size if tokenizer else 0)
    if not size:
        raise DataError("neither a vocabulary size nor a tokenizer is given; set vocab_size to that of the model")
    folder = temporary_folder(out)
    folder.mkdir(parents=True)
    try:
        train, held_out = (
            _write(folder, name, part, size, most_tokens, shard_tokens)
            for name, part in zip(SPLITS, (data, () if validation is None else validation), strict=True)
        )
        if not train.tokens:
            raise DataError("the data has no tokens; if it is an exhausted iterator, create a new one")
        if tokenizer is not None:
            tokenizer.save(folder / "tokenizer")
        manifest = Manifest(
            dtype=token_dtype(size),
            vocab_size=size,
            tokenizer_sha256=tokenizer.fingerprint if tokenizer else None,
            validation_share=0,
            source_bytes=0,
            train=train,
            validation=held_out,
        )
        manifest.save(folder)
        if (out / MANIFEST).is_file() and Manifest.load(out) == manifest:
            return manifest
        if keep:
            raise DataError(
                f"the data differs from {out}, with which the run was started; pass the same data, omit it and "
                f"set data.path to {out}, or use another run name"
            )
        if out.exists() and not (out / MANIFEST).is_file():
            raise DataError(f"{out} exists and is not a corpus; choose another folder")
        publish(folder, out)
        return manifest
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _write(
    folder: Path, name: str, data: TokenData, vocab_size: int, most_tokens: int | None, shard_tokens: int
) -> SplitRecord:
    dtype = np.dtype(token_dtype(vocab_size)).newbyteorder("<")
    limit = None if isinstance(data, Sized) else most_tokens
    with ShardWriter(folder, name, dtype, shard_tokens) as writer:
        for number, item in enumerate(_items(data)):
            ids = _ids(item, number, vocab_size)
            if ids.size:
                writer.append(ids)  # type: ignore[arg-type] - it is converted to an array
                writer.end_document()
            if limit is not None and writer.tokens >= limit:
                break
        return writer.finish()


def _items(data: TokenData) -> Iterator[Any]:
    if isinstance(data, str | bytes | Mapping):
        raise DataError(f"the data is {short_repr(data)}; pass documents, each a list of token ids")
    if isinstance(data, Iterable):
        return iter(data)
    if isinstance(data, MapDataset):
        return (data[i] for i in range(len(data)))
    raise DataError(f"the data is a {type(data).__name__}; pass an iterable of token lists, or a PyTorch dataset")


def _ids(item: object, number: int, vocab_size: int) -> np.ndarray:
    """The token ids of item ``number``, validated."""
    value: Any = item.get("input_ids") if isinstance(item, Mapping) else item
    if isinstance(value, str | bytes):
        raise DataError(
            f"item {number} of the data is text, {short_repr(value)}; {_REMEDY}, or build a corpus from text"
        )
    try:
        ids = np.asarray(value)
    except (TypeError, ValueError):
        raise DataError(f"item {number} of the data is {short_repr(item)}; {_REMEDY}") from None
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise DataError(f"item {number} of the data is {short_repr(item)}; {_REMEDY}")
    if ids.size and (ids.min() < 0 or ids.max() >= vocab_size):
        invalid = ids.min() if ids.min() < 0 else ids.max()
        raise DataError(
            f"item {number} of the data has token {invalid}, and the vocabulary is {vocab_size}; use ids from 0 to "
            f"{vocab_size - 1}"
        )
    return ids
