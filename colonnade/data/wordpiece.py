"""WordPiece: trains BERT's kind of vocabulary, and classifies its tokens for masking.

Text is lower-cased, accents are stripped and punctuation is split off; a word is then split from left to right into the
longest pieces of the vocabulary, all but the first prefixed by "##" (Wu 2016, arXiv 1609.08144, section 4.1; Devlin
2019, section 3). The ``tokenizers`` library trains and splits.
"""

import string
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from colonnade.data.tokenizer import Tokenizer
from colonnade.errors import ConfigError, DataError

PAD, UNKNOWN, CLS, SEP, MASK = "[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"
SPECIAL = (PAD, UNKNOWN, CLS, SEP, MASK)
CONTINUATION_PREFIX = "##"
FULL_STOP = "."
SENTENCE_ENDS = (FULL_STOP, "!", "?")
CLOSING_PUNCTUATION = frozenset("\"'”’)]»")
TITLES = frozenset(["mr", "mrs", "ms", "messrs", "dr", "st", "gen", "col", "capt", "gov", "sen", "rev", "hon", "prof"])
"""Titles: a full stop after one of these words ends no sentence."""
_MIN_VOCAB_SIZE = 256


def train_wordpiece(texts: Iterable[str], vocab_size: int, *, lowercase: bool = True) -> Tokenizer:
    """Train a WordPiece vocabulary of at most ``vocab_size`` tokens; ids 0 to 4 are BERT's special tokens.

    Raises :class:`ConfigError` below 256, too few for the characters of a text.
    """
    if vocab_size < _MIN_VOCAB_SIZE:
        raise ConfigError(
            f"a WordPiece vocabulary of {vocab_size} is too small for a text's characters; use {_MIN_VOCAB_SIZE} or "
            "more"
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
    return Tokenizer(core, cls, (sep,))


@dataclass(frozen=True)
class MaskingVocabulary:
    """Properties of the tokens of a WordPiece vocabulary that masking needs; :meth:`of` makes one."""

    cls: int
    """[CLS], which begins a sequence."""
    sep: int
    """[SEP], which ends a segment."""
    mask: int
    """[MASK]."""
    continues_V: np.ndarray
    """Whether a token continues the word of the previous token."""
    ends_V: np.ndarray
    """Whether a token ends a sentence."""
    stops_V: np.ndarray
    """Whether it is a full stop, which may also mark an abbreviation."""
    closes_V: np.ndarray
    """Whether it is a closing quote or bracket."""
    abbreviates_V: np.ndarray
    """Whether a full stop after it marks an abbreviation: a single letter or a title."""
    digits_V: np.ndarray
    """Whether it is a number or part of one."""
    special_V: np.ndarray
    """Whether it is a special token."""
    ordinary: np.ndarray
    """All ids but special tokens; random replacements are drawn from these."""

    @staticmethod
    def of(tokenizer: Tokenizer) -> "MaskingVocabulary":
        """Classify a tokenizer's tokens; raises :class:`DataError` if it lacks one of BERT's special tokens."""
        ids = {token: tokenizer.token_id(token) for token in (CLS, SEP, MASK)}
        present = {token: i for token, i in ids.items() if i is not None}
        if missing := ids.keys() - present.keys():
            raise DataError(
                f"the corpus's tokenizer has no {', '.join(sorted(missing))}, which masking needs; build the corpus "
                "with a WordPiece vocabulary (colonnade corpus --wordpiece) or with a BERT tokenizer (--tokenizer)"
            )
        tokens = [tokenizer.token(i) or "" for i in range(tokenizer.vocab_size)]
        special_V = np.array(
            [not word or i in tokenizer.special_ids or word.startswith("[unused") for i, word in enumerate(tokens)]
        )
        return MaskingVocabulary(
            present[CLS],
            present[SEP],
            present[MASK],
            np.array([word.startswith(CONTINUATION_PREFIX) for word in tokens]),
            np.array([word in SENTENCE_ENDS for word in tokens]),
            np.array([word == FULL_STOP for word in tokens]),
            np.array([word in CLOSING_PUNCTUATION for word in tokens]),
            np.array([word.lower() in TITLES or (len(word) == 1 and word in string.ascii_letters) for word in tokens]),
            np.array([word.removeprefix(CONTINUATION_PREFIX).isdigit() for word in tokens]),
            special_V,
            np.flatnonzero(~special_V),
        )
