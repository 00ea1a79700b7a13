"""Dropout as a pure function: the specification, in plain torch.

    row_i    = mix(mix(index_i ^ key_low) ^ key_high)        index_i: the token's number in the step's global batch
    column_j = mix(mix(j) ^ site)                            j: the feature's number; site: which dropout of the layer
    y_ij     = x_ij / (1 − rate)   if mix(row_i ^ column_j) >= threshold(rate)   else 0

``mix`` is "lowbias32", a permutation of the 32-bit integers in which each bit of the input flips each bit of the output
in very nearly half of all cases (Chris Wellons, hash-prospector, 2018). A generator would make the mask depend on who
drew before, and so on the layout; here any slice of it can be computed anywhere, and again in the backward pass, from a
key of 64 bits (of seed, step and layer: :mod:`colonnade.parallel.rng_keys`) and the indices of the slice.

The index counts for its low 32 bits: a step of 4 billion tokens would repeat itself. The integers are torch's int32,
whose products wrap around; a shift to the right keeps the sign, which the masks take away again.

Dropout that keeps nothing for the backward pass: the mask is computed again from the key.

y = M x with a diagonal M, so the backward pass is the forward pass on the gradient. Under torch.compile the plain
operations are traced into it, and fused with their neighbours into one kernel.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

HEADS, KEYS = 1 << 20, (1 << 20) + 1
"""Sites of attention: what stands in for the feature is the query head, and then the key's token."""
CHOICES, HIDDEN = (1 << 20) + 2, (1 << 20) + 3
"""Sites of experts: it is which of the token's choices this is, and then the hidden unit."""

LOW = (1 << 32) - 1


def mix(x: Tensor) -> Tensor:
    """lowbias32 of int32 numbers."""
    x = x ^ (x >> 16 & 0xFFFF)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15 & 0x1FFFF)
    x = x * (0x846CA68B - (1 << 32))
    return x ^ (x >> 16 & 0xFFFF)


def row_hash(key: Tensor, index_T: Tensor) -> Tensor:
    """int32 (T,): what the tokens ``index_T`` bring along; ``key`` is a 0-dim int64 tensor."""
    low, high = key.to(torch.int32), (key >> 32).to(torch.int32)
    return mix(mix(index_T.to(torch.int32) ^ low) ^ high)


def column_hash(site: int, index_D: Tensor) -> Tensor:
    """int32 (D,): what the features ``index_D`` bring along at ``site``."""
    return mix(mix(index_D.to(torch.int32)) ^ site)


def place_hash(site: int, index_D: Tensor) -> Tensor:
    """:func:`column_hash` of numbers that are counted, not read: an ``arange``.

    In int64, where nothing overflows. The C++ that torch.compile writes for a CPU multiplies int32 as C++ does, and its
    compiler takes it that what it knows the range of does not wrap: such hashes came out otherwise than in eager mode.
    """
    return _mix_wide(_mix_wide(index_D & LOW) ^ site).to(torch.int32)


def _mix_wide(x: Tensor) -> Tensor:
    x = x ^ x >> 16
    x = x * 0x7FEB352D & LOW
    x = x ^ x >> 15
    x = x * (0x846CA68B - (1 << 32)) & LOW  # as a positive factor it would overflow
    return x ^ x >> 16


def threshold(rate: float) -> int:
    """The least hash, as an int32, that is kept; ``rate`` is met to 2⁻³²."""
    return min(round(rate * (1 << 32)), (1 << 32) - 1) - (1 << 31)


def keeps(key: Tensor, index_T: Tensor, start: int, stop: int, *, site: int, rate: float) -> Tensor:
    """(T, stop − start) booleans: which features ``start:stop`` of the tokens ``index_T`` are kept."""
    row_T = row_hash(key, index_T)
    column_D = place_hash(site, torch.arange(start, stop, device=index_T.device))
    return mix(row_T[:, None] ^ column_D) >= threshold(rate)


def dropout(x_TD: Tensor, key: Tensor, index_T: Tensor, *, site: int, rate: float, start: int = 0) -> Tensor:
    """y_TD: elements of ``x_TD``, whose first column is feature ``start`` of all, dropped at ``rate``, else scaled."""
    kept_TD = keeps(key, index_T, start, start + x_TD.shape[1], site=site, rate=rate)
    return torch.where(kept_TD, x_TD * (1 / (1 - rate)), 0.0)


def uniform(key: Tensor, index_T: Tensor, columns: int, site: int) -> Tensor:
    """float64 (T, columns), uniform in [0, 1) to 2⁻³²: a number for each token and column, of the same hashes."""
    column_C = place_hash(site, torch.arange(columns, device=index_T.device))
    return (mix(row_hash(key, index_T)[:, None] ^ column_C).double() + 2**31) * 2.0**-32


class Pairs(NamedTuple):
    """Dropout of attention probabilities: an element is a (query head, query's token, key's token).

    ``queries_T`` and ``keys_S`` are the tokens' global indices (the same tensor where keys stand beside their
    queries), ``head`` the global number of the first query head at hand.
    """

    key: Tensor
    queries_T: Tensor
    keys_S: Tensor
    rate: float
    head: int = 0

    def cut(self, queries: slice | Tensor, keys: slice | Tensor) -> "Pairs":
        """The same for some of the queries and keys: a range of them, or those at these places."""
        return self._replace(queries_T=self.queries_T[queries], keys_S=self.keys_S[keys])

    def rows(self, heads: int) -> Tensor:
        """int32 (heads, T): what the queries of each head bring along."""
        head_N = torch.arange(self.head, self.head + heads, device=self.queries_T.device)
        return mix(row_hash(self.key, self.queries_T) ^ place_hash(HEADS, head_N)[:, None])

    def columns(self) -> Tensor:
        """int32 (S,): what the keys bring along."""
        return column_hash(KEYS, self.keys_S)

    def keeps(self, heads: int) -> Tensor:
        """(heads, T, S) booleans: which probabilities are kept."""
        return mix(self.rows(heads)[:, :, None] ^ self.columns()) >= threshold(self.rate)


def choices(key: Tensor, index_T: Tensor, active: int) -> Tensor:
    """int32 (T, A): what each choice of the tokens ``index_T`` brings along, wherever it travels."""
    choice_A = torch.arange(active, device=index_T.device)
    return mix(row_hash(key, index_T)[:, None] ^ place_hash(CHOICES, choice_A))


class Hidden(NamedTuple):
    """Dropout within experts: an element is a (token, choice, hidden unit)."""

    row_R: Tensor
    """int32: what each row's choice brings along (:func:`choices`)."""
    column_F: Tensor
    """int32: what the hidden units at hand bring along (:func:`hidden_units`)."""
    rate: float

    def rows(self, part: slice | Tensor) -> "Hidden":
        """The same for some of the rows."""
        return self._replace(row_R=self.row_R[part])

    def drop(self, h_RF: Tensor) -> Tensor:
        """``h_RF``, its rows and hidden units these ones, dropped at the rate, else scaled."""
        kept_RF = mix(self.row_R.unsqueeze(-1) ^ self.column_F) >= threshold(self.rate)
        return torch.where(kept_RF, h_RF * (1 / (1 - self.rate)), 0.0)


def hidden_units(index_F: Tensor) -> Tensor:
    """int32 (F,): what the hidden units with these numbers, among all of an expert's, bring along."""
    return place_hash(HIDDEN, index_F)


class Recomputed(Function):
    """``apply(x_TD, key, index_T, site=…, rate=…, start=…)``, on the way there and on the way back."""

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
        """y_TD."""
        ctx.save_for_backward(key, index_T)
        ctx.run, ctx.site, ctx.rate, ctx.start = apply, site, rate, start
        return apply(x_TD, key, index_T, site=site, rate=rate, start=start)

    @staticmethod
    def backward(ctx, grad_TD: Tensor):
        """The same mask on the gradient."""
        key, index_T = ctx.saved_tensors
        grad_TD = ctx.run(grad_TD, key, index_T, site=ctx.site, rate=ctx.rate, start=ctx.start)
        return grad_TD, None, None, None, None, None, None


def recomputed_dropout(x_TD: Tensor, key: Tensor, index_T: Tensor, *, site: int, rate: float, start: int = 0) -> Tensor:
    """y_TD (see :func:`dropout.dropout`)."""
    return Recomputed.apply(x_TD, key, index_T, dropout, site, rate, start)
