"""Which samples come next: one number of state, any number of ranks, no table.

Samples are read in an order that is a seeded permutation of 0..N-1, a fresh one each epoch. The permutation is a
cipher on a small alphabet, so that any place in it can be computed alone, in constant time and memory:

    a Feistel network, (left, right) -> (right, left ^ F(right, key)), permutes 2^(2h) >= N numbers whatever F is
        (Luby and Rackoff 1988; here 8 rounds);
    walking its cycle, x -> E(x) until x < N, makes of it a permutation of 0..N-1
        (Black and Rogaway 2002, "Ciphers with arbitrary finite domains", section 3).

F is the finaliser of splitmix64 (Steele, Lea and Flood 2014, figure 16): we need an order without patterns, not a
secret. Of 2^(2h) < 4N numbers more than a quarter are below N, so a walk takes four steps at most on average.

The state of a run is how many samples all its ranks have consumed; a resume at another batch size or number of ranks
goes on with the next one.

The samples of a step, for one data rank: the same global batch, whoever shares it.

A step's global batch is the next ``batch`` samples of the :class:`~colonnade.data.loader.Cursor`; the first
micro-batches of all R data ranks, one after another, are the first R·``micro_batch`` samples of it, the second ones the
next, and so on. So a step does not depend on how many ranks there are, nor does what is balanced within a micro-batch,
if R times its size stays the same. There is no state: a step is a function of how many samples the run has seen, which
is all that a checkpoint needs to keep.

There is no thread that reads ahead: packing 32 samples of 1024 tokens took 1.3 ms on one core of a busy two-core
machine, where GPT-2 1.2B takes half a second to train on them, on an H200.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from colonnade.config import DataConfig
from colonnade.data.batch import Batch, count_samples, pack
from colonnade.data.corpus import Split
from colonnade.errors import ConfigError, DataError

_ROUNDS = 8
_LEAST_HALF = 2  # bits: on fewer, too few of the orders of a handful of samples are reached
GOLDEN_GAMMA = 0x9E3779B97F4A7C15
MASK64 = (1 << 64) - 1


@dataclass(frozen=True)
class Cursor:
    """The order of ``samples`` samples under ``seed``, epoch after epoch."""

    samples: int
    seed: int = 0

    def __post_init__(self) -> None:
        assert 0 < self.samples < 1 << 62, self.samples

    def at(self, seen: int, count: int) -> np.ndarray:
        """The ``count`` sample numbers (int64) that follow after ``seen`` samples; they may run over epochs."""
        parts: list[np.ndarray] = []
        while count > 0:
            epoch, start = divmod(seen, self.samples)
            take = min(count, self.samples - start)
            parts.append(permute(np.arange(start, start + take), self.samples, self.seed, epoch))
            seen, count = seen + take, count - take
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def indices(self, step: int, batch: int) -> np.ndarray:
        """The sample numbers of one step of a run whose every step takes ``batch`` samples."""
        return self.at(step * batch, batch)


def permute(places: np.ndarray, samples: int, seed: int, epoch: int) -> np.ndarray:
    """The samples that stand at ``places`` (each in 0..samples-1) of the order of ``seed`` and ``epoch``."""
    half = max(_LEAST_HALF, (max(samples - 1, 1).bit_length() + 1) // 2)
    key = splitmix64(splitmix64(seed & MASK64) ^ (epoch & MASK64))
    keys = [splitmix64((key + i * GOLDEN_GAMMA) & MASK64) for i in range(_ROUNDS)]

    out = _encipher(places.astype(np.uint64), half, keys)
    while (outside := np.flatnonzero(out >= samples)).size:
        out[outside] = _encipher(out[outside], half, keys)
    return out.astype(np.int64)


def _encipher(x: np.ndarray, half: int, keys: list[int]) -> np.ndarray:
    low = np.uint64((1 << half) - 1)
    left, right = x >> np.uint64(half), x & low
    for key in keys:
        left, right = right, left ^ (splitmix64_mix(right + np.uint64(key)) & low)
    return left << np.uint64(half) | right


def splitmix64_mix(x: np.ndarray) -> np.ndarray:
    """splitmix64's finaliser, elementwise; uint64 arrays wrap around as the algorithm wants."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def splitmix64(x: int) -> int:
    """One well-mixed number from one integer: splitmix64's first output for this seed."""
    return int(splitmix64_mix(np.array([x], np.uint64) + np.uint64(GOLDEN_GAMMA))[0])


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
        self.samples = count_samples(split, config.sequence)
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
            yield batch.keep_targets(int((part < samples).sum()), self._config.sequence)

    def _shared(self, share: int) -> Iterator[np.ndarray]:
        """The places of each micro-batch of this rank, of ``share`` places a rank: all ranks' first ones come first."""
        for before in range(0, share, self._micro_batch):
            size = min(self._micro_batch, share - before)
            yield before * self._ranks + self._rank * size + np.arange(size)
