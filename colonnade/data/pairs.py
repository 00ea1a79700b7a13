"""Training samples of encoder–decoder models: pairs of texts, and span corruption of running text.

    source    s_1 … s_m end                 read by the encoder
    input     start t_1 … t_n               what the decoder reads
    target    t_1 … t_n end                 what it predicts

**Pairs.** A document of a corpus with the objective "pairs" is source, end token, target, end token. Both are cut to
the sample's lengths, and keep their end.

**Span corruption** (T5, arXiv 1910.10683, section 3.1.4; the sizes are those of the authors' code). Of n tokens
round(0.15 n) are noise, in round(noise / 3) spans at random places, the first never at the front. In the source each
span is replaced by a sentinel, <extra_id_0>, <extra_id_1>, …; the target lists each sentinel followed by its span:

    text      a b c d e f g         source   a <0> d e <1> g end         target   <0> b c <1> f end

A source of 512 tokens is made of 568, and its target has 114. Every random number is a hash of (seed, number), where
``number`` counts the samples of a run, so samples do not depend on the plan.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from colonnade.config import DataConfig
from colonnade.data.batch import Batch, cumulative_lengths
from colonnade.data.bert_samples import derive_key, uniform_floats
from colonnade.data.corpus import Split
from colonnade.data.tokenizer import Tokenizer
from colonnade.errors import ConfigError, DataError

NOISE_SHARE, MEAN_SPAN = 0.15, 3
SENTINELS = 100
"""Sentinels of a tokenizer trained for span corruption, as in T5's."""
_SPANS = 0x75


def sentinel(number: int) -> str:
    """The name of a sentinel, as in T5's vocabulary."""
    return f"<extra_id_{number}>"


class SpanSizes(NamedTuple):
    """Numbers of tokens in one sample of span corruption."""

    text: int
    noise: int
    spans: int

    @property
    def source(self) -> int:
        """Tokens of the source, its end included."""
        return self.text - self.noise + self.spans + 1

    @property
    def target(self) -> int:
        """Tokens of the target, its end included."""
        return self.noise + self.spans + 1

    @staticmethod
    def of_text(text: int) -> "SpanSizes":
        """The sizes for ``text`` tokens, at least 2."""
        noise = min(max(round(text * NOISE_SHARE), 1), text - 1)
        return SpanSizes(text, noise, min(max(round(noise / MEAN_SPAN), 1), text - noise))

    @staticmethod
    def for_source(source: int) -> "SpanSizes":
        """The most text whose source has at most ``source`` tokens."""
        text = 2
        while SpanSizes.of_text(text + 1).source <= source:
            text += 1
        return SpanSizes.of_text(text)


def corrupt_spans(tokens: np.ndarray, sentinels: Sequence[int], end: int, key: int) -> tuple[np.ndarray, np.ndarray]:
    """(source, target) of ``tokens``, both with ``end``; raises :class:`ConfigError` for too few ``sentinels``."""
    sizes = SpanSizes.of_text(len(tokens))
    if sizes.spans > len(sentinels):
        raise ConfigError(
            f"{len(tokens)} tokens have {sizes.spans} corrupted spans, and the tokenizer {len(sentinels)} sentinels; "
            "lower data.sequence"
        )
    noise = _segments(sizes.noise, sizes.spans, derive_key(key, 0))
    plain = _segments(sizes.text - sizes.noise, sizes.spans, derive_key(key, 1))
    source: list[int] = []
    target: list[int] = []
    at = 0
    for mark, kept, dropped in zip(sentinels, plain, noise, strict=False):
        source += [*tokens[at : at + kept], mark]
        target += [mark, *tokens[at + kept : at + kept + dropped]]
        at += kept + dropped
    return np.array([*source, end], np.int64), np.array([*target, end], np.int64)


def _segments(items: int, parts: int, key: int) -> list[int]:
    """The sizes of ``parts`` random non-empty parts of ``items``, all divisions equally likely."""
    order = np.argsort(uniform_floats(key, items - 1), kind="stable")
    cuts = np.sort(order[: parts - 1]) + 1
    return np.diff(cuts, prepend=0, append=items).tolist()


class SpanCorruption:
    """Samples of span corruption, an :class:`~colonnade.data.loader.Objective`; text runs on over documents."""

    def __init__(self, split: Split, config: DataConfig, tokenizer: Tokenizer, start: int):
        """``start``: the decoder's first token. Raises :class:`DataError` without sentinels or for too little text."""
        ids = (tokenizer.token_id(sentinel(i)) for i in range(SENTINELS))
        self._sentinels = [i for i in ids if i is not None]
        if not self._sentinels:
            raise DataError(
                f"the corpus's tokenizer has no {sentinel(0)}, which span corruption needs; build the corpus with "
                "colonnade corpus --objective spans"
            )
        self._split, self._config, self._start, self._end = split, config, start, tokenizer.eos_ids[0]
        self._sizes = SpanSizes.for_source(config.sequence)
        if self._sizes.source > config.sequence or self._sizes.target > config.sequence:
            raise ConfigError(f"data.sequence {config.sequence} is too short for span corruption; use 8 or more")
        self.samples = split.tokens // self._sizes.text
        """Samples per epoch."""
        if not self.samples:
            raise DataError(
                f"the {split.name} split has {split.tokens} tokens, and one sample needs {self._sizes.text}; add text, "
                "or lower --data.sequence"
            )

    def pack(self, samples: Sequence[int] | np.ndarray, numbers: Sequence[int] | np.ndarray) -> Batch:
        """The batch of these samples; ``numbers`` seed the places of the spans."""
        text = self._sizes.text
        pairs = [
            corrupt_spans(
                self._split.read(int(sample) * text, (int(sample) + 1) * text), self._sentinels, self._end,
                derive_key(self._config.seed, _SPANS, int(number)),
            )
            for sample, number in zip(samples, numbers, strict=True)
        ]  # fmt: skip
        return pack_pairs(pairs, self._start, self._config.sequence)


class Pairs:
    """Samples of a corpus of pairs, an :class:`~colonnade.data.loader.Objective`; nothing is random."""

    def __init__(self, split: Split, config: DataConfig, end: int, start: int):
        """``end`` ends sources and targets; ``start`` is the decoder's first token."""
        self._split, self._config, self._end, self._start = split, config, end, start
        self.samples = split.documents
        """Samples per epoch."""
        if not self.samples:
            raise DataError(f"the {split.name} split has no pairs; add some")

    def pack(self, samples: Sequence[int] | np.ndarray, numbers: Sequence[int] | np.ndarray) -> Batch:
        """The batch of these samples."""
        return pack_pairs([self.pair(int(sample)) for sample in samples], self._start, self._config.sequence)

    def pair(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """(source, target) of one document, each with its end."""
        tokens = self._split.document(number)
        ends = np.flatnonzero(tokens == self._end)
        if len(ends) != 2 or ends[-1] != len(tokens) - 1:
            raise DataError(
                f"document {number} of the {self._split.name} split is not a pair: it has {len(ends)} end tokens and "
                "needs one after the source and one after the target; build the corpus with --objective pairs"
            )
        first, limit = int(ends[0]) + 1, self._config.sequence
        return self._cut(tokens[:first], limit), self._cut(tokens[first:], limit)

    def _cut(self, tokens: np.ndarray, limit: int) -> np.ndarray:
        return tokens if len(tokens) <= limit else np.append(tokens[: limit - 1], self._end)


def pack_pairs(pairs: Sequence[tuple[np.ndarray, np.ndarray]], start: int, stride: int) -> Batch:
    """The batch of (source, target) pairs, whose tokens include their ends; none is longer than ``stride``."""
    sources, targets = [source for source, _ in pairs], [target for _, target in pairs]
    inputs = [np.concatenate([[start], target[:-1]]) for target in targets]
    cu_seqlens, longest, equal = _lengths(targets)
    cu_sources, longest_source, equal_sources = _lengths(sources)
    return Batch(
        tokens_T=_joined(inputs),
        positions_T=_joined([np.arange(len(x)) for x in targets]),
        targets_T=_joined(targets),
        cu_seqlens=cu_seqlens,
        longest=longest,
        equal=equal,
        first_R=cu_seqlens[:-1].long(),
        stride=stride,
        source_tokens_S=_joined(sources),
        source_positions_S=_joined([np.arange(len(x)) for x in sources]),
        cu_sources=cu_sources,
        longest_source=longest_source,
        equal_sources=equal_sources,
    )


def _lengths(texts: Sequence[np.ndarray]) -> tuple[Tensor, int, bool]:
    lengths = [len(text) for text in texts]
    return cumulative_lengths(lengths, padded=False), max(lengths), len(set(lengths)) == 1


def _joined(parts: Sequence[np.ndarray]) -> Tensor:
    return torch.from_numpy(np.concatenate(parts).astype(np.int64))
