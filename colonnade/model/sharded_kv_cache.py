"""Context-parallel serving: the cache is split over ranks, and each attends with all queries to the keys it holds.

    o = merge over ranks r of attention(q, keys of rank r)          one all-gather of states (o_r, lse_r) a layer

Every rank has the same tokens and the same queries; pages lie here or there (:mod:`colonnade.serve.page_pool`), so a
rank reads its part of the cache only, and what travels is a state for each query and head, however long the context is
(attention as a fold: :mod:`colonnade.kernels.softmax_state`). All ranks merge the same states in the same order.

A step in which each request has one new token (decoding) reads the new key where it was written, like all others. In a
step with chunks of prompts, the keys of a chunk are on all ranks, since its tokens are, and its queries see older keys
whole: so the ranks' states are of older keys, without a mask, and the chunk's own part is added after the gather.
Layers with a window always go that way, because there a key's place in the sequence counts, and not only in the cache.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from colonnade.kernels.attention import chunk
from colonnade.kernels.attention.chunk import TokenRows
from colonnade.kernels.attention.page_table import PageTable
from colonnade.kernels.attention.sharded_cache import pack_state
from colonnade.kernels.registry import choose
from colonnade.kernels.softmax_state import State
from colonnade.model.cache import KVCache, Pools
from colonnade.parallel.axis import Axis

WIDEST = 256
"""Heads up to this width have fused kernels for chunks; wider ones (latent attention) are plain torch's."""
SCORES = 1 << 28
"""Of these plain torch keeps so many at a time."""


@dataclass(frozen=True, eq=False)
class Past:
    """Keys older than a step's tokens, of all requests, as far as this rank holds them."""

    slots_S: Tensor
    """Where they are: page · page_tokens + offset."""
    rows: TokenRows
    """Their positions, their requests."""


@dataclass(frozen=True, eq=False)
class ShardedPaged:
    """What :class:`~colonnade.model.attend.Paged` is on one of the ranks that share a cache.

    ``slots_T`` says where each new token's key and value go: of those that other ranks keep, into a page that is
    nobody's.
    """

    axis: Axis
    cache: KVCache
    table: PageTable
    """Of the keys that this rank holds."""
    slots_T: Tensor
    new: TokenRows
    """The new tokens' positions, their requests."""
    past: Mapping[int | None, Past]
    """For layers with this window; those that are not here read the new tokens' keys from the cache too."""
    kernels: str = "auto"

    def at(self, layer: int, window: int | None) -> "ShardedPagedView":
        """This layer's pools."""
        pools = self.cache.at(layer)
        return ShardedPagedView(
            self.axis, self.table, self.slots_T, pools, self.new, self.past.get(window), window, self.kernels
        )


@dataclass(frozen=True, eq=False)
class ShardedPagedView:
    """One layer of a :class:`ShardedPaged`."""

    keeps: ClassVar[bool] = True

    axis: Axis
    table: PageTable
    slots_T: Tensor
    pools: Pools
    new: TokenRows
    past: Past | None
    window: int | None
    kernels: str

    def __call__(self, q_TnH: Tensor, k_TkH: Tensor, v_TkH: Tensor) -> Tensor:
        """o_TnH."""
        pools = self.pools
        pools.write(self.slots_T, k_TkH, v_TkH)
        kind, dtype = q_TnH.device.type, q_TnH.dtype
        if self.past is None:
            run = choose("sharded_attention", kind, dtype, self.kernels)
            mine, own = run(q_TnH, pools.k_PpKH, pools.v_PpKH, self.table, **pools.seen), []
        else:
            k_SkH, v_SkH = pools.read(self.past.slots_S, dtype)
            mine = self._chunk(q_TnH, k_SkH, v_SkH, self.past.rows, causal=False)
            k_TkH, v_TkH = pools.rounded(k_TkH, v_TkH)
            own = [self._chunk(q_TnH, k_TkH, v_TkH[..., : pools.values], self.new, causal=True)]
        each_STnz = self.axis.everyones_(pack_state(mine))
        return choose("merge_states", kind, each_STnz.dtype, self.kernels)(each_STnz, own, dtype)

    def _chunk(self, q_TnH: Tensor, k_SkH: Tensor, v_SkH: Tensor, keys: TokenRows, *, causal: bool) -> State:
        """The state of all queries over some keys."""
        plain = self.kernels == "reference" or q_TnH.shape[2] > WIDEST or self.pools.values is not None
        run = choose("chunk_forward", q_TnH.device.type, q_TnH.dtype, "reference" if plain else "auto")
        see = {"causal": causal, "window": self.window}
        T, n = q_TnH.shape[:2]
        rows = max(1, SCORES // max(1, n * len(k_SkH)))
        if run is not chunk.forward or rows >= T:
            return run(q_TnH, k_SkH, v_SkH, self.new, keys, **see)
        blocks = [slice(t, t + rows) for t in range(0, T, rows)]
        parts = [run(q_TnH[some], k_SkH, v_SkH, _some(self.new, some), keys, **see) for some in blocks]
        return State(torch.cat([part.o for part in parts]), torch.cat([part.lse for part in parts]))


def _some(rows: TokenRows, some: slice) -> TokenRows:
    """Of these rows some, for plain torch, which reads no more of them."""
    return rows._replace(index_T=rows.index_T[some], segment_T=rows.segment_T[some])
