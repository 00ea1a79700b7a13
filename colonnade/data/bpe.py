"""Byte-level byte-pair encoding: GPT-2's vocabulary loaded from its own files, or one trained on a corpus.

Text is split into words by GPT-2's pattern, words into bytes, and bytes are joined by the learned merges, the most
frequent first (Sennrich 2016, section 3.2; over bytes instead of characters: Radford 2019, section 2.2). All 256 bytes
are in the vocabulary, so any text can be encoded without an unknown token. The ``tokenizers`` library counts and
merges.
"""

import json
from collections.abc import Iterable
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from colonnade.errors import ConfigError, DataError

END = "<|endoftext|>"
"""GPT-2's special token between documents."""

_VISIBLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_HIDDEN = [byte for byte in range(256) if byte not in _VISIBLE]

BYTE_LEVEL = {chr(byte): byte for byte in _VISIBLE} | {chr(256 + i): byte for i, byte in enumerate(_HIDDEN)}
"""The byte of each character in a byte-level vocabulary: visible Latin-1 characters stand for themselves."""


def train_bpe(texts: Iterable[str], vocab_size: int, special: tuple[str, ...] = (END,)) -> tokenizers.Tokenizer:
    """Train a vocabulary of at most ``vocab_size`` tokens; the result does not depend on the order of the texts.

    ``special`` tokens have the first ids, followed by the 256 bytes and the merges. A small corpus may yield fewer
    merges and so a smaller vocabulary. Raises :class:`ConfigError` for less than 256 + len(special).
    """
    smallest = 256 + len(special)
    if vocab_size < smallest:
        raise ConfigError(
            f"a byte-level vocabulary needs 256 bytes and {len(special)} special tokens; {vocab_size} is too small, "
            f"use {smallest} or more"
        )
    core = _assemble(models.BPE())
    core.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=list(special),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return core


def byte_level_bpe(vocab: Path, merges: Path) -> tokenizers.Tokenizer:
    """The tokenizer of GPT-2's two files; raises :class:`DataError`, naming the file, if one is missing or invalid."""
    for file in (vocab, merges):
        if not file.is_file():
            raise DataError(f"{file} does not exist; GPT-2's tokenizer is two files, the vocabulary and its merges")
    try:
        ids = json.loads(vocab.read_text("utf-8"))
    except ValueError as error:
        raise DataError(f"{vocab} is not JSON: {error}; give the vocabulary file, token to id") from None
    lines = merges.read_text("utf-8").splitlines()
    rules = [line.partition(" ") for line in lines if line and not line.startswith("#version")]
    try:
        return _assemble(models.BPE(vocab=ids, merges=[(left, right) for left, _, right in rules]))
    except Exception as error:  # noqa: BLE001 - the library raises a plain Exception for a merge of unknown tokens
        raise DataError(f"{merges} does not fit {vocab}: {error}; give the two files of one tokenizer") from None


def _assemble(model: models.BPE) -> tokenizers.Tokenizer:
    core = tokenizers.Tokenizer(model)
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return core
