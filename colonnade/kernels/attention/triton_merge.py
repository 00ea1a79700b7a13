"""The merge of what :mod:`~colonnade.kernels.attention.triton_split_kv` cut: every number of the output by itself, all
its pieces at once.

    lse = log Σ_s exp(lse_s)        o = Σ_s exp(lse_s − lse) o_s

Done by one program that goes through the pieces in sequence, the merge of a long context took as long as the reading
(36 µs in all where 21 would do). Here a line's rows and parts of its width go to different programs, and each loads
PIECES of its pieces side by side; more of them it adds in the same way, in a fixed order, so that the bits are the same
each time. A line of no pieces is the identity, which is how queries without keys get their output. Where a request
shares a prefix (:mod:`cascade`), the states of its group's blocks of rows are added too, after its own: where these
are is known sooner.

Under fixed cuts a sum's bits must not depend on anybody else, and they do depend on how it is laid out: there this
follows from a row's own position alone, which is how many chunks it sees.

The merge of all ranks' states (:mod:`~colonnade.kernels.attention.sharded_cache`) in one launch, where plain torch
takes ten for a few kilobytes.

    lse = log Σ_r exp(lse_r)        o = Σ_r exp(lse_r − lse) o_r        in the order of ranks, the same bits on each

One program for each query and head; all ranks' numbers are loaded side by side.
"""

from collections.abc import Sequence

import torch
import triton
from torch import Tensor
from triton import language as tl

from colonnade.kernels.attention import sharded_cache
from colonnade.kernels.attention.decode_plan import DevicePlan
from colonnade.kernels.attention.page_table import PageTable
from colonnade.kernels.attention.split_plan import flat_offsets
from colonnade.kernels.attention.triton_split_kv import FIELDS, LN_2, LOG2_E
from colonnade.kernels.device import multiprocessors
from colonnade.kernels.softmax_state import State

# pyright: reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false
# pyright: reportGeneralTypeIssues=false
# A kernel is launched with more than its signature says, and its constants are plain numbers.


MERGE_PROGRAMS = 8
"""Programs that merge, a multiprocessor, at most."""
MIN_PIECES = 16
"""Pieces side by side, at least: a line that is long among short ones has many."""
FEW_CHUNKS = 16
"""Chunks up to which one program merges a row under fixed cuts, up to ``WHOLE`` of its numbers at once."""
MAX_WIDTH = 256


@triton.jit
def _initial_sums(n, sinks_ptr, SINKS: tl.constexpr, BLOCK_H: tl.constexpr):
    """(o, top, total) of no pieces."""
    top, total = tl.full((), float("-inf"), tl.float32), tl.full((), 0.0, tl.float32)
    if SINKS:
        top = tl.load(sinks_ptr + n).to(tl.float32) * LOG2_E
        total = tl.where(top == float("-inf"), 0.0, 1.0)
    return tl.zeros((BLOCK_H,), tl.float32), top, total


@triton.jit
def _accumulate(
    o, top, total, h, slots_o, slots_lse, from_slot, to_slot, rows, place, H: tl.constexpr, PIECES: tl.constexpr
):
    """(o, top, total) with a row's states of these slots."""
    for piece in range(from_slot, to_slot, PIECES):
        s = piece + tl.arange(0, PIECES)
        at_row = s.to(tl.int64) * rows + place
        lse = tl.load(slots_lse + at_row, s < to_slot, float("-inf")) * LOG2_E
        held = (s < to_slot)[:, None] & (h < H)[None, :]
        part = tl.load(slots_o + at_row[:, None] * H + h[None, :], held, 0.0)
        higher = tl.maximum(top, tl.max(lse, 0))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weight = tl.exp2(lse - base)
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.sum(weight, 0)
        o = o * shrink + tl.sum(weight[:, None] * part, 0)
        top = higher
    return o, top, total


@triton.jit
def _store_row(o, top, total, h, line, o_ptr, lse_ptr, H: tl.constexpr):
    """A row's numbers ``h``."""
    some = tl.where(total > 0.0, total, 1.0)
    o = o / some
    tl.store(o_ptr + line * H + h, o.to(o_ptr.dtype.element_ty), h < H)
    tl.store(lse_ptr + line, tl.where(total > 0.0, top + tl.log2(some), float("-inf")) * LN_2)


@triton.jit(do_not_specialize=["merges_at", "shared_at"])
def merge(
    o_ptr, lse_ptr, slot_o_ptr, slot_lse_ptr, plan_ptr, cu_ptr, sinks_ptr,
    shared_o_ptr, shared_lse_ptr, shared_ptr, members_ptr, merges_at, shared_at,
    N: tl.constexpr, GROUP: tl.constexpr, H: tl.constexpr, SINKS: tl.constexpr, WAIT: tl.constexpr,
    ROWS: tl.constexpr, USED: tl.constexpr, SHARED_ROWS: tl.constexpr, PIECES: tl.constexpr,
    SHARED_PIECES: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Each program takes (line, row, part of the width) in turn: the number of lines is the plan's, the grid fixed.

    No block has more than USED rows. What the plan says is read before WAIT, beside the last of the reading. With
    SHARED_ROWS a request may be in a group (:mod:`cascade`), whose states are of blocks of so many rows.
    """
    parts: tl.constexpr = (H + BLOCK_H - 1) // BLOCK_H
    tasks = tl.load(plan_ptr) * USED * parts
    for task in range(tl.program_id(0), tasks, tl.num_programs(0)):
        at = plan_ptr + merges_at + task // (USED * parts) * FIELDS
        request, head, block = tl.load(at), tl.load(at + 1), tl.load(at + 2)
        first, end = tl.load(at + 3), tl.load(at + 4)
        row = task // parts % USED
        m = block * ROWS + row
        t = tl.load(cu_ptr + request) + m // GROUP
        there = t < tl.load(cu_ptr + request + 1)
        their_first, their_end, among = 0, 0, m
        if SHARED_ROWS:
            line = tl.load(members_ptr + request * 4)
            blocks, before = tl.load(members_ptr + request * 4 + 1), tl.load(members_ptr + request * 4 + 2)
            among = before * GROUP + m
            line_at = shared_ptr + shared_at + (line + head * blocks + among // SHARED_ROWS) * FIELDS
            their_first, their_end = tl.load(line_at + 3, line >= 0, 0), tl.load(line_at + 4, line >= 0, 0)
        if WAIT:
            tl.extra.cuda.gdc_wait()  # at the second task it is over
        if there:
            n = head * GROUP + m % GROUP
            h = task % parts * BLOCK_H + tl.arange(0, BLOCK_H)
            o, top, total = _initial_sums(n, sinks_ptr, SINKS, BLOCK_H)
            o, top, total = _accumulate(o, top, total, h, slot_o_ptr, slot_lse_ptr, first, end, ROWS, row, H, PIECES)
            if SHARED_ROWS:
                o, top, total = _accumulate(
                    o, top, total, h, shared_o_ptr, shared_lse_ptr, their_first, their_end, SHARED_ROWS,
                    among % SHARED_ROWS, H, SHARED_PIECES,
                )  # fmt: skip
            _store_row(o, top, total, h, t.to(tl.int64) * N + n, o_ptr, lse_ptr, H)
    if WAIT:
        tl.extra.cuda.gdc_wait()  # whatever comes after this kernel takes the reading for over, too


@triton.jit
def _merge_row(
    h_at, n, line, from_slot, to_slot, row, o_ptr, lse_ptr, slot_o_ptr, slot_lse_ptr, sinks_ptr,
    H: tl.constexpr, SINKS: tl.constexpr, ROWS: tl.constexpr, PIECES: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Numbers of a row from ``h_at`` on."""
    h = h_at + tl.arange(0, BLOCK_H)
    o, top, total = _initial_sums(n, sinks_ptr, SINKS, BLOCK_H)
    o, top, total = _accumulate(o, top, total, h, slot_o_ptr, slot_lse_ptr, from_slot, to_slot, ROWS, row, H, PIECES)
    _store_row(o, top, total, h, line, o_ptr, lse_ptr, H)


@triton.jit(do_not_specialize=["merges_at", "used"])
def merge_chunks(
    o_ptr, lse_ptr, slot_o_ptr, slot_lse_ptr, plan_ptr, cu_ptr, lengths_ptr, sinks_ptr, merges_at, used,
    N: tl.constexpr, GROUP: tl.constexpr, H: tl.constexpr, SINKS: tl.constexpr, WAIT: tl.constexpr,
    ROWS: tl.constexpr, CHUNK: tl.constexpr, FEW: tl.constexpr, WHOLE: tl.constexpr, PIECES: tl.constexpr,
    BLOCK_H: tl.constexpr,
):  # fmt: skip
    """:func:`merge` under fixed cuts and without a window, where every line begins with key 0.

    A row sees as many chunks as its position says. Up to FEW are added side by side in their whole width, more in parts
    of it: tiles of mostly nothing cost a fifth of a step of short requests. Chunks behind these, of later queries of
    its block or of a plan made ahead, are left out. Where rows are many a program takes all parts of one.
    """
    parts: tl.constexpr = (H + BLOCK_H - 1) // BLOCK_H
    rows = tl.load(plan_ptr) * used
    takers = tl.where(2 * rows <= tl.num_programs(0), parts, 1)
    for task in range(tl.program_id(0), rows * takers, tl.num_programs(0)):
        part, row = task // rows, task % used
        at = plan_ptr + merges_at + task % rows // used * FIELDS
        request, head, block = tl.load(at), tl.load(at + 1), tl.load(at + 2)
        first, end = tl.load(at + 3), tl.load(at + 4)
        m = block * ROWS + row
        start = tl.load(cu_ptr + request)
        new = tl.load(cu_ptr + request + 1) - start
        chunks = tl.maximum(tl.load(lengths_ptr + request) - new + m // GROUP + CHUNK, 0) // CHUNK
        end = tl.minimum(end, first + chunks)
        if WAIT:
            tl.extra.cuda.gdc_wait()  # at the second task it is over
        if m // GROUP < new:
            n = head * GROUP + m % GROUP
            line = (start + m // GROUP).to(tl.int64) * N + n
            if chunks > FEW:
                for h_at in range(part * BLOCK_H, H, takers * BLOCK_H):
                    _merge_row(
                        h_at, n, line, first, end, row, o_ptr, lse_ptr, slot_o_ptr, slot_lse_ptr, sinks_ptr,
                        H, SINKS, ROWS, PIECES, BLOCK_H,
                    )  # fmt: skip
            elif part == 0:
                for h_at in range(0, H, WHOLE):
                    _merge_row(
                        h_at, n, line, first, end, row, o_ptr, lse_ptr, slot_o_ptr, slot_lse_ptr, sinks_ptr,
                        H, SINKS, ROWS, FEW, WHOLE,
                    )  # fmt: skip
    if WAIT:
        tl.extra.cuda.gdc_wait()  # whatever comes after this kernel takes the reading for over, too


def allocate_slots(o_TNH: Tensor, ready: DevicePlan) -> State:
    """Room for the states of a plan's pieces, for outputs of this width."""
    shape = max(1, ready.capacity.slots), ready.layout.shape.rows, o_TNH.shape[2]
    return State(o_TNH.new_empty(shape, dtype=torch.float32), o_TNH.new_empty(shape[:2], dtype=torch.float32))


def _part_width(ready: DevicePlan, H: int, room: int) -> int:
    """Numbers of a row that one program merges: all where there are rows enough for ``room`` programs, else as few as
    the table says. Under fixed cuts always these, for a sum's bits depend on how it is laid out.
    """
    layout = ready.layout
    least, part = min(layout.tiles.part, triton.next_power_of_2(H)), triton.next_power_of_2(H)
    if layout.chunk is not None:
        return least
    while part > least and 2 * ready.capacity.merges * layout.used * triton.cdiv(H, part) < room:
        part //= 2
    return part


def _parallel_pieces(ready: DevicePlan) -> int:
    """Pieces of a line that a program loads side by side: as many as a line has where all have as many."""
    layout, most = ready.layout, ready.layout.tiles.pieces
    if layout.chunk is not None:
        # Of a block with a window, rows begin in different chunks: a row's states stand further back in company than
        # alone, and only one by one is that the same sum. They are few, those of a window.
        return 1
    return max(
        min(MIN_PIECES, most), min(most, triton.next_power_of_2(ready.capacity.workers // ready.capacity.merges + 1))
    )


def launch_merge(
    state: State,
    slots: State,
    table: PageTable,
    ready: DevicePlan,
    sinks_N: Tensor | None = None,
    shared: tuple[State, DevicePlan, Tensor] | None = None,
) -> None:
    """Merge what ``ready`` cut into ``state``; ``shared`` are slots, plan and members of groups with a prefix."""
    if not ready.merges:
        return
    (_, N, H), shape = state.o.shape, ready.layout.shape
    their_slots, theirs, members = shared or (slots, ready, ready.flat)
    used, room = ready.layout.used, MERGE_PROGRAMS * multiprocessors(state.o.device)
    part = _part_width(ready, H, room)
    if ready.layout.chunk is not None and shape.window is None:
        _launch_merge_chunks(state, slots, table, ready, sinks_N, part, room)
        return
    programs = min(ready.capacity.merges * used * triton.cdiv(H, part), room)
    merge[programs,](
        *state, *slots, ready.flat, table.cu_queries, slots.lse if sinks_N is None else sinks_N,
        *their_slots, theirs.flat, members, flat_offsets(ready.capacity)[2], flat_offsets(theirs.capacity)[2],
        N=N, GROUP=shape.group, H=H, SINKS=sinks_N is not None, WAIT=ready.overlaps,
        ROWS=shape.rows, USED=used,
        SHARED_ROWS=theirs.layout.shape.rows if shared else 0, PIECES=_parallel_pieces(ready), SHARED_PIECES=_parallel_pieces(theirs),
        BLOCK_H=part, num_warps=4,
        **ready.early,
    )  # fmt: skip


def _launch_merge_chunks(
    state: State, slots: State, table: PageTable, ready: DevicePlan, sinks_N: Tensor | None, part: int, room: int
) -> None:
    """Rows that no request of this step has are no work; how many there are is no constant of the kernel, whose sums
    might be laid out by it.
    """
    (_, N, H), layout = state.o.shape, ready.layout
    used = min(layout.used, layout.shape.group * max(1, table.longest_query))
    merge_chunks[min(ready.capacity.merges * used * triton.cdiv(H, part), room),](
        *state, *slots, ready.flat, table.cu_queries, table.lengths_R, slots.lse if sinks_N is None else sinks_N,
        flat_offsets(ready.capacity)[2], used, N=N, GROUP=layout.shape.group, H=H, SINKS=sinks_N is not None,
        WAIT=ready.overlaps, ROWS=layout.shape.rows, CHUNK=layout.chunk, FEW=FEW_CHUNKS,
        WHOLE=min(MAX_WIDTH, triton.next_power_of_2(H)), PIECES=layout.tiles.pieces, BLOCK_H=part, num_warps=4,
        **ready.early,
    )  # fmt: skip


# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false
# A kernel is launched with more than its signature says, and its constants are plain numbers.


@triton.jit
def _merge_rank_states(
    o_ptr, each_ptr, lines, H: tl.constexpr, RANKS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_H: tl.constexpr
):
    """One line of o (lines, H) from (RANKS, lines, H + 1)."""
    line = tl.program_id(0).to(tl.int64)
    r, h = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_H)
    at = each_ptr + (r * lines + line) * (H + 1)
    lse = tl.load(at + H, r < RANKS, float("-inf"))
    top = tl.max(lse, 0)
    weight = tl.exp(lse - tl.where(top == float("-inf"), 0.0, top))
    total = tl.sum(weight, 0)
    part = tl.load(at[:, None] + h[None, :], (r < RANKS)[:, None] & (h < H)[None, :], 0.0)
    o = tl.sum(weight[:, None] * part, 0) / tl.where(total > 0.0, total, 1.0)
    tl.store(o_ptr + line * H + h, o.to(o_ptr.dtype.element_ty), h < H)


def merge_states(each_STNz: Tensor, more: Sequence[State], dtype: torch.dtype) -> Tensor:
    """o_TNH (see :func:`sharded_cache.merged`); with ``more`` states, those of long steps, plain torch's."""
    if more:
        return sharded_cache.merge_states(each_STNz, more, dtype)
    ranks, T, N, z = each_STNz.shape
    o_TNH = each_STNz.new_empty(T, N, z - 1, dtype=dtype)
    if T:
        blocks = {"BLOCK_R": triton.next_power_of_2(ranks), "BLOCK_H": triton.next_power_of_2(z - 1)}
        _merge_rank_states[T * N,](o_TNH, each_STNz.contiguous(), T * N, H=z - 1, RANKS=ranks, **blocks)
    return o_TNH
