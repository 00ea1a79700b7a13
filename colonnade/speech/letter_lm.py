"""A letter n-gram language model made from text, for beam searches (shallow fusion).

Probabilities are interpolated over contexts h of ORDER − 1 letters and fewer (Witten and Bell, 1991), h′ being h
without its first letter:

    P(c | h) = (count(h c) + kinds(h) · P(c | h′)) / (count(h) + kinds(h))        kinds(h): different letters after h

The text is stored as one integer for each position, its next ORDER letters in BITS each, sorted: all counts after a
context are differences of positions that a binary search finds, so there are no tables of n-grams.
"""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from colonnade.config.speech import SpeechConfig
from colonnade.errors import ConfigError, DataError

ORDER, BITS = 12, 5
CACHED = 1 << 16
"""Maximum number of contexts with cached probabilities."""
START = 0
"""Used instead of a letter: the start of a text, and its end. It is the label of the blank."""


class LetterModel:
    """Probabilities of the next letter after the last ORDER − 1, from text in a recogniser's letters."""

    def __init__(self, config: SpeechConfig, texts: Iterable[str]):
        if config.pieces or config.vocab_size > 1 << BITS:
            raise ConfigError(
                f"a letter model has at most {(1 << BITS) - 1} letters, and this recogniser's labels are pieces or more"
            )
        labels = [label for text in texts if text for label in (START, *config.labels(text))]
        if not labels:
            raise DataError("a letter model needs text; pass some")
        self.labels, self.letters = config.vocab_size, config.letters
        padded = np.array([*labels, *[START] * ORDER], np.int64)
        keys = np.zeros(len(labels), np.int64)
        for i in range(ORDER):
            keys = (keys << BITS) | padded[i : i + len(labels)]
        self.keys = np.sort(keys)
        self._kept: dict[tuple[int, ...], np.ndarray] = {}

    def probabilities(self, context: tuple[int, ...]) -> np.ndarray:
        """P of each label after ``context``, which may begin with START; the next label START ends the text."""
        context = context[-(ORDER - 1) :]
        found = self._kept.get(context)
        if found is None:
            if len(self._kept) >= CACHED:
                self._kept.clear()
            found = self._kept[context] = self._probabilities(context)
        return found

    def _probabilities(self, context: tuple[int, ...]) -> np.ndarray:
        shorter = self.probabilities(context[1:]) if context else np.full(self.labels, 1 / self.labels)
        packed = 0
        for label in context:
            packed = packed << BITS | label
        bounds = ((packed << BITS) + np.arange(self.labels + 1)) << BITS * (ORDER - 1 - len(context))
        counts = np.diff(np.searchsorted(self.keys, bounds))
        kinds = np.count_nonzero(counts)
        return (counts + kinds * shorter) / (counts.sum() + kinds) if kinds else shorter


class Fusion(NamedTuple):
    """Adds ``weight`` · log Σ share · P + ``bonus`` of each letter to a hypothesis' score.

    A model of a little in-domain text combined with one of much other text is better than one model of both.
    """

    models: tuple[LetterModel, ...]
    weight: float = 0.4
    shares: tuple[float, ...] = ()
    """Of each model, with the sum 1; by default equal ones."""
    bonus: float = 0.0
    """Logarithms below 0 prefer texts of few letters; the bonus makes up for it."""

    def check(self, config: SpeechConfig) -> None:
        """Raise :class:`ConfigError` unless this applies to a recogniser of ``config``."""
        for model in self.models:
            if config.pieces or model.letters != config.letters:
                raise ConfigError(
                    f"the language model has the letters {model.letters!r}, and the recogniser others; make it with "
                    "the recogniser's config"
                )
        shares = self.shares or (1.0,)
        valid = min(shares) >= 0 and abs(sum(shares) - 1) < 1e-6
        if not self.models or len(self.shares) not in (0, len(self.models)) or not valid:
            raise ConfigError(
                f"{len(self.models)} language models with the shares {self.shares}; pass one share "
                "per model, each at least 0, with the sum 1"
            )
        if not (0 <= self.weight < math.inf and math.isfinite(self.bonus)):
            raise ConfigError(
                f"weight {self.weight} and bonus {self.bonus}; pass finite numbers, and a weight of at least 0"
            )

    def logprobs(self, contexts: Sequence[tuple[int, ...]]) -> Tensor:
        """The score added to each label after each context, (R, V), float64."""
        shares = self.shares or (1 / len(self.models),) * len(self.models)
        pairs = list(zip(shares, self.models, strict=True))
        mixed = [np.sum([share * model.probabilities(each) for share, model in pairs], 0) for each in contexts]
        return self.weight * torch.from_numpy(np.log(mixed)) + self.bonus
