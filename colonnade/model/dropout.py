"""Dropout (Srivastava 2014) as a value in the stream: there is no training mode and no generator.

A stream with a :class:`Dropout` is trained with dropout; without one there is none, so there is no training switch.
Whether an element is dropped is a hash of the step's key, the layer, the token's index in the global batch and the
feature, so every layout and every recomputation drops the same ones (:mod:`colonnade.kernels.dropout`). What a stateful
generator returns depends on who drew from it before; here ranks that hold the same token agree without communication,
ranks that hold different tokens draw independently, and a repeated step draws the same values.

Key 0 is the embedding's, key 1 + i that of block i; after the decoder's keys come an encoder's, in the same order, and
those of the decoder's cross attention. Sites in a block: after attention, after the feed-forward part (both before the
residual addition, as in GPT-2), the attention probabilities, and the experts' hidden units.
"""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from colonnade.kernels.dropout import AttentionDropout, uniform
from colonnade.kernels.registry import choose

EMBEDDING, ATTENTION, FFN = 0, 1, 2
"""Sites on the residual stream."""
POOLED = 3
"""Site of a classifier's input, under the embedding's key."""
CROSS = 7
"""Site on the residual stream after cross attention; 3 to 6 are a router's (:mod:`colonnade.model.moe.router`)."""
_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


class DropoutRates(NamedTuple):
    """The share of elements that is dropped, 0 <= rate < 1."""

    residual: float = 0.0
    """Outputs of attention and feed-forward parts before the residual addition, and a classifier's input."""
    attention: float = 0.0
    """Attention probabilities."""
    embedding: float = 0.0
    """Embeddings."""
    expert: float = 0.0
    """Hidden units of routed experts."""


@dataclass(frozen=True)
class BlockDropout:
    """Dropout, and other random numbers, of one block or of the embedding. Only tensors differ between blocks."""

    key: Tensor
    """0-dim int64: a hash of seed, step and block."""
    index_T: Tensor
    """int64: the index of each row's token in the step's global batch."""
    rates: DropoutRates

    def drop(self, x_TD: Tensor, site: int, rate: float, start: int = 0) -> Tensor:
        """``x_TD`` with elements dropped at ``rate``; its first column is feature ``start``."""
        if not rate:
            return x_TD
        run = choose("dropout", x_TD.device.type, x_TD.dtype)
        return run(x_TD, self.key, self.index_T, site=site, rate=rate, start=start)

    def uniform(self, columns: int, site: int) -> Tensor:
        """float64 (T, columns) uniform in [0, 1)."""
        return uniform(self.key, self.index_T, columns, site)

    def normal(self, columns: int, site: int) -> Tensor:
        """float64 (T, columns) of the standard normal distribution (Box and Muller 1958)."""
        u_T2C = self.uniform(2 * columns, site)
        radius_TC = (-2 * (1 - u_T2C[:, :columns]).log()).sqrt()
        return radius_TC * (2 * math.pi * u_T2C[:, columns:]).cos()

    def rows(self, part: slice | Tensor) -> "BlockDropout":
        """The same for some of the tokens."""
        return replace(self, index_T=self.index_T[part])


@dataclass(frozen=True)
class Dropout:
    """Dropout of one step, for the tokens of one stream."""

    keys: Tensor
    """int64: the embedding's key, then one per block."""
    index_T: Tensor
    """int64: each token's index in the step's global batch."""
    rates: DropoutRates

    @staticmethod
    def of(seed: int, step: int, layers: int, index_T: Tensor, rates: DropoutRates) -> "Dropout":
        """Dropout of step ``step`` of a run with ``seed``, for the tokens with these indices."""
        return Dropout(keys(seed, step, 1 + layers, index_T.device), index_T, rates)

    def for_tokens(self, index_T: Tensor) -> "Dropout":
        """The same for other tokens, by their indices in the global batch."""
        return replace(self, index_T=index_T)

    def rows(self, part: slice | Tensor) -> "Dropout":
        """The same for some rows of the stream."""
        return replace(self, index_T=self.index_T[part])

    @property
    def at_embedding(self) -> BlockDropout:
        """Dropout of the embedding."""
        return BlockDropout(self.keys[0], self.index_T, self.rates)

    def after(self, layers: int) -> "Dropout":
        """Dropout with the keys after those of the embedding and ``layers`` blocks: an encoder's, for instance."""
        return replace(self, keys=self.keys[1 + layers :])

    def at(self, layer: int) -> BlockDropout:
        """Dropout of one block."""
        return BlockDropout(self.keys[1 + layer], self.index_T, self.rates)

    def pairs(self, layer: int, head: int, keys_S: Tensor | None = None) -> AttentionDropout | None:
        """Dropout of a layer's attention probabilities, for query heads from number ``head`` on; None at rate 0.

        ``keys_S``: the keys' token indices, if they are not the queries'.
        """
        if not self.rates.attention:
            return None
        keys_S = self.index_T if keys_S is None else keys_S
        return AttentionDropout(self.keys[1 + layer], self.index_T, keys_S, self.rates.attention, head)


def apply_dropout(x_TD: Tensor, dropout: BlockDropout | None, site: int) -> Tensor:
    """``x_TD`` with dropout at a site of the residual stream; unchanged for None."""
    if dropout is None:
        return x_TD
    return dropout.drop(x_TD, site, dropout.rates.embedding if site == EMBEDDING else dropout.rates.residual)


def keys(seed: int, step: int, sites: int, device: torch.device | str = "cpu") -> Tensor:
    """int64 (sites,): the key of each site in one step of a run."""
    step_key = _mix(_mix(seed) ^ step)
    unsigned = [_mix(step_key ^ site) for site in range(sites)]
    gpu = torch.device(device).type == "cuda"
    signed = [key - (key >> 63 << 64) for key in unsigned]
    # A copy from unpinned memory may wait for all queued work of the device.
    return torch.tensor(signed, dtype=torch.int64, pin_memory=gpu).to(device, non_blocking=gpu)


def _mix(x: int) -> int:
    """splitmix64's first output for the seed ``x`` (Steele, Lea and Flood 2014, figure 16): a permutation."""
    x = (x + _GOLDEN) & _MASK
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _MASK
    return x ^ x >> 31
