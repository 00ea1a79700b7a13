"""Trains tokenizers, GPT-2's kind (byte-level BPE) and BERT's (WordPiece), and loads GPT-2's from its own files.

Byte-level BPE: text is split into words by GPT-2's pattern, words into bytes, and bytes are joined by the learned
merges, the most frequent first (Sennrich 2016, section 3.2; over bytes instead of characters: Radford 2019, section
2.2). All 256 bytes are in the vocabulary, so any text can be encoded without an unknown token.

WordPiece: text is lower-cased, accents are stripped and punctuation is split off; a word is then split from left to
right into the longest pieces of the vocabulary, all but the first prefixed by "##" (Wu 2016, arXiv 1609.08144, section
4.1; Devlin 2019, section 3).

The ``tokenizers`` library counts, merges and splits.
"""

import json
from collections.abc import Iterable
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from colonnade.errors import ConfigError, DataError

END = "<|endoftext|>"
"""GPT-2's special token between documents."""
PAD, UNKNOWN, CLS, SEP, MASK = "[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"
SPECIAL = (PAD, UNKNOWN, CLS, SEP, MASK)
"""BERT's special tokens, with ids 0 to 4."""
CONTINUATION_PREFIX = "##"
_MIN_WORDPIECE_SIZE = 256

_VISIBLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_HIDDEN = [byte for byte in range(256) if byte not in _VISIBLE]

BYTE_LEVEL = {chr(byte): byte for byte in _VISIBLE} | {chr(256 + i): byte for i, byte in enumerate(_HIDDEN)}
"""The byte of each character in a byte-level vocabulary: visible Latin-1 characters stand for themselves."""


def train_bpe(texts: Iterable[str], vocab_size: int, special: tuple[str, ...] = (END,)) -> tokenizers.Tokenizer:
    """Train a vocabulary of at most ``vocab_size`` tokens; the result does not depend on the order of the documents.

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
            raise DataError(
                f"{file} does not exist; GPT-2's tokenizer consists of two files, the vocabulary and its merges"
            )
    try:
        ids = json.loads(vocab.read_text("utf-8"))
    except ValueError as error:
        raise DataError(f"{vocab} is not JSON: {error}; use the vocabulary file, which maps tokens to ids") from None
    lines = merges.read_text("utf-8").splitlines()
    rules = [line.partition(" ") for line in lines if line and not line.startswith("#version")]
    try:
        return _assemble(models.BPE(vocab=ids, merges=[(left, right) for left, _, right in rules]))
    except Exception as error:  # noqa: BLE001 - the library raises a plain Exception for a merge of unknown tokens
        raise DataError(f"{merges} does not fit {vocab}: {error}; use two files of the same tokenizer") from None


def _assemble(model: models.BPE) -> tokenizers.Tokenizer:
    core = tokenizers.Tokenizer(model)
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return core


def train_wordpiece(texts: Iterable[str], vocab_size: int, *, lowercase: bool = True) -> tokenizers.Tokenizer:
    """Train a WordPiece vocabulary of at most ``vocab_size`` tokens; ids 0 to 4 are BERT's special tokens.

    Raises :class:`ConfigError` below 256, too few for the characters of a text.
    """
    if vocab_size < _MIN_WORDPIECE_SIZE:
        raise ConfigError(
            f"a WordPiece vocabulary of {vocab_size} is too small for the characters of a text; use "
            f"{_MIN_WORDPIECE_SIZE} or more"
        )
    core = tokenizers.Tokenizer(models.WordPiece(unk_token=UNKNOWN))
    core.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    core.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    core.decoder = decoders.WordPiece(prefix=CONTINUATION_PREFIX)
    core.train_from_iterator(
        texts,
        trainers.WordPieceTrainer(
            vocab_size=vocab_size,
            special_tokens=list(SPECIAL),
            continuing_subword_prefix=CONTINUATION_PREFIX,
            show_progress=False,
        ),
    )
    cls, sep = (core.token_to_id(token) for token in (CLS, SEP))
    assert cls is not None
    assert sep is not None
    core.post_processor = processors.TemplateProcessing(
        single=f"{CLS} $A {SEP}",
        pair=f"{CLS} $A {SEP} $B:1 {SEP}:1",
        special_tokens=[(CLS, cls), (SEP, sep)],
    )
    return core
