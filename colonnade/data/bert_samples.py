"""BERT's training samples: two neighbouring runs of sentences of one document, in order or swapped, with masks.

    [CLS] first [SEP] second [SEP]            segments 0 0 0 1 1        at most ``sequence`` tokens

The sentence-order task, which of the two runs came first (Lan 2020, arXiv 1909.11942, section 3.1), replaces BERT's
next-sentence task as in Megatron-LM, section 4.2. Only the content may reveal the order, so both runs are treated in
the same way:

- A sample starts at the first sentence after a random position of its document and takes as many whole sentences as
  fit. A sentence that does not fit is dropped, not cut: a sentence that crosses a bound is longer than others, and its
  end would always be in the later run.
- The boundary between the runs is drawn from all sentence ends within the sample. Half of the samples are swapped.
- If two sentences together exceed a sample, they are truncated after the swap, the longer one first, at both ends, to
  whole words (Devlin 2019, appendix A.2).
- If a sentence is longer than a sample, or no sentence end is found, the sample is a run of words of twice its length,
  cut between any two of them and truncated in the same way: without its neighbour a word at the cut does not reveal the
  order.

A share of ``short_seq_prob`` of the samples has a random shorter length (Devlin). A document of n tokens has
⌈n / (sequence − 3)⌉ samples an epoch, each in its own part of the document. A batch is padded at its end with sequences
that no sample attends to and that have no targets, so that every batch has the same number of tokens (torch.compile and
pipelines need one shape).

Sentences. A sentence begins at the first word after a full stop, an exclamation or a question mark and the closing
quotes and brackets that follow it. A full stop within a number (3.5) or after an initial or a title (U. S., Mr.) ends
none. A sample reads only a few times its length around its start to find them.

Masks. Words are chosen in random order, each with the length of its n-gram, n with probability ∝ 1/n up to ``longest``,
until ``share`` of the tokens are chosen; an n-gram that would exceed the budget is shortened, and none contains a
special token (whole words and n-grams: Joshi 2020, arXiv 1907.10529, section 3.1, and Lan 2020, section 4.1). All
tokens of an n-gram are treated in the same way, as in Joshi, because a visible piece would reveal the rest of its word:
they become [MASK] with probability 0.8, random tokens with 0.1, and stay with 0.1 (Devlin 2019, section 3.1).

Randomness. Every random number is a hash of (seed, number, index), where ``number`` counts the samples that a run has
seen over all ranks. So a sample's position, cut, order and masks do not depend on the plan, the batch or a resume, and
differ in each epoch.
"""

import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from colonnade.config import DataConfig
from colonnade.data.batch import Batch, cumulative_lengths
from colonnade.data.corpus import Split
from colonnade.data.loader import GOLDEN_GAMMA, MASK64, splitmix64, splitmix64_mix
from colonnade.data.tokenizer import Tokenizer
from colonnade.data.train_tokenizer import CLS, CONTINUATION_PREFIX, MASK, SEP
from colonnade.errors import ConfigError, DataError
from colonnade.model.loss import IGNORE

MASK_PROBABILITY, RANDOM_PROBABILITY = 0.8, 0.1
FULL_STOP = "."
SENTENCE_ENDS = (FULL_STOP, "!", "?")
CLOSING_PUNCTUATION = frozenset("\"'”’)]»")
TITLES = frozenset(["mr", "mrs", "ms", "messrs", "dr", "st", "gen", "col", "capt", "gov", "sen", "rev", "hon", "prof"])
"""Titles: a full stop after one of these words ends no sentence."""


@dataclass(frozen=True)
class MaskingVocabulary:
    """Token properties of a WordPiece vocabulary for masking, built by :meth:`of`."""

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


def derive_key(seed: int, *numbers: int) -> int:
    """A key hashed from a seed and numbers; it depends on the numbers' order."""
    key = splitmix64(seed & MASK64)
    for number in numbers:
        key = splitmix64(key ^ (number & MASK64))
    return key


def uniform_floats(key: int, count: int) -> np.ndarray:
    """``count`` float64 numbers in [0, 1), a function of ``key``; a smaller count gives a prefix."""
    counters = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(GOLDEN_GAMMA) + np.uint64(key)
    return (splitmix64_mix(counters) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def mask_budget(tokens: int, share: float) -> int:
    """The largest number of masked tokens among ``tokens`` maskable ones; at least 1 if there are any."""
    return min(tokens, max(1, round(tokens * share)))


def word_spans(tokens_T: np.ndarray, vocabulary: MaskingVocabulary) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(start, end, run) of each word; ``run`` increases at each special token."""
    special_T = vocabulary.special_V[tokens_T]
    after_special_T = np.concatenate([[True], special_T[:-1]])
    first_T = ~special_T & (~vocabulary.continues_V[tokens_T] | after_special_T)
    starts = np.flatnonzero(first_T)
    stops = np.append(starts[1:], len(tokens_T))
    # A word ends at the next special token.
    bounds = np.flatnonzero(special_T)
    next_bound = np.append(bounds, len(tokens_T))[np.searchsorted(bounds, starts)]
    return starts, np.minimum(stops, next_bound), np.searchsorted(bounds, starts)


def mask_tokens(
    tokens_T: np.ndarray, vocabulary: MaskingVocabulary, key: int, *, share: float = 0.15, longest: int = 3
) -> tuple[np.ndarray, np.ndarray]:
    """(tokens with masks, sorted indices of the chosen tokens) of one sequence with its special tokens."""
    starts, stops, run = word_spans(tokens_T, vocabulary)
    count = len(starts)
    remaining = mask_budget(int((~vocabulary.special_V[tokens_T]).sum()), share)
    order = np.argsort(uniform_floats(derive_key(key, 0), count), kind="stable")
    lengths = (
        np.searchsorted(_ngram_probabilities(longest), uniform_floats(derive_key(key, 1), count), side="right") + 1
    )
    fates, others = uniform_floats(derive_key(key, 2), count), uniform_floats(derive_key(key, 3), len(tokens_T))

    masked_T, chosen_T, taken = tokens_T.copy(), np.zeros(len(tokens_T), bool), np.zeros(count, bool)
    for word in order.tolist():
        if not remaining:
            break
        for n in range(int(lengths[word]), 0, -1):
            last = word + n - 1
            if last >= count or run[last] != run[word] or taken[word : last + 1].any():
                continue
            span = slice(starts[word], stops[last])
            size = int(span.stop - span.start)
            if size > remaining:
                continue
            taken[word : last + 1], chosen_T[span], remaining = True, True, remaining - size
            if fates[word] < MASK_PROBABILITY:
                masked_T[span] = vocabulary.mask
            elif fates[word] < MASK_PROBABILITY + RANDOM_PROBABILITY:
                masked_T[span] = vocabulary.ordinary[(others[span] * len(vocabulary.ordinary)).astype(np.int64)]
            break
    return masked_T, np.flatnonzero(chosen_T)


def _ngram_probabilities(longest: int) -> np.ndarray:
    """Cumulative probabilities of n-grams of 1 .. longest - 1 words."""
    weights = 1 / np.arange(1, longest + 1)
    return np.cumsum(weights)[:-1] / weights.sum()


def sentence_starts(tokens_T: np.ndarray, vocabulary: MaskingVocabulary) -> np.ndarray:
    """Sorted indices (1 .. T-1) of the tokens that begin a sentence; index 0 is never listed."""
    T = len(tokens_T)
    if T < 2:
        return np.empty(0, np.int64)
    ends_T, closes_T = vocabulary.ends_V[tokens_T], vocabulary.closes_V[tokens_T]
    at_T = np.arange(T)
    # For each token the last one up to it that is not a closing quote or bracket: it may end a sentence.
    mark_T = np.maximum.accumulate(np.where(closes_T, 0, at_T))
    before_T = np.maximum(mark_T - 1, 0)
    after_T = np.minimum(mark_T + 1, T - 1)
    within_number = vocabulary.digits_V[tokens_T[before_T]] & vocabulary.digits_V[tokens_T[after_T]]
    # A single letter or a title must be a whole word: "b" in "club" is a continuation.
    abbreviated = vocabulary.abbreviates_V[tokens_T[before_T]]
    ended_T = ends_T[mark_T] & ~(vocabulary.stops_V[tokens_T[mark_T]] & (within_number | abbreviated))
    begins_T = ~(ends_T | closes_T | vocabulary.continues_V[tokens_T])
    return 1 + np.flatnonzero(ended_T[:-1] & begins_T[1:])


SPECIAL_TOKENS = 3
"""[CLS] and two [SEP]."""


class Sample(NamedTuple):
    """One sequence before masking."""

    tokens: np.ndarray
    segments: np.ndarray
    order: int
    """0: in order, 1: swapped."""


class SentencePairs:
    """BERT's samples of ``split``, an :class:`~colonnade.data.loader.Objective`."""

    def __init__(self, split: Split, config: DataConfig, vocabulary: MaskingVocabulary):
        """Raises :class:`ConfigError` if the sequence is too short for a pair, :class:`DataError` without documents."""
        self._body = config.sequence - SPECIAL_TOKENS
        if self._body < 2:
            raise ConfigError(f"data.sequence {config.sequence} is too short for a pair of segments; use 5 or more")
        self._split, self._config, self._vocabulary = split, config, vocabulary
        ends = split.document_ends(0, split.tokens)
        self._starts = np.concatenate([[0], ends[:-1]]).astype(np.int64)
        self._lengths = ends - self._starts - 1  # without the end token
        windows = np.where(self._lengths >= 2, -(-self._lengths // self._body), 0)
        self._before = np.concatenate([[0], np.cumsum(windows)])
        self.samples = int(self._before[-1])
        """Samples per epoch."""
        if not self.samples:
            raise DataError(f"the {split.name} split has no document of two tokens or more; add text")

    def pack(self, samples: Sequence[int] | np.ndarray, numbers: Sequence[int] | np.ndarray) -> Batch:
        """The batch of these samples; ``numbers`` are the seeds of their positions, order and masks."""
        config, rows_per_sample = self._config, mask_budget(self._body, self._config.mask_share)
        tokens, segments, targets, predicted, firsts, orders = [], [], [], [], [], []
        at = 0
        for sample, number in zip(samples, numbers, strict=True):
            key = derive_key(config.seed, _BERT, int(number))
            one = self.sample(int(sample), key)
            masked, chosen = mask_tokens(
                one.tokens, self._vocabulary, key, share=config.mask_share, longest=config.mask_ngram
            )
            target = np.full(len(masked), IGNORE)
            target[chosen] = one.tokens[chosen]
            rows = np.full(rows_per_sample, at)  # padded with [CLS], which has no target: the shape rarely changes
            rows[: len(chosen)] = chosen + at
            for part, value in ((tokens, masked), (segments, one.segments), (targets, target), (predicted, rows)):
                part.append(value)
            firsts.append(at)
            orders.append(one.order)
            at += len(masked)
        padding = len(tokens) * config.sequence - at
        for start in range(0, padding, config.sequence):
            zeros = np.zeros(min(config.sequence, padding - start), np.int64)
            for part, value in ((tokens, self._vocabulary.cls), (segments, 0), (targets, IGNORE)):
                part.append(zeros + value)
            at += len(zeros)
        lengths = [len(part) for part in tokens]
        equal = padding == 0
        as_tensor = lambda parts: torch.from_numpy(np.concatenate(parts).astype(np.int64))  # noqa: E731
        return Batch(
            tokens_T=as_tensor(tokens),
            positions_T=as_tensor([np.arange(n) for n in lengths]),
            targets_T=as_tensor(targets),
            cu_seqlens=cumulative_lengths(lengths, padded=not equal),
            longest=config.sequence,
            equal=equal,
            segments_T=as_tensor(segments),
            predicted_R=as_tensor(predicted),
            first_R=torch.tensor(firsts),
            orders_R=torch.tensor(orders),
        )

    def sample(self, number: int, key: int) -> Sample:
        """Sample ``number`` (0 .. samples − 1); ``key`` determines its position, cut and order."""
        position, short, size, cut, swap = uniform_floats(derive_key(key, _ORDER), 5)
        target = self._body if short >= self._config.short_seq_prob else 2 + int(size * (self._body - 1))
        tokens, edges = self._run(number, position, target)
        middle = int(edges[1 + int(cut * (len(edges) - 2))])
        halves = tokens[edges[0] : middle], tokens[middle : edges[-1]]
        order = int(swap < 0.5)
        first, second = self._truncate(halves[order], halves[1 - order], uniform_floats(derive_key(key, _FRONT), 2))
        cls, sep = [self._vocabulary.cls], [self._vocabulary.sep]
        tokens = np.concatenate([cls, first, sep, second, sep]).astype(np.int64)
        return Sample(tokens, (np.arange(len(tokens)) >= len(first) + 2).astype(np.int64), order)

    def _run(self, number: int, position: float, target: int) -> tuple[np.ndarray, np.ndarray]:
        """(tokens around a sample, edges): the sample is tokens edges[0] .. edges[-1], cut at one of the inner edges.

        Start positions range from one sample before the document, clipped to its beginning, to its end, where a sample
        takes the last sentences. So all tokens of a document are about equally likely to be in a sample.
        """
        document = int(np.searchsorted(self._before, number, side="right")) - 1
        part, parts = number - self._before[document], self._before[document + 1] - self._before[document]
        length, body = int(self._lengths[document]), self._body
        start = int((part + position) * (length + body) / parts) - body
        low, high = max(0, start - 2 * body), min(length, start + 3 * body)
        tokens = self._split.read(int(self._starts[document]) + low, int(self._starts[document]) + high)
        bounds = [[0] * (low == 0), sentence_starts(tokens, self._vocabulary), [len(tokens)] * (high == length)]
        edges, start = np.concatenate(bounds).astype(np.int64), max(start - low, 0)

        at = int(np.searchsorted(edges, start))
        to_the_end = high == length and len(tokens) - edges[at] <= target
        if to_the_end:
            at = int(np.searchsorted(edges, len(tokens) - target))
        chosen = edges[at : np.searchsorted(edges, edges[at] + target, side="right")] if at < len(edges) else edges[:0]
        if len(chosen) < 3:
            chosen = edges[-3:] if to_the_end else edges[at : at + 3]
        if len(chosen) < 3 or (len(chosen) == 3 and max(np.diff(chosen)) > body):
            start = min(start, max(len(tokens) - 2 * body, 0))
            chosen = self._words(tokens, start, min(start + 2 * body, len(tokens)), least=2)
        return tokens, chosen

    def _words(self, tokens: np.ndarray, start: int, stop: int, least: int) -> np.ndarray:
        """Starts of the words from ``start`` to ``stop``, or of the tokens, if there are not ``least`` words."""
        begins = np.append(~self._vocabulary.continues_V[tokens], True)
        edges = start + np.flatnonzero(begins[start : stop + 1])
        return edges if len(edges) > least else np.arange(start, stop + 1)

    def _truncate(self, first: np.ndarray, second: np.ndarray, front: np.ndarray) -> list[np.ndarray]:
        """Truncate both segments to a sample's length together: the longer one first, until they are equally long.

        ``front`` is the share of each segment's removed tokens that is removed at its front.
        """
        truncated: list[np.ndarray] = []
        for half, other, share in ((first, second, front[0]), (second, first, front[1])):
            limit = max(self._body - len(other), self._body // 2)
            start = int(share * (max(len(half) - limit, 0) + 1))
            edges = self._words(half, start, start + limit, least=1) if len(half) > limit else (0, len(half))
            truncated.append(half[edges[0] : edges[-1]])
        return truncated


_BERT, _ORDER, _FRONT = 0xBE27, 0x50B, 0xF207
"""Hashed into keys, so that these random numbers are independent of the masks' and of the sample order."""
