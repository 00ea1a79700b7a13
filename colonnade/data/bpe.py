"""Byte-level byte-pair encoding: GPT-2's, loaded from its own files, or trained on one's own text.

Text is cut into words by GPT-2's pattern, words into bytes, and bytes are joined again by the learnt merges, the most
frequent first (Sennrich 2016, section 3.2; over bytes instead of characters: Radford 2019, section 2.2). With all 256
bytes in the vocabulary any text can be encoded, and nothing is ever unknown. The counting and merging is the
``tokenizers`` library's.
"""

import json
from collections.abc import Iterable
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from colonnade.errors import ConfigError, DataError

END = "<|endoftext|>"
"""GPT-2's control token between documents."""


def train_bpe(texts: Iterable[str], vocab_size: int, special: tuple[str, ...] = (END,)) -> tokenizers.Tokenizer:
    """Learn a vocabulary of at most ``vocab_size`` tokens; equal texts, in whatever order, give an equal tokenizer.

    ``special`` tokens take the first ids; then come the 256 bytes, then the merges. Few texts may have fewer merges to
    learn than asked for: the result's own size is what counts. Raises :class:`ConfigError` below 256 + specials.
    """
    least = 256 + len(special)
    if vocab_size < least:
        raise ConfigError(f"a byte-level vocabulary needs 256 bytes and {len(special)} control tokens; "
                          f"{vocab_size} is too small, use {least} or more")  # fmt: skip
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
    """GPT-2's two files as one tokenizer; raises :class:`DataError` that names the file it cannot use."""
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
    except Exception as error:  # noqa: BLE001 - the library raises plain Exception, for a merge of unknown tokens
        raise DataError(f"{merges} does not fit {vocab}: {error}; give the two files of one tokenizer") from None


def _assemble(model: models.BPE) -> tokenizers.Tokenizer:
    core = tokenizers.Tokenizer(model)
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return core
