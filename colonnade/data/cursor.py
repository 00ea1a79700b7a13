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
"""

from dataclasses import dataclass

import numpy as np

_ROUNDS = 8
_LEAST_HALF = 2  # bits: on fewer, too few of the orders of a handful of samples are reached
GOLDEN = 0x9E3779B97F4A7C15
MASK = (1 << 64) - 1


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
    key = mix_one(mix_one(seed & MASK) ^ (epoch & MASK))
    keys = [mix_one((key + i * GOLDEN) & MASK) for i in range(_ROUNDS)]

    out = _encipher(places.astype(np.uint64), half, keys)
    while (outside := np.flatnonzero(out >= samples)).size:
        out[outside] = _encipher(out[outside], half, keys)
    return out.astype(np.int64)


def _encipher(x: np.ndarray, half: int, keys: list[int]) -> np.ndarray:
    low = np.uint64((1 << half) - 1)
    left, right = x >> np.uint64(half), x & low
    for key in keys:
        left, right = right, left ^ (mix(right + np.uint64(key)) & low)
    return left << np.uint64(half) | right


def mix(x: np.ndarray) -> np.ndarray:
    """splitmix64's finaliser, elementwise; uint64 arrays wrap around as the algorithm wants."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def mix_one(x: int) -> int:
    """One well-mixed number from one integer: splitmix64's first output for this seed."""
    return int(mix(np.array([x], np.uint64) + np.uint64(GOLDEN))[0])
