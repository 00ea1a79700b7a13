"""BERT's samples: two neighbouring stretches of one document, in order or swapped, with masks.

    [CLS] first [SEP] second [SEP]            segments 0 0 0 1 1        at most ``sequence`` tokens

A document of n tokens is read in ⌈n / (sequence − 3)⌉ windows of that length, spread evenly, so that only a document
shorter than one gives a shorter sample. What such samples leave free of a batch is filled up at its end, with sequences
that no sample sees and that have no targets, so that every batch has as many tokens (torch.compile and pipelines need
one shape). A window is cut where a sentence ends (where it has
no such place, between two words), and one time in two its halves change places: to tell is the sentence-order task
(Lan 2020, arXiv 1909.11942, section 3.1), which replaces BERT's next-sentence task as in Megatron-LM, section 4.2.

Where to cut, whether to swap and what to mask are functions of (seed, number), ``number`` counting all samples that a
run has seen over all its ranks: the same for any plan and after any resume, and another in each epoch.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from colonnade.config import DataConfig
from colonnade.data.batch import Batch, power_of_two
from colonnade.data.masking import budget, key_of, mask, uniforms
from colonnade.data.shards import Split
from colonnade.data.wordpiece import Pieces
from colonnade.errors import ConfigError, DataError
from colonnade.model.loss import IGNORE

CONTROL = 3
"""[CLS] and two [SEP]."""


class Sample(NamedTuple):
    """One sequence before masking."""

    tokens: np.ndarray
    segments: np.ndarray
    order: int
    """0 in order, 1 swapped."""


class Pairs:
    """The samples of ``split``, by number; see :class:`colonnade.data.loader.Objective`."""

    def __init__(self, split: Split, config: DataConfig, pieces: Pieces):
        """Raises :class:`ConfigError` for a sequence too short for a pair, :class:`DataError` for no document."""
        self._body = config.sequence - CONTROL
        if self._body < 2:
            raise ConfigError(f"data.sequence {config.sequence} has no room for a pair of segments; use 5 or more")
        self._split, self._config, self._pieces = split, config, pieces
        ends = split.document_ends(0, split.tokens)
        self._starts = np.concatenate([[0], ends[:-1]]).astype(np.int64)
        self._lengths = ends - self._starts - 1  # without the end token
        windows = np.where(self._lengths >= 2, -(-self._lengths // self._body), 0)
        self._before = np.concatenate([[0], np.cumsum(windows)])
        self.samples = int(self._before[-1])
        """Samples in the split: one epoch."""
        if not self.samples:
            raise DataError(f"the {split.name} split has no document of two tokens or more; add text")

    def pack(self, samples: Sequence[int] | np.ndarray, numbers: Sequence[int] | np.ndarray) -> Batch:
        """The batch of these samples, each masked as its ``number`` says."""
        config, room = self._config, budget(self._body, self._config.mask_share)
        tokens, segments, targets, predicted, firsts, orders = [], [], [], [], [], []
        at = 0
        for sample, number in zip(samples, numbers, strict=True):
            key = key_of(config.seed, _BERT, int(number))
            one = self.sample(int(sample), key)
            masked, chosen = mask(one.tokens, self._pieces, key, share=config.mask_share, longest=config.mask_ngram)
            wanted = np.full(len(masked), IGNORE)
            wanted[chosen] = one.tokens[chosen]
            rows = np.full(room, at)  # filled up with [CLS], which has no target: the shape rarely changes
            rows[: len(chosen)] = chosen + at
            for part, value in ((tokens, masked), (segments, one.segments), (targets, wanted), (predicted, rows)):
                part.append(value)
            firsts.append(at)
            orders.append(one.order)
            at += len(masked)
        rest = len(tokens) * config.sequence - at
        for start in range(0, rest, config.sequence):
            empty = np.zeros(min(config.sequence, rest - start), np.int64)
            for part, value in ((tokens, self._pieces.cls), (segments, 0), (targets, IGNORE)):
                part.append(empty + value)
            at += len(empty)
        lengths = np.array([len(part) for part in tokens])
        equal = rest == 0
        starts = np.concatenate([[0], np.cumsum(lengths)])
        if not equal:
            starts = np.pad(starts, (0, power_of_two(len(lengths)) - len(lengths)), constant_values=at)
        as_tensor = lambda parts: torch.from_numpy(np.concatenate(parts).astype(np.int64))  # noqa: E731
        return Batch(
            tokens_T=as_tensor(tokens),
            positions_T=as_tensor([np.arange(n) for n in lengths]),
            targets_T=as_tensor(targets),
            cu_seqlens=torch.from_numpy(starts.astype(np.int32)),
            longest=config.sequence,
            equal=equal,
            segments_T=as_tensor(segments),
            predicted_R=as_tensor(predicted),
            first_R=torch.tensor(firsts),
            orders_R=torch.tensor(orders),
        )

    def sample(self, number: int, key: int) -> Sample:
        """Sample ``number`` (0 .. samples − 1), cut and ordered by ``key``."""
        document = int(np.searchsorted(self._before, number, side="right")) - 1
        which, windows = number - self._before[document], self._before[document + 1] - self._before[document]
        length, body = int(self._lengths[document]), self._body
        start = int(self._starts[document])
        if windows > 1:
            start += int(which * (length - body) // (windows - 1))
        window = self._split.read(start, start + min(length, body))
        where, swap = uniforms(key_of(key, _ORDER), 2)
        cut = self._cut(window, where)
        order = int(swap < 0.5)
        first, second = (window[cut:], window[:cut]) if order else (window[:cut], window[cut:])
        cls, sep = [self._pieces.cls], [self._pieces.sep]
        tokens = np.concatenate([cls, first, sep, second, sep]).astype(np.int64)
        return Sample(tokens, (np.arange(len(tokens)) >= len(first) + 2).astype(np.int64), order)

    def _cut(self, window: np.ndarray, where: float) -> int:
        """Where the second half begins: after a sentence, else before a word, else anywhere; ``where`` in [0, 1)."""
        inner = np.arange(1, len(window))
        word = ~self._pieces.continues_V[window[1:]]
        for places in (inner[word & self._pieces.ends_V[window[:-1]]], inner[word], inner):
            if len(places):
                return int(places[int(where * len(places))])
        raise AssertionError("a window has two tokens or more")


_BERT, _ORDER = 0xBE27, 0x50B
"""Keep these draws apart from those of the cursor, and from those of the masks."""
