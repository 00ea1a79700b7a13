"""Everything that the sampling of one token depends on, except the logits; rank 0 sends it to the other ranks."""

import struct
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import BinaryIO, NamedTuple

from colonnade.serve.sampling_params import SamplingParams

NOT_FINITE = -1
"""Returned in place of a token if the logits contain NaN or no finite value."""


class LogitsChanges(NamedTuple):
    """Changes to one row of logits: first a penalty and a bias for some tokens, then a mask over the vocabulary."""

    tokens: tuple[int, ...]
    """Ids, each at most once."""
    scales: tuple[float, ...]
    """Divide positive logits and multiply negative ones."""
    biases: tuple[float, ...]
    """Added afterwards."""
    mask: bytes | None = None
    """Bit i % 8 of byte i // 8 is set if token i is allowed; tokens beyond the end are not."""


class SampleArgs(NamedTuple):
    """Everything that the sampling of one token depends on, except the logits."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    index: int
    """Number of tokens generated before it."""
    logprobs: int = -1
    """How many alternatives to return with the token's log-probability; negative for no log-probability."""
    changes: LogitsChanges | None = None
    """Applied to the logits before sampling; log-probabilities are those of the raw logits."""
    tempered: bool = False
    """Divide the logits by the temperature before log-probabilities."""

    @staticmethod
    def of(params: SamplingParams, seed: int, index: int, changes: LogitsChanges | None = None) -> "SampleArgs":
        """Arguments for token ``index`` of a request."""
        logprobs = -1 if params.logprobs is None else params.logprobs
        return SampleArgs(
            params.temperature, params.top_k, params.top_p, params.min_p, seed, index, logprobs, changes,
            params.tempered_logprobs,
        )  # fmt: skip

    @property
    def greedy(self) -> bool:
        """True if the most probable token is taken."""
        return self.temperature == 0

    @property
    def filtered(self) -> bool:
        """True if tokens must be sorted (top-k or top-p)."""
        return self.top_k > 0 or self.top_p < 1

    def pack(self) -> tuple[int, ...]:
        """Encode as int64 values, the floats by their bits; without the mask of ``changes``."""
        numbers = _float_bits((self.temperature, self.top_p, self.min_p))
        values = (*numbers, self.seed, self.index, self.top_k, self.logprobs, int(self.tempered))
        if self.changes is None:
            return (*values, -1)
        tokens, scales, biases, mask = self.changes
        return (*values, len(tokens), len(mask or b""), *tokens, *_float_bits(scales), *_float_bits(biases))

    @staticmethod
    def unpack(values: Iterator[int], masks: BinaryIO) -> "SampleArgs":
        """The inverse of :meth:`pack`; takes what it needs of ``values`` and ``masks``."""
        temperature, top_p, min_p = _from_bits(values, 3)
        seed, index, top_k, logprobs, tempered, count = islice(values, 6)
        changes = None
        if count >= 0:
            mask_bytes = next(values)
            tokens = tuple(islice(values, count))
            scales, biases = _from_bits(values, count), _from_bits(values, count)
            changes = LogitsChanges(tokens, scales, biases, masks.read(mask_bytes) or None)
        return SampleArgs(temperature, top_k, top_p, min_p, seed, index, logprobs, changes, bool(tempered))


def _float_bits(numbers: Sequence[float]) -> tuple[int, ...]:
    return struct.unpack(f"<{len(numbers)}q", struct.pack(f"<{len(numbers)}d", *numbers))


def _from_bits(values: Iterator[int], count: int) -> tuple[float, ...]:
    return struct.unpack(f"<{count}d", struct.pack(f"<{count}q", *islice(values, count)))
