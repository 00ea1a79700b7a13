"""Word times: converts them to training targets, and alignments to them.

A letter target is one label for each 10 ms, ``parts`` of them per frame. A frame's targets are those of the last sound
that its front end has processed, so with subsampling they are ``parts`` − 1 earlier than the frame's own time. The
letters of a word share its time evenly, the space is between words, and the blank before the first and after the last
word. A cross-entropy against these targets makes forced alignment follow the times of the training data; CTC alone may
emit a letter anywhere in the frames that the encoder sees at once (docs/log.md, "Times of words").
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from colonnade.config.speech import SpeechConfig
from colonnade.errors import DataError
from colonnade.kernels.ctc import Span
from colonnade.speech.features import HOP, RATE

PARTS = 4
"""Letter targets of a frame of 40 ms."""
PART_S = HOP / RATE
"""Length of a letter target [s]."""
UNKNOWN = -1
"""The target of a recording without known times."""
SPACE_PARTS = 2
"""Minimum length of a space."""


class WordTime(NamedTuple):
    """A word of a known text with its start and end [s] and the mean probability of its letters there."""

    word: str
    start_s: float
    end_s: float
    score: float


def delayed_parts(config: SpeechConfig) -> int:
    """Letter targets by which frame 0's first one is before the beginning of the sound."""
    return config.parts - 1 if config.front_end == "subsampling" else 0


def letter_targets(
    labels: Sequence[int],
    space: int,
    words: Sequence[tuple[float, float]],
    frames: int,
    parts: int = PARTS,
    delay: int = 0,
) -> Tensor:
    """The label of each 10 ms, (parts · frames,), ``delay`` of them late, from the start and end of each word [s].

    ``labels`` is the whole text, ``space`` its label of the space. Raises DataError if the number of words differs.
    """
    targets = torch.zeros(parts * frames, dtype=torch.long)
    spelled: list[list[int]] = [[]]
    for label in labels:
        if label == space:
            spelled.append([])
        else:
            spelled[-1].append(label)
    if len(spelled) != len(words):
        raise DataError(
            f"{len(words)} word times, but the text has {len(spelled)} words; pass one (start, end) per word"
        )
    bounds = [[round(start / PART_S) + delay, round(end / PART_S) + delay] for start, end in words]
    for before, after in itertools.pairwise(bounds):
        if after[0] - before[1] < SPACE_PARTS:
            middle = (before[1] + after[0]) // 2
            before[1], after[0] = middle - SPACE_PARTS // 2, middle + SPACE_PARTS // 2
        targets[before[1] : after[0]] = space
    for own, (start, stop) in zip(spelled, bounds, strict=True):
        first = max(0, start)
        # A word may be too short for a target of its own, or after the end of the recording.
        places = torch.arange(first, max(first, min(stop, len(targets))))
        if len(own) and len(places):
            targets[places] = torch.tensor(own)[(places - start) * len(own) // (stop - start)]
    return targets


def word_times(text: str, spans: Sequence[Span], delay: int = 0) -> list[WordTime]:
    """The words of ``text`` from the spans of its labels, in units of 10 ms, ``delay`` of them late."""
    found: list[WordTime] = []
    place = 0
    for word in text.split(" "):
        own = spans[place : place + len(word)]
        if own:
            score = sum(span.score for span in own) / len(own)
            start, stop = (max(0, place_10ms - delay) * PART_S for place_10ms in (own[0].start, own[-1].stop))
            found.append(WordTime(word, start, stop, score))
        place += len(word) + 1
    return found
