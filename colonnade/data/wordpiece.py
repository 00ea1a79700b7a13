"""WordPiece: BERT's vocabulary, learnt from one's own text, and what masking must know of one.

Text is lower-cased, its accents are stripped and punctuation is cut off; a word is then the longest pieces of the
vocabulary from left to right, every piece but the first spelt with "##" (Wu 2016, arXiv 1609.08144, section 4.1; Devlin
2019, section 3). The counting and cutting is the ``tokenizers`` library's.
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
"""Words after which a full stop ends no sentence."""
_MIN_VOCAB_SIZE = 256


def train_wordpiece(texts: Iterable[str], vocab_size: int, *, lowercase: bool = True) -> Tokenizer:
    """Learn a WordPiece vocabulary of at most ``vocab_size`` tokens; ids 0 to 4 are BERT's control tokens.

    Raises :class:`ConfigError` below 256, which hardly hold the characters of a text.
    """
    if vocab_size < _MIN_VOCAB_SIZE:
        raise ConfigError(
            f"a WordPiece vocabulary of {vocab_size} hardly holds a text's characters; use {_MIN_VOCAB_SIZE} or more"
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
    """What masking must know of a WordPiece vocabulary; make one with :meth:`of`."""

    cls: int
    """[CLS], which begins a sequence."""
    sep: int
    """[SEP], which ends a segment."""
    mask: int
    """[MASK]."""
    continues_V: np.ndarray
    """Whether a token goes on with the word of the one before."""
    ends_V: np.ndarray
    """Whether a token ends a sentence."""
    stops_V: np.ndarray
    """Whether it is a full stop, which may also abbreviate."""
    closes_V: np.ndarray
    """Whether it is a closing quote or bracket."""
    abbreviates_V: np.ndarray
    """Whether a full stop after it ends no sentence: a single letter, a title."""
    digits_V: np.ndarray
    """Whether it is a number, or a part of one."""
    special_V: np.ndarray
    """Whether it is a control token."""
    ordinary: np.ndarray
    """Every id that may stand in for another: no control token."""

    @staticmethod
    def of(tokenizer: Tokenizer) -> "MaskingVocabulary":
        """Those of ``tokenizer``; raises :class:`DataError` when it lacks one of BERT's control tokens."""
        ids = {token: tokenizer.token_id(token) for token in (CLS, SEP, MASK)}
        found = {token: i for token, i in ids.items() if i is not None}
        if lacking := ids.keys() - found.keys():
            raise DataError(
                f"the corpus's tokenizer has no {', '.join(sorted(lacking))}, which masking needs; build the corpus "
                "with a WordPiece vocabulary (colonnade corpus --wordpiece) or with a BERT's tokenizer (--tokenizer)"
            )
        spelt = [tokenizer.token(i) or "" for i in range(tokenizer.vocab_size)]
        special_V = np.array(
            [not word or i in tokenizer.special_ids or word.startswith("[unused") for i, word in enumerate(spelt)]
        )
        return MaskingVocabulary(
            found[CLS],
            found[SEP],
            found[MASK],
            np.array([word.startswith(CONTINUATION_PREFIX) for word in spelt]),
            np.array([word in SENTENCE_ENDS for word in spelt]),
            np.array([word == FULL_STOP for word in spelt]),
            np.array([word in CLOSING_PUNCTUATION for word in spelt]),
            np.array([word.lower() in TITLES or (len(word) == 1 and word in string.ascii_letters) for word in spelt]),
            np.array([word.removeprefix(CONTINUATION_PREFIX).isdigit() for word in spelt]),
            special_V,
            np.flatnonzero(~special_V),
        )
