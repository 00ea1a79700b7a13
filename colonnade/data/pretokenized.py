"""A corpus from tokens that a program already has: lists, arrays, PyTorch datasets.

The tokens are read once and written as memory-mapped shards, like those of a corpus of text. So a run on them has the
same data cursor: any number of processes read it, and a resumed run goes on with the very next sample.
"""

import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sized
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from colonnade.config import short_repr
from colonnade.data.corpus import ShardWriter
from colonnade.data.corpus_builder import publish
from colonnade.data.manifest import MANIFEST, SPLITS, Manifest, SplitRecord, token_dtype
from colonnade.data.tokenizer import Tokenizer
from colonnade.errors import DataError


@runtime_checkable
class MapDataset(Protocol):
    """A map-style dataset, as PyTorch has them: a length, and an item for each number below it."""

    def __len__(self) -> int:
        """Items in all."""
        ...

    def __getitem__(self, index: int, /) -> Any:
        """One item."""
        ...


TokenData = Iterable[Any] | MapDataset
"""Documents, each a list, array or tensor of token ids, or a mapping that holds one as "input_ids"."""
_REMEDY = "give a list of token ids, or a mapping with input_ids"


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
    """Write the documents of ``data`` to the corpus folder ``out``, whole or not at all, and return its manifest.

    Items are taken as they are, without an end token or padding; empty ones are left out. Data without a length is read
    until there are ``most_tokens`` of it. ``vocab_size`` is the ``tokenizer``'s unless it is given; one of the two is
    needed. A corpus that is there is replaced if it differs, unless ``keep`` says that it must not.

    Raises :class:`DataError` for items that are no token ids of the vocabulary, for no tokens at all, and for a corpus
    that must be kept and differs.
    """
    out = Path(out)
    words = tokenizer if isinstance(tokenizer, Tokenizer | None) else Tokenizer.from_file(tokenizer)
    size = vocab_size or (words.vocab_size if words else 0)
    if not size:
        raise DataError("neither a vocabulary size nor a tokenizer is given; set vocab_size to that of the model")
    folder = (here := out.absolute()).with_name(f".{here.name}.building-{secrets.token_hex(4)}")
    folder.mkdir(parents=True)
    try:
        train, held_out = (
            _write(folder, name, part, size, most_tokens, shard_tokens)
            for name, part in zip(SPLITS, (data, () if validation is None else validation), strict=True)
        )
        if not train.tokens:
            raise DataError("the data has no tokens; an iterator that was read before is empty: give it anew")
        if words is not None:
            words.save(folder / "tokenizer")
        manifest = Manifest(
            dtype=token_dtype(size),
            vocab_size=size,
            tokenizer_sha256=words and words.fingerprint,
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
                f"the data is not that of {out}, which the run was begun with; give the same data, leave it out and "
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
    most = None if isinstance(data, Sized) else most_tokens
    with ShardWriter(folder, name, dtype, shard_tokens) as writer:
        for number, item in enumerate(_items(data)):
            ids = _ids(item, number, vocab_size)
            if ids.size:
                writer.append(ids)  # type: ignore[arg-type] - it makes an array of it
                writer.end_document()
            if most is not None and writer.tokens >= most:
                break
        return writer.finish()


def _items(data: TokenData) -> Iterator[Any]:
    if isinstance(data, str | bytes | Mapping):
        raise DataError(f"the data is {short_repr(data)}; give documents, each a list of token ids")
    if isinstance(data, Iterable):
        return iter(data)
    if isinstance(data, MapDataset):
        return (data[i] for i in range(len(data)))
    raise DataError(f"the data is a {type(data).__name__}; give an iterable of token lists, or a PyTorch dataset")


def _ids(item: object, number: int, vocab_size: int) -> np.ndarray:
    """The token ids of item ``number``, checked."""
    given: Any = item.get("input_ids") if isinstance(item, Mapping) else item
    if isinstance(given, str | bytes):
        raise DataError(
            f"item {number} of the data is text, {short_repr(given)}; {_REMEDY}, or build a corpus of texts"
        )
    try:
        ids = np.asarray(given)
    except (TypeError, ValueError):
        raise DataError(f"item {number} of the data is {short_repr(item)}; {_REMEDY}") from None
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise DataError(f"item {number} of the data is {short_repr(item)}; {_REMEDY}")
    if ids.size and (ids.min() < 0 or ids.max() >= vocab_size):
        strange = ids.min() if ids.min() < 0 else ids.max()
        raise DataError(
            f"item {number} of the data has token {strange}, and the vocabulary is {vocab_size}; give ids from 0 to "
            f"{vocab_size - 1}"
        )
    return ids
