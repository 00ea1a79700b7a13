"""Word times: converts them to training targets, and alignments to them.

A letter target is one label for each 10 ms (a fourth of a frame). The letters of a word share its time evenly, the
space is between words, and the blank before the first and after the last word. A cross-entropy against these targets
makes forced alignment follow the times of the training data; CTC alone may emit a letter anywhere in the frames that
the encoder sees at once (docs/log.md, "Times of words").
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from colonnade.errors import DataError
from colonnade.kernels.ctc import Span
from colonnade.speech.features import FRAME, HOP, RATE

PARTS = FRAME // HOP
"""Letter targets of a frame."""
PART_S = HOP / RATE
"""Length of a letter target [s]."""
UNKNOWN = -1
"""The target of a recording whose times are unknown."""
SPACE_PARTS = 2
"""Least length of a space."""


class WordTime(NamedTuple):
    """A word of a known text with its start and end [s] and the mean probability of its letters there."""

    word: str
    start_s: float
    end_s: float
    score: float


def letter_targets(labels: Sequence[int], space: int, words: Sequence[tuple[float, float]], frames: int) -> Tensor:
    """The label of each 10 ms, (4 · frames,), from the start and end of each word [s].

    ``labels`` is the whole text, ``space`` its label of the space. Raises DataError if the words are not as many.
    """
    targets = torch.zeros(PARTS * frames, dtype=torch.long)
    spelled: list[list[int]] = [[]]
    for label in labels:
        if label == space:
            spelled.append([])
        else:
            spelled[-1].append(label)
    if len(spelled) != len(words):
        raise DataError(f"{len(words)} times of words, but the text has {len(spelled)}; give one (start, end) a word")
    bounds = [[round(start / PART_S), round(end / PART_S)] for start, end in words]
    for before, after in itertools.pairwise(bounds):
        if after[0] - before[1] < SPACE_PARTS:
            middle = (before[1] + after[0]) // 2
            before[1], after[0] = middle - SPACE_PARTS // 2, middle + SPACE_PARTS // 2
        targets[before[1] : after[0]] = space
    for own, (start, stop) in zip(spelled, bounds, strict=True):
        places = torch.arange(max(0, start), min(stop, len(targets)))
        if len(own) and len(places):
            targets[places] = torch.tensor(own)[(places - start) * len(own) // (stop - start)]
    return targets


def word_times(text: str, spans: Sequence[Span]) -> list[WordTime]:
    """The words of ``text`` from the spans of its labels, in units of 10 ms."""
    found: list[WordTime] = []
    place = 0
    for word in text.split(" "):
        own = spans[place : place + len(word)]
        if own:
            score = sum(span.score for span in own) / len(own)
            found.append(WordTime(word, own[0].start * PART_S, own[-1].stop * PART_S, score))
        place += len(word) + 1
    return found
