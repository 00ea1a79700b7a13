"""Context parallelism: each rank has a share of the tokens, and the keys and values travel round the ring of ranks.

    State of my queries = fold over ranks j of merge(·, attention to the keys of rank j)

(Ring attention: Liu et al., arXiv 2310.01889; the fold is :mod:`colonnade.kernels.softmax_state`.) While a rank attends
to the keys that it has, the next ones are on their way. The backward pass goes round once more: keys and values travel
again, and with each of them the sum of its gradients, which is home after the last step.

A causal mask makes late tokens dearer than early ones, so the sequence is cut into 2·cp chunks and rank r holds chunks
r and 2·cp − 1 − r (zig-zag; Brandon et al., arXiv 2311.09431, section 3.2, stripe by chunks instead of tokens). Then
each step is one product of half a square on every rank, with nothing to mask but at home:

    j = r    my queries, my keys, causal
    j < r    my queries, the first half of rank j's keys          (its second half is in my future)
    j > r    the second half of my queries, all of rank j's keys  (all are in the past of these, and of no others)

Where all sequences have one length that 2·cp divides, each is cut so; otherwise the stream as a whole is, wherever
documents begin and end, and the shares may be uneven.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.autograd import Function

from colonnade.kernels.attention.chunk import TokenRows
from colonnade.kernels.registry import choose
from colonnade.kernels.softmax_state import State, merge
from colonnade.model.attend import Packed
from colonnade.parallel.axis import Axis


@dataclass(frozen=True)
class Share:
    """The rows of one rank: all of them, and its earlier and later chunk."""

    both: TokenRows
    first: TokenRows
    second: TokenRows

    def early(self, x_T: Tensor) -> Tensor:
        """Of the rank's rows those of its earlier chunk."""
        return self._halves(x_T)[:, 0].flatten(0, 1) if self.both.sequences else x_T[: len(self.first.index_T)]

    def late(self, x_T: Tensor) -> Tensor:
        """Of the rank's rows those of its later chunk."""
        return self._halves(x_T)[:, 1].flatten(0, 1) if self.both.sequences else x_T[len(self.first.index_T) :]

    def add_early(self, to_T: Tensor, x_T: Tensor) -> None:
        """Add to the rows of the earlier chunk, in place."""
        if self.both.sequences:
            self._halves(to_T)[:, 0] += x_T.unflatten(0, (self.both.sequences, -1))
        else:
            to_T[: len(x_T)] += x_T

    def set_late(self, to_T: Tensor, x_T: Tensor) -> None:
        """Overwrite the rows of the later chunk, in place."""
        if self.both.sequences:
            self._halves(to_T)[:, 1] = x_T.unflatten(0, (self.both.sequences, -1))
        else:
            to_T[len(to_T) - len(x_T) :] = x_T

    def _halves(self, x_T: Tensor) -> Tensor:
        return x_T.unflatten(0, (self.both.sequences, 2, -1))


@dataclass(frozen=True)
class Ring:
    """What :class:`~colonnade.model.attend.Packed` is on one rank, over ranks that share its tokens."""

    keeps: ClassVar[bool] = False

    axis: Axis
    shares: tuple[Share, ...]
    """Of each rank."""
    packed: Packed
    """The whole stream, as one rank would attend to it."""

    @staticmethod
    def of(packed: Packed, T: int, axis: Axis) -> "Ring":
        """``packed``, of T tokens in all, shared by the ranks of ``axis``."""
        return Ring(axis, shares(packed, T, axis.size), packed)

    @property
    def index_t(self) -> Tensor:
        """Which tokens of the whole stream this rank holds, in its order."""
        return self.shares[self.axis.rank].both.index_T

    def at(self, layer: int, window: int | None) -> "Ring":
        """The same for every layer, but for the window and the key of the dropout."""
        packed = self.packed.at(layer, window)
        return self if packed is self.packed else replace(self, packed=packed)

    def chosen(self, operation: Literal["chunk_forward", "chunk_backward"], q_tnH: Tensor) -> Callable[..., Any]:
        """The chunk kernel; only the reference drops."""
        kernels = self.packed.kernels if self.packed.dropout is None else "reference"
        return choose(operation, q_tnH.device.type, q_tnH.dtype, kernels)

    def see(self, rank: int) -> dict[str, Any]:
        """What the chunk kernels are told of who sees whom among ``rank``'s keys."""
        packed = self.packed
        told = {"causal": packed.causal and rank == self.axis.rank, "window": packed.window}
        return told | ({} if packed.dropout is None else {"dropout": packed.dropout})

    def __call__(self, q_TnH: Tensor, k_TkH: Tensor, v_TkH: Tensor) -> Tensor:
        """o_TnH, T being this rank's tokens."""
        return _RingAttention.apply(q_TnH, k_TkH, v_TkH, self)


def shares(packed: Packed, T: int, ranks: int) -> tuple[Share, ...]:
    """The rows of each rank, by the rule above."""
    device, chunks = packed.cu_seqlens.device, 2 * ranks
    index_T, longest = torch.arange(T, device=device), packed.longest
    segment_T = torch.searchsorted(packed.cu_seqlens, index_T, right=True)
    even = packed.equal and T > 0 and longest % chunks == 0
    if even:
        parts = index_T.view(-1, chunks, longest // chunks).unbind(1)  # each (sequences, rows)
    else:
        size = -(-T // chunks)
        parts = [index_T[None, min(T, c * size) : min(T, (c + 1) * size)] for c in range(chunks)]

    def rows(*held: Tensor) -> TokenRows:
        index_t = torch.cat(held, 1).flatten()
        if even:
            sequences = len(held[0])
            each = len(index_t) // sequences
            cu = torch.arange(0, len(index_t) + 1, each, dtype=torch.int32, device=device)
            return TokenRows(index_t, segment_T[index_t], cu, each, sequences)
        # How many of these rows come before each document; the rows are ordered, and so are the documents.
        cu = torch.searchsorted(index_t, packed.cu_seqlens.long()).to(torch.int32)
        return TokenRows(index_t, segment_T[index_t], cu, min(longest, len(index_t)), 0)

    return tuple(Share(rows(parts[r], parts[-1 - r]), rows(parts[r]), rows(parts[-1 - r])) for r in range(ranks))


class _RingAttention(Function):
    @staticmethod
    def forward(ctx, q_tnH: Tensor, k_tkH: Tensor, v_tkH: Tensor, ring: Ring) -> Tensor:
        run = ring.chosen("chunk_forward", q_tnH)
        me, mine = ring.axis.rank, ring.shares[ring.axis.rank]
        folded: State | None = None
        for rank, k, v in _round(ring, k_tkH, v_tkH):
            theirs, see = ring.shares[rank], ring.see(rank)
            if not ring.packed.causal or rank == me:
                part = run(q_tnH, k, v, mine.both, theirs.both, **see)
            elif rank < me:
                part = run(q_tnH, theirs.early(k), theirs.early(v), mine.both, theirs.first, **see)
            else:
                assert folded is not None, "a rank begins with its own keys"
                part = run(mine.late(q_tnH), k, v, mine.second, theirs.both, **see)
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
        run = ring.chosen("chunk_backward", q_tnH)
        me, mine = ring.axis.rank, ring.shares[ring.axis.rank]
        dq_tnH = torch.zeros_like(o_tnH)
        travelling: Tensor | None = None  # the gradients of the keys that come next, as far as they are summed
        for rank, k, v in _round(ring, k_tkH, v_tkH):
            theirs, see = ring.shares[rank], ring.see(rank)
            dkv_t2kH = o_tnH.new_zeros(len(k), 2, *k.shape[1:])
            if not ring.packed.causal or rank == me:
                dq, dk, dv = run(do_tnH, q_tnH, k, v, o_tnH, lse_tn, mine.both, theirs.both, **see)
                dq_tnH += dq
                dkv_t2kH += torch.stack((dk, dv), 1)
            elif rank < me:
                early = theirs.early(k), theirs.early(v)
                dq, dk, dv = run(do_tnH, q_tnH, *early, o_tnH, lse_tn, mine.both, theirs.first, **see)
                dq_tnH += dq
                theirs.add_early(dkv_t2kH, torch.stack((dk, dv), 1))
            else:
                do, q, o, lse = (mine.late(x) for x in (do_tnH, q_tnH, o_tnH, lse_tn))
                dq, dk, dv = run(do, q, k, v, o, lse, mine.second, theirs.both, **see)
                mine.set_late(dq_tnH, mine.late(dq_tnH) + dq)
                dkv_t2kH += torch.stack((dk, dv), 1)
            if travelling is not None:
                dkv_t2kH += ring.axis.arrived(travelling)
            travelling = ring.axis.depart(dkv_t2kH, _rows(ring, rank - 1))
        assert travelling is not None
        dk_tkH, dv_tkH = ring.axis.arrived(travelling).unbind(1)  # home again
        return dq_tnH.to(q_tnH.dtype), dk_tkH.to(k_tkH.dtype), dv_tkH.to(v_tkH.dtype), None


def _round(ring: Ring, k_tkH: Tensor, v_tkH: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """(rank, its keys, its values), this rank's own first; the next ones travel while the caller works."""
    size, rank = ring.axis.size, ring.axis.rank
    kv_t2kH = torch.stack((k_tkH, v_tkH), 1)
    for step in range(size):
        coming = ring.axis.depart(kv_t2kH, _rows(ring, rank - 1)) if step + 1 < size else None
        yield rank, kv_t2kH[:, 0], kv_t2kH[:, 1]
        if coming is not None:
            kv_t2kH, rank = ring.axis.arrived(coming), (rank - 1) % size


def _rows(ring: Ring, rank: int) -> int:
    return len(ring.shares[rank % ring.axis.size].both.index_T)
