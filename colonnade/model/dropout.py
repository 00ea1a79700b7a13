"""Dropout (Srivastava 2014) as a value that travels with the stream: no training mode, no generator.

A stream that has :class:`Dropout` is trained with dropout, one that has none is not: there is no switch to forget.
Whether an element is dropped is a hash of the step's key, the place, the token's index in the global batch and the
feature, so every layout and every recomputation drops the same ones (:mod:`colonnade.kernels.dropout`).

Places: 0 is the embedding, 1 + i is block i. Sites within a block: after attention, after the feed-forward part (both
before the sum with the residual stream, as in GPT-2), the attention's probabilities, and the experts' hidden units.
"""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import Tensor

from colonnade.kernels.dropout import AttentionDropout, uniform
from colonnade.kernels.registry import choose
from colonnade.parallel.rng_keys import keys

EMBEDDING, ATTENTION, FFN = 0, 1, 2
"""Sites on the residual stream."""
POOLED = 3
"""Site of a classifier's input, at the embedding's place."""


class DropoutRates(NamedTuple):
    """The share of elements that is dropped, 0 <= rate < 1."""

    residual: float = 0.0
    """Of what attention and the feed-forward part add to the residual stream, and of a classifier's input."""
    attention: float = 0.0
    """Of the attention's probabilities."""
    embedding: float = 0.0
    """Of the embeddings."""
    expert: float = 0.0
    """Of the hidden units of experts that a router chooses."""


@dataclass(frozen=True)
class BlockDropout:
    """What is random at one place (a block, or the embedding). Only tensors change from block to block."""

    key: Tensor
    """0-dim int64: of seed, step and place."""
    index_T: Tensor
    """int64: each token's number in the step's global batch, of the rows at hand."""
    rates: DropoutRates

    def drop(self, x_TD: Tensor, site: int, rate: float, start: int = 0) -> Tensor:
        """``x_TD`` with elements dropped at ``rate``; its rows are those of the index, its first column ``start``."""
        if not rate:
            return x_TD
        run = choose("dropout", x_TD.device.type, x_TD.dtype)
        return run(x_TD, self.key, self.index_T, site=site, rate=rate, start=start)

    def uniform(self, columns: int, site: int) -> Tensor:
        """float64 (T, columns) in [0, 1): one number for each token and column."""
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
    """What is random in one step, for the tokens of one stream."""

    keys: Tensor
    """int64, one a place: the embedding, then the blocks."""
    index_T: Tensor
    """int64: each token's number in the step's global batch."""
    rates: DropoutRates

    @staticmethod
    def of(seed: int, step: int, layers: int, index_T: Tensor, rates: DropoutRates) -> "Dropout":
        """Of step ``step`` of the run of ``seed``, for the tokens with these indices."""
        return Dropout(keys(seed, step, 1 + layers, index_T.device), index_T, rates)

    def of_tokens(self, index_T: Tensor) -> "Dropout":
        """The same for other tokens."""
        return replace(self, index_T=index_T)

    def rows(self, part: slice | Tensor) -> "Dropout":
        """The same for some of the tokens: a share of them, or the rows that ``part`` lists."""
        return replace(self, index_T=self.index_T[part])

    @property
    def at_embedding(self) -> BlockDropout:
        """The view of the embedding."""
        return BlockDropout(self.keys[0], self.index_T, self.rates)

    def at(self, layer: int) -> BlockDropout:
        """The view of one block."""
        return BlockDropout(self.keys[1 + layer], self.index_T, self.rates)

    def pairs(self, layer: int, head: int, keys_S: Tensor | None = None) -> AttentionDropout | None:
        """Dropout of a layer's attention probabilities, for query heads from number ``head`` of all on.

        ``keys_S`` are the keys' indices, where they are not the queries' own. None when nothing is dropped.
        """
        if not self.rates.attention:
            return None
        keys_S = self.index_T if keys_S is None else keys_S
        return AttentionDropout(self.keys[1 + layer], self.index_T, keys_S, self.rates.attention, head)


def drop(x_TD: Tensor, noise: BlockDropout | None, site: int) -> Tensor:
    """Dropout where the stream has noise; else ``x_TD``."""
    if noise is None:
        return x_TD
    return noise.drop(x_TD, site, noise.rates.embedding if site == EMBEDDING else noise.rates.residual)
