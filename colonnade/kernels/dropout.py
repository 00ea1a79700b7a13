"""Counter-based dropout: masks are hashes of a key and global indices, in plain torch.

    row_i    = hash(hash(index_i ^ key_low) ^ key_high)      index_i: the token's index in the step's global batch
    column_j = hash(hash(j) ^ site)                          j: the feature's index; site: which dropout of the layer
    y_ij     = x_ij / (1 − rate)   if hash(row_i ^ column_j) >= threshold(rate)   else 0

``hash`` is "lowbias32", a permutation of the 32-bit integers in which each input bit flips each output bit in very
nearly half of all cases (Chris Wellons, hash-prospector, 2018). With a generator the mask would depend on the order of
draws, and so on the parallel layout. Here any slice of the mask can be computed anywhere, and recomputed in the
backward pass, from a 64-bit key (of seed, step and layer: :mod:`colonnade.model.dropout`) and the slice's indices.

Only the low 32 bits of an index count: the mask would repeat after 4 billion tokens in a step. The integers are torch's
int32, whose products wrap around; right shifts keep the sign, so they are masked.

The mask is not saved for the backward pass. y = M x with a diagonal M, so the backward pass applies the forward to the
gradient. Under torch.compile the plain operations are traced and fused with their neighbours.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

HEADS, KEYS = 1 << 20, (1 << 20) + 1
"""Sites of attention dropout; the "feature" is the query head, then the key's token."""
CHOICES, HIDDEN = (1 << 20) + 2, (1 << 20) + 3
"""Sites of expert dropout; the "feature" is the token's choice (its k-th expert), then the hidden unit."""

LOW = (1 << 32) - 1


def lowbias32(x: Tensor) -> Tensor:
    """Hashes int32 values."""
    x = x ^ (x >> 16 & 0xFFFF)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15 & 0x1FFFF)
    x = x * (0x846CA68B - (1 << 32))
    return x ^ (x >> 16 & 0xFFFF)


def row_hash(key: Tensor, index_T: Tensor) -> Tensor:
    """int32 (T,) hashes of the tokens ``index_T``; ``key`` is a 0-dim int64 tensor."""
    low, high = key.to(torch.int32), (key >> 32).to(torch.int32)
    return lowbias32(lowbias32(index_T.to(torch.int32) ^ low) ^ high)


def column_hash(site: int, index_D: Tensor) -> Tensor:
    """int32 (D,) hashes of the features ``index_D`` at ``site``."""
    return lowbias32(lowbias32(index_D.to(torch.int32)) ^ site)


def arange_hash(site: int, index_D: Tensor) -> Tensor:
    """:func:`column_hash` of an ``arange``, computed in int64, where nothing overflows.

    The C++ that torch.compile generates for a CPU multiplies int32 as signed integers, and its compiler assumes that
    values of a known range do not overflow: hashes then differed from eager mode.
    """
    return _lowbias32_int64(_lowbias32_int64(index_D & LOW) ^ site).to(torch.int32)


def _lowbias32_int64(x: Tensor) -> Tensor:
    x = x ^ x >> 16
    x = x * 0x7FEB352D & LOW
    x = x ^ x >> 15
    x = x * (0x846CA68B - (1 << 32)) & LOW  # the unsigned constant would overflow int64
    return x ^ x >> 16


def threshold(rate: float) -> int:
    """The smallest hash, as an int32, that is kept; exact to 2⁻³²."""
    return min(round(rate * (1 << 32)), (1 << 32) - 1) - (1 << 31)


def keep_mask(key: Tensor, index_T: Tensor, start: int, stop: int, *, site: int, rate: float) -> Tensor:
    """(T, stop − start) booleans: which features ``start:stop`` of the tokens ``index_T`` are kept."""
    row_T = row_hash(key, index_T)
    column_D = arange_hash(site, torch.arange(start, stop, device=index_T.device))
    return lowbias32(row_T[:, None] ^ column_D) >= threshold(rate)


def dropout(x_TD: Tensor, key: Tensor, index_T: Tensor, *, site: int, rate: float, start: int = 0) -> Tensor:
    """Drops elements of ``x_TD`` at ``rate`` and scales the rest; its first column is global feature ``start``."""
    kept_TD = keep_mask(key, index_T, start, start + x_TD.shape[1], site=site, rate=rate)
    return torch.where(kept_TD, x_TD * (1 / (1 - rate)), 0.0)


def uniform(key: Tensor, index_T: Tensor, columns: int, site: int) -> Tensor:
    """float64 (T, columns), uniform in [0, 1) to 2⁻³²: a random number for each token and column."""
    column_C = arange_hash(site, torch.arange(columns, device=index_T.device))
    return (lowbias32(row_hash(key, index_T)[:, None] ^ column_C).double() + 2**31) * 2.0**-32


class AttentionDropout(NamedTuple):
    """Dropout of attention probabilities; an element is a (query head, query token, key token).

    ``queries_T`` and ``keys_S`` are global token indices (the same tensor in self-attention); ``head`` is the global
    index of the first local query head.
    """

    key: Tensor
    queries_T: Tensor
    keys_S: Tensor
    rate: float
    head: int = 0

    def select(self, queries: slice | Tensor, keys: slice | Tensor) -> "AttentionDropout":
        """The dropout of some queries and keys, given as slices or indices."""
        return self._replace(queries_T=self.queries_T[queries], keys_S=self.keys_S[keys])

    def query_hashes(self, heads: int) -> Tensor:
        """int32 (heads, T)."""
        head_N = torch.arange(self.head, self.head + heads, device=self.queries_T.device)
        return lowbias32(row_hash(self.key, self.queries_T) ^ arange_hash(HEADS, head_N)[:, None])

    def key_hashes(self) -> Tensor:
        """int32 (S,)."""
        return column_hash(KEYS, self.keys_S)

    def keep_mask(self, heads: int) -> Tensor:
        """(heads, T, S) booleans: which probabilities are kept."""
        return lowbias32(self.query_hashes(heads)[:, :, None] ^ self.key_hashes()) >= threshold(self.rate)


def choice_hash(key: Tensor, index_T: Tensor, active: int) -> Tensor:
    """int32 (T, A): the hash of each choice of the tokens ``index_T``; it is sent along with the token."""
    choice_A = torch.arange(active, device=index_T.device)
    return lowbias32(row_hash(key, index_T)[:, None] ^ arange_hash(CHOICES, choice_A))


class HiddenDropout(NamedTuple):
    """Dropout inside experts; an element is a (token, choice, hidden unit)."""

    row_R: Tensor
    """int32: hash of each row's choice (:func:`choice_hash`)."""
    column_F: Tensor
    """int32: hashes of the local hidden units (:func:`hidden_hash`)."""
    rate: float

    def rows(self, part: slice | Tensor) -> "HiddenDropout":
        """The dropout of some of the rows."""
        return self._replace(row_R=self.row_R[part])

    def drop(self, h_RF: Tensor) -> Tensor:
        """Applies dropout to ``h_RF``."""
        kept_RF = lowbias32(self.row_R.unsqueeze(-1) ^ self.column_F) >= threshold(self.rate)
        return torch.where(kept_RF, h_RF * (1 / (1 - self.rate)), 0.0)


def hidden_hash(index_F: Tensor) -> Tensor:
    """int32 (F,): hashes of hidden units, given by their global indices in the expert."""
    return arange_hash(HIDDEN, index_F)


class RecomputedDropout(Function):
    """Dropout that saves no mask; the backward pass runs ``apply`` on the gradient."""

    @staticmethod
    def forward(
        ctx,
        x_TD: Tensor,
        key: Tensor,
        index_T: Tensor,
        apply: Callable[..., Tensor],
        site: int,
        rate: float,
        start: int,
    ) -> Tensor:
        """Applies dropout."""
        ctx.save_for_backward(key, index_T)
        ctx.run, ctx.site, ctx.rate, ctx.start = apply, site, rate, start
        return apply(x_TD, key, index_T, site=site, rate=rate, start=start)

    @staticmethod
    def backward(ctx, grad_TD: Tensor):
        """Applies the same mask to the gradient."""
        key, index_T = ctx.saved_tensors
        grad_TD = ctx.run(grad_TD, key, index_T, site=ctx.site, rate=ctx.rate, start=ctx.start)
        return grad_TD, None, None, None, None, None, None


def recomputed_dropout(x_TD: Tensor, key: Tensor, index_T: Tensor, *, site: int, rate: float, start: int = 0) -> Tensor:
    """:func:`dropout` that recomputes its mask in the backward pass."""
    return RecomputedDropout.apply(x_TD, key, index_T, dropout, site, rate, start)
