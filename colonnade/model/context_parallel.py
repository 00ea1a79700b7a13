"""Context parallelism: ring attention in training, a sharded KV cache in serving; both merge softmax states.

**Ring attention.** Each rank has a share of the tokens; keys and values travel around the ranks.

    State of my queries = fold over ranks j of merge(·, attention to the keys of rank j)

(Liu et al., arXiv 2310.01889; the fold is :mod:`colonnade.kernels.softmax_state`.) The transfer of the next keys
overlaps with attention to the current ones. The backward pass sends keys and values around once more, each with the sum
of its gradients so far, which is complete and back on its rank after the last step.

With a causal mask late tokens take more work than early ones, so the sequence is cut into 2·cp chunks and rank r has
chunks r and 2·cp − 1 − r (zig-zag; Brandon et al., arXiv 2311.09431, section 3.2, stripe by chunks instead of tokens).
Then each step is half a square of scores on every rank, and only a rank's own keys need a mask:

    j = r    my queries, my keys, causal
    j < r    my queries, the first half of rank j's keys          (its second half comes after all my queries)
    j > r    the second half of my queries, all of rank j's keys  (all come before these, and after my first half)

If all sequences have one length that 2·cp divides, each sequence is cut so; otherwise the stream as a whole is,
regardless of document boundaries, and the shares may be uneven.

**Sharded KV cache.** Every rank has the same tokens and queries, and each page is on one rank
(:mod:`colonnade.serve.page_pool`), so a rank attends with all queries to its part of the cache only.

    o = merge over ranks r of attention(q, keys of rank r)          one all-gather of states (o_r, lse_r) a layer

The ranks exchange one state for each query and head, however long the context is, and merge the same states in the same
order. In a step with one new token per request (decoding) the new key is read from the cache like all others. In a step
with chunks of prompts every rank has the keys of a chunk, and all older keys are visible to its queries: the ranks'
states cover the older keys, without a mask, and the chunk's own part is added after the gather. Layers with a window
always take this way, because their mask depends on a key's position in the sequence.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.autograd import Function

from colonnade.kernels.attention import chunk
from colonnade.kernels.attention.chunk import TokenRows
from colonnade.kernels.attention.page_table import PageTable
from colonnade.kernels.attention.reference import pack_state
from colonnade.kernels.registry import choose
from colonnade.kernels.softmax_state import State, merge
from colonnade.model.attend import Packed
from colonnade.model.cache import KVCache, Pools
from colonnade.parallel.axis import Axis

MAX_FUSED_HEAD_WIDTH = 256
"""Heads up to this width have fused chunk kernels; wider ones (latent attention) run in plain torch."""
MAX_SCORES = 1 << 28
"""Maximum number of attention scores in memory at a time in plain torch."""


@dataclass(frozen=True)
class ZigzagShard:
    """The rows of one rank: both chunks, its earlier and its later chunk."""

    both: TokenRows
    first: TokenRows
    second: TokenRows

    def early(self, x_T: Tensor) -> Tensor:
        """The rows of the earlier chunk."""
        return self._halves(x_T)[:, 0].flatten(0, 1) if self.both.sequences else x_T[: len(self.first.index_T)]

    def late(self, x_T: Tensor) -> Tensor:
        """The rows of the later chunk."""
        return self._halves(x_T)[:, 1].flatten(0, 1) if self.both.sequences else x_T[len(self.first.index_T) :]

    def add_early(self, target_T: Tensor, x_T: Tensor) -> None:
        """Add to the rows of the earlier chunk, in place."""
        if self.both.sequences:
            self._halves(target_T)[:, 0] += x_T.unflatten(0, (self.both.sequences, -1))
        else:
            target_T[: len(x_T)] += x_T

    def set_late(self, target_T: Tensor, x_T: Tensor) -> None:
        """Overwrite the rows of the later chunk, in place."""
        if self.both.sequences:
            self._halves(target_T)[:, 1] = x_T.unflatten(0, (self.both.sequences, -1))
        else:
            target_T[len(target_T) - len(x_T) :] = x_T

    def _halves(self, x_T: Tensor) -> Tensor:
        return x_T.unflatten(0, (self.both.sequences, 2, -1))


@dataclass(frozen=True)
class Ring:
    """A :class:`~colonnade.model.attend.Packed` stream, shared by the ranks of ``axis``."""

    caches: ClassVar[bool] = False

    axis: Axis
    shares: tuple[ZigzagShard, ...]
    """The rows of each rank."""
    packed: Packed
    """The whole stream, as in a single process."""

    @staticmethod
    def of(packed: Packed, T: int, axis: Axis) -> "Ring":
        """Divide ``packed``, of T tokens in all, among the ranks of ``axis``."""
        return Ring(axis, zigzag_shards(packed, T, axis.size), packed)

    @property
    def index_t(self) -> Tensor:
        """The indices in the whole stream of this rank's tokens, in their order here."""
        return self.shares[self.axis.rank].both.index_T

    def at(self, layer: int, window: int | None) -> "Ring":
        """The view of one layer: its window and its dropout key."""
        packed = self.packed.at(layer, window)
        return self if packed is self.packed else replace(self, packed=packed)

    def kernel(self, operation: Literal["chunk_forward", "chunk_backward"], q_tnH: Tensor) -> Callable[..., Any]:
        """The chunk kernel; only the reference supports dropout."""
        kernels = self.packed.kernels if self.packed.layer_dropout is None else "reference"
        return choose(operation, q_tnH.device.type, q_tnH.dtype, kernels)

    def mask(self, rank: int) -> dict[str, Any]:
        """The mask and dropout arguments of the chunk kernels for ``rank``'s keys."""
        packed = self.packed
        mask = {"causal": packed.causal and rank == self.axis.rank, "window": packed.window}
        return mask | ({} if packed.layer_dropout is None else {"dropout": packed.layer_dropout})

    def __call__(self, q_TnH: Tensor, k_TkH: Tensor, v_TkH: Tensor) -> Tensor:
        """o_TnH of this rank's T tokens."""
        return _RingAttention.apply(q_TnH, k_TkH, v_TkH, self)


def zigzag_shards(packed: Packed, T: int, ranks: int) -> tuple[ZigzagShard, ...]:
    """The rows of each rank in the zig-zag order."""
    device, chunks = packed.cu_seqlens.device, 2 * ranks
    index_T, longest = torch.arange(T, device=device), packed.longest
    segment_T = torch.searchsorted(packed.cu_seqlens, index_T, right=True)
    even = packed.equal and T > 0 and longest % chunks == 0
    if even:
        parts = index_T.view(-1, chunks, longest // chunks).unbind(1)  # each (sequences, rows)
    else:
        size = -(-T // chunks)
        parts = [index_T[None, min(T, c * size) : min(T, (c + 1) * size)] for c in range(chunks)]

    def rows(*chunks_: Tensor) -> TokenRows:
        index_t = torch.cat(chunks_, 1).flatten()
        if even:
            sequences = len(chunks_[0])
            each = len(index_t) // sequences
            cu = torch.arange(0, len(index_t) + 1, each, dtype=torch.int32, device=device)
            return TokenRows(index_t, segment_T[index_t], cu, each, sequences)
        # The number of these rows before each document; rows and documents are both in order.
        cu = torch.searchsorted(index_t, packed.cu_seqlens.long()).to(torch.int32)
        return TokenRows(index_t, segment_T[index_t], cu, min(longest, len(index_t)), 0)

    return tuple(ZigzagShard(rows(parts[r], parts[-1 - r]), rows(parts[r]), rows(parts[-1 - r])) for r in range(ranks))


class _RingAttention(Function):
    @staticmethod
    def forward(ctx, q_tnH: Tensor, k_tkH: Tensor, v_tkH: Tensor, ring: Ring) -> Tensor:
        run = ring.kernel("chunk_forward", q_tnH)
        me, mine = ring.axis.rank, ring.shares[ring.axis.rank]
        folded: State | None = None
        for rank, k, v in _rotate(ring, k_tkH, v_tkH):
            theirs, mask = ring.shares[rank], ring.mask(rank)
            if not ring.packed.causal or rank == me:
                part = run(q_tnH, k, v, mine.both, theirs.both, **mask)
            elif rank < me:
                part = run(q_tnH, theirs.early(k), theirs.early(v), mine.both, theirs.first, **mask)
            else:
                assert folded is not None, "a rank begins with its own keys"
                part = run(mine.late(q_tnH), k, v, mine.second, theirs.both, **mask)
                late = merge(State(mine.late(folded.o), mine.late(folded.lse)), part)
                mine.set_late(folded.o, late.o)
                mine.set_late(folded.lse, late.lse)
                continue
            folded = part if folded is None else merge(folded, part)
        assert folded is not None
        ctx.ring = ring
        ctx.save_for_backward(q_tnH, k_tkH, v_tkH, folded.o, folded.lse)
        return folded.o.to(q_tnH.dtype)

    @staticmethod
    def backward(ctx, do_tnH: Tensor):
        ring: Ring = ctx.ring
        q_tnH, k_tkH, v_tkH, o_tnH, lse_tn = ctx.saved_tensors
        run = ring.kernel("chunk_backward", q_tnH)
        me, mine = ring.axis.rank, ring.shares[ring.axis.rank]
        dq_tnH = torch.zeros_like(o_tnH)
        travelling: Tensor | None = None  # the gradients, summed so far, of the keys of the next step
        for rank, k, v in _rotate(ring, k_tkH, v_tkH):
            theirs, mask = ring.shares[rank], ring.mask(rank)
            dkv_t2kH = o_tnH.new_zeros(len(k), 2, *k.shape[1:])
            if not ring.packed.causal or rank == me:
                dq, dk, dv = run(do_tnH, q_tnH, k, v, o_tnH, lse_tn, mine.both, theirs.both, **mask)
                dq_tnH += dq
                dkv_t2kH += torch.stack((dk, dv), 1)
            elif rank < me:
                early = theirs.early(k), theirs.early(v)
                dq, dk, dv = run(do_tnH, q_tnH, *early, o_tnH, lse_tn, mine.both, theirs.first, **mask)
                dq_tnH += dq
                theirs.add_early(dkv_t2kH, torch.stack((dk, dv), 1))
            else:
                do, q, o, lse = (mine.late(x) for x in (do_tnH, q_tnH, o_tnH, lse_tn))
                dq, dk, dv = run(do, q, k, v, o, lse, mine.second, theirs.both, **mask)
                mine.set_late(dq_tnH, mine.late(dq_tnH) + dq)
                dkv_t2kH += torch.stack((dk, dv), 1)
            if travelling is not None:
                dkv_t2kH += ring.axis.finish_ring_shift(travelling)
            travelling = ring.axis.begin_ring_shift(dkv_t2kH, _row_count(ring, rank - 1))
        assert travelling is not None
        dk_tkH, dv_tkH = ring.axis.finish_ring_shift(travelling).unbind(1)
        return dq_tnH.to(q_tnH.dtype), dk_tkH.to(k_tkH.dtype), dv_tkH.to(v_tkH.dtype), None


def _rotate(ring: Ring, k_tkH: Tensor, v_tkH: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield (rank, its keys, its values), this rank's first; the next ones travel while the caller computes."""
    size, rank = ring.axis.size, ring.axis.rank
    kv_t2kH = torch.stack((k_tkH, v_tkH), 1)
    for step in range(size):
        arriving = ring.axis.begin_ring_shift(kv_t2kH, _row_count(ring, rank - 1)) if step + 1 < size else None
        yield rank, kv_t2kH[:, 0], kv_t2kH[:, 1]
        if arriving is not None:
            kv_t2kH, rank = ring.axis.finish_ring_shift(arriving), (rank - 1) % size


def _row_count(ring: Ring, rank: int) -> int:
    return len(ring.shares[rank % ring.axis.size].both.index_T)


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
