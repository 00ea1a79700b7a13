"""Context-parallel serving: the KV cache is sharded over ranks, and each rank attends with all queries to its keys.

    o = merge over ranks r of attention(q, keys of rank r)          one all-gather of states (o_r, lse_r) a layer

Every rank has the same tokens and the same queries, and each page is on one rank (:mod:`colonnade.serve.page_pool`), so
a rank reads its part of the cache only. The ranks exchange one state for each query and head, however long the context
is (attention as a fold: :mod:`colonnade.kernels.softmax_state`), and merge the same states in the same order.

In a step with one new token per request (decoding) the new key is read from the cache like all others. In a step with
chunks of prompts every rank has the keys of a chunk, and all older keys are visible to its queries: the ranks' states
cover the older keys, without a mask, and the chunk's own part is added after the gather. Layers with a window always
take this way, because their mask depends on a key's position in the sequence.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from colonnade.kernels.attention import chunk
from colonnade.kernels.attention.chunk import TokenRows
from colonnade.kernels.attention.page_table import PageTable
from colonnade.kernels.attention.reference import pack_state
from colonnade.kernels.registry import choose
from colonnade.kernels.softmax_state import State
from colonnade.model.cache import KVCache, Pools
from colonnade.parallel.axis import Axis

MAX_FUSED_HEAD_WIDTH = 256
"""Heads up to this width have fused chunk kernels; wider ones (latent attention) run in plain torch."""
MAX_SCORES = 1 << 28
"""Most attention scores in memory at a time in plain torch."""


@dataclass(frozen=True, eq=False)
class CachedKeys:
    """This rank's cached keys from before a step, of all requests."""

    slots_S: Tensor
    """Their slots: page · page_tokens + offset."""
    rows: TokenRows
    """Their positions and requests."""


@dataclass(frozen=True, eq=False)
class ShardedPaged:
    """A :class:`~colonnade.model.attend.Paged` step on one of the ranks that share a cache.

    ``slots_T`` is where each new token's key and value are written: a scratch page for tokens of other ranks.
    """

    axis: Axis
    cache: KVCache
    table: PageTable
    """Page table of this rank's keys."""
    slots_T: Tensor
    new: TokenRows
    """The new tokens' positions and requests."""
    past: Mapping[int | None, CachedKeys]
    """By window; layers with a window that is not here read the new tokens' keys from the cache too."""
    kernels: str = "auto"

    def at(self, layer: int, window: int | None) -> "ShardedPagedView":
        """The view of one layer."""
        pools = self.cache.at(layer)
        return ShardedPagedView(
            self.axis, self.table, self.slots_T, pools, self.new, self.past.get(window), window, self.kernels
        )


@dataclass(frozen=True, eq=False)
class ShardedPagedView:
    """One layer of a :class:`ShardedPaged`."""

    caches: ClassVar[bool] = True

    axis: Axis
    table: PageTable
    slots_T: Tensor
    pools: Pools
    new: TokenRows
    past: CachedKeys | None
    window: int | None
    kernels: str

    def __call__(self, q_TnH: Tensor, k_TkH: Tensor, v_TkH: Tensor) -> Tensor:
        """o_TnH."""
        pools = self.pools
        pools.write(self.slots_T, k_TkH, v_TkH)
        kind, dtype = q_TnH.device.type, q_TnH.dtype
        if self.past is None:
            run = choose("sharded_attention", kind, dtype, self.kernels)
            cached, new = run(q_TnH, pools.k_PpKH, pools.v_PpKH, self.table, **pools.kernel_arguments), []
        else:
            k_SkH, v_SkH = pools.read(self.past.slots_S, dtype)
            cached = self._chunk(q_TnH, k_SkH, v_SkH, self.past.rows, causal=False)
            k_TkH, v_TkH = pools.round_trip(k_TkH, v_TkH)
            new = [self._chunk(q_TnH, k_TkH, v_TkH[..., : pools.value_width], self.new, causal=True)]
        each_STnz = self.axis.all_gather_(pack_state(cached))
        return choose("merge_states", kind, each_STnz.dtype, self.kernels)(each_STnz, new, dtype)

    def _chunk(self, q_TnH: Tensor, k_SkH: Tensor, v_SkH: Tensor, keys: TokenRows, *, causal: bool) -> State:
        """The state of all queries over these keys."""
        too_wide = q_TnH.shape[2] > MAX_FUSED_HEAD_WIDTH or self.pools.value_width is not None
        plain = self.kernels == "reference" or too_wide
        run = choose("chunk_forward", q_TnH.device.type, q_TnH.dtype, "reference" if plain else "auto")
        mask = {"causal": causal, "window": self.window}
        T, n = q_TnH.shape[:2]
        rows = max(1, MAX_SCORES // max(1, n * len(k_SkH)))
        if run is not chunk.forward or rows >= T:
            return run(q_TnH, k_SkH, v_SkH, self.new, keys, **mask)
        blocks = [slice(t, t + rows) for t in range(0, T, rows)]
        parts = [run(q_TnH[block], k_SkH, v_SkH, _slice(self.new, block), keys, **mask) for block in blocks]
        return State(torch.cat([part.o for part in parts]), torch.cat([part.lse for part in parts]))


def _slice(rows: TokenRows, block: slice) -> TokenRows:
    """A slice of rows, with the two fields that plain torch reads."""
    return rows._replace(index_T=rows.index_T[block], segment_T=rows.segment_T[block])
