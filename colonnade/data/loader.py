"""The samples of a step, for one data rank: the same global batch, whoever shares it.

A step's global batch is the next ``batch`` samples of the :class:`~colonnade.data.cursor.Cursor`; the first
micro-batches of all R data ranks, one after another, are the first R·``micro_batch`` samples of it, the second ones the
next, and so on. So a step does not depend on how many ranks there are, nor does what is balanced within a micro-batch,
if R times its size stays the same. There is no state: a step is a function of how many samples the run has seen, which
is all that a checkpoint needs to keep.

There is no thread that reads ahead: packing 32 samples of 1024 tokens took 1.3 ms on one core of a busy two-core
machine, where GPT-2 1.2B takes half a second to train on them, on an H200.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Protocol

import numpy as np

from colonnade.config import DataConfig
from colonnade.data.batch import Batch, pack, samples_in
from colonnade.data.cursor import Cursor
from colonnade.data.shards import Split
from colonnade.errors import ConfigError, DataError


class Objective(Protocol):
    """What is made of a split: so many samples, and a batch of any of them."""

    samples: int
    """Samples in the split: one epoch."""

    def pack(self, samples: np.ndarray, numbers: np.ndarray) -> Batch:
        """The batch of these samples; ``numbers`` say which draw of each, where anything is drawn."""
        ...


class NextToken:
    """A causal model's: every token's target is the one after it, and nothing is drawn."""

    def __init__(self, split: Split, config: DataConfig):
        """Raises :class:`DataError` for too few tokens."""
        self._split, self._config = split, config
        self.samples = samples_in(split, config.sequence)
        if not self.samples:
            raise DataError(
                f"the {split.name} split has {split.tokens} tokens, and one sample with its last target needs "
                f"{config.sequence + 1}; add text, or set --data.sequence {max(split.tokens - 1, 1)} or less"
            )

    def pack(self, samples: np.ndarray, numbers: np.ndarray) -> Batch:
        """The batch of these samples."""
        return pack(self._split, samples, self._config.sequence, self._config.separate_documents)


class Loader:
    """Batches of ``split`` for data rank ``dp_rank`` of ``dp_size``."""

    def __init__(
        self,
        split: Split | None,
        config: DataConfig,
        batch: int,
        micro_batch: int,
        dp_rank: int = 0,
        dp_size: int = 1,
        objective: Objective | None = None,
    ):
        """``objective`` is :class:`NextToken` of ``split`` by default.

        Raises :class:`ConfigError` when the ranks cannot share a batch, :class:`DataError` for too few tokens.
        """
        if batch % dp_size:
            raise ConfigError(f"a batch of {batch} samples does not divide over {dp_size} data ranks; "
                              f"make it a multiple, such as {-(-batch // dp_size) * dp_size}")  # fmt: skip
        if objective is None:
            assert split is not None, "samples come from a split or from an objective"
            objective = NextToken(split, config)
        self._objective = objective
        self.samples = self._objective.samples
        """Samples in the split: one epoch."""
        assert 0 <= dp_rank < dp_size, (dp_rank, dp_size)
        assert micro_batch > 0, micro_batch
        self._config = config
        self._batch, self._micro_batch, self._rank, self._ranks = batch, micro_batch, dp_rank, dp_size
        self._cursor = Cursor(self.samples, config.seed)

    def at(self, seen: int) -> list[Batch]:
        """This rank's micro-batches of the step that begins after ``seen`` samples, counted over all ranks."""
        batches = []
        for places in self._shared(self._batch // self._ranks):
            first = int(places[0])
            batch = self._objective.pack(self._cursor.at(seen + first, len(places)), seen + places)
            batches.append(replace(batch, first=first * self._config.sequence))
        return batches

    def numbers(self, seen: int) -> list[int]:
        """The sample numbers of the step that begins after ``seen`` samples, those of all ranks in their order."""
        return self._cursor.at(seen, self._batch).tolist()

    def sweep(self, samples: int) -> Iterator[Batch]:
        """Micro-batches of ``samples`` samples spread evenly over the split (all of them, if it has fewer).

        For validation: always the same ones, whatever the seed and the ranks, who share them as those of a step. Every
        rank gets as many, because all must enter the collectives: for what is missing the last one is repeated with its
        targets ignored.
        """
        samples = min(samples, self.samples)
        for part in self._shared(-(-samples // self._ranks)):
            repeated = np.minimum(part, samples - 1)
            chosen = repeated * self.samples // samples
            batch = self._objective.pack(chosen, -1 - chosen)  # numbers that no training sample has
            batch = replace(batch, first=int(part[0]) * self._config.sequence)
            yield batch.scoring(int((part < samples).sum()), self._config.sequence)

    def _shared(self, share: int) -> Iterator[np.ndarray]:
        """The places of each micro-batch of this rank, of ``share`` places a rank: all ranks' first ones come first."""
        for before in range(0, share, self._micro_batch):
            size = min(self._micro_batch, share - before)
            yield before * self._ranks + self._rank * size + np.arange(size)
