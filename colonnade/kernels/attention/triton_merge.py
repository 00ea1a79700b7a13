"""Merges softmax states: the split lines of Flash-Decoding, and the states of all ranks.

    lse = log Σ_s exp(lse_s)        o = Σ_s exp(lse_s − lse) o_s

**Split lines.** With one program looping over the pieces, the merge of a long context took as long as reading it (36 µs
in total instead of 21). Here the rows of a line and parts of their width are divided among programs, and each loads
PIECES pieces in parallel; further pieces follow in a fixed order, so that results are deterministic. A line without
pieces gets the identity state, which is how queries without keys get their output. If a request shares a prefix
(:mod:`cascade`), the states of its group are added after its own.

With fixed splits a sum's bits must not depend on the batch, and they do depend on its layout: there the layout follows
from a row's own position alone, that is, from how many chunks it sees.

**Ranks** (:mod:`~colonnade.kernels.attention.sharded_cache`): one launch where plain torch takes ten for a few
kilobytes. One program per query and head loads all ranks' values in parallel and sums in the order of ranks, so that
the result is bitwise equal on each.
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
# Triton adds launch options to a kernel's signature, and constexpr arguments are plain Python values.


MERGE_PROGRAMS = 8
"""Merge programs per SM, at most."""
MIN_PIECES = 16
"""Pieces loaded in parallel, at least: a long line among short ones has many."""
FEW_CHUNKS = 16
"""With fixed splits: chunks up to which one program merges a row in its whole width, up to MAX_WIDTH elements at a
time."""
MAX_WIDTH = 256


@triton.jit
def _initial_sums(n, sinks_ptr, SINKS: tl.constexpr, BLOCK_H: tl.constexpr):
    """(o, row_max, row_sum) of no pieces."""
    row_max, row_sum = tl.full((), float("-inf"), tl.float32), tl.full((), 0.0, tl.float32)
    if SINKS:
        row_max = tl.load(sinks_ptr + n).to(tl.float32) * LOG2_E
        row_sum = tl.where(row_max == float("-inf"), 0.0, 1.0)
    return tl.zeros((BLOCK_H,), tl.float32), row_max, row_sum


@triton.jit
def _accumulate(
    o, row_max, row_sum, h, slots_o, slots_lse, from_slot, to_slot, rows, place, H: tl.constexpr, PIECES: tl.constexpr
):
    """(o, row_max, row_sum) with a row's states of these slots added."""
    for piece in range(from_slot, to_slot, PIECES):
        s = piece + tl.arange(0, PIECES)
        at_row = s.to(tl.int64) * rows + place
        lse = tl.load(slots_lse + at_row, s < to_slot, float("-inf")) * LOG2_E
        mask = (s < to_slot)[:, None] & (h < H)[None, :]
        part = tl.load(slots_o + at_row[:, None] * H + h[None, :], mask, 0.0)
        new_max = tl.maximum(row_max, tl.max(lse, 0))
        safe_max = tl.where(new_max == float("-inf"), 0.0, new_max)
        weight = tl.exp2(lse - safe_max)
        rescale = tl.exp2(row_max - safe_max)
        row_sum = row_sum * rescale + tl.sum(weight, 0)
        o = o * rescale + tl.sum(weight[:, None] * part, 0)
        row_max = new_max
    return o, row_max, row_sum


@triton.jit
def _store_row(o, row_max, row_sum, h, line, o_ptr, lse_ptr, H: tl.constexpr):
    """Normalises and stores the elements ``h`` of a row."""
    safe_sum = tl.where(row_sum > 0.0, row_sum, 1.0)
    o = o / safe_sum
    tl.store(o_ptr + line * H + h, o.to(o_ptr.dtype.element_ty), h < H)
    tl.store(lse_ptr + line, tl.where(row_sum > 0.0, row_max + tl.log2(safe_sum), float("-inf")) * LN_2)


@triton.jit(do_not_specialize=["merges_at", "shared_at"])
def merge(
    o_ptr, lse_ptr, slot_o_ptr, slot_lse_ptr, plan_ptr, cu_ptr, sinks_ptr,
    shared_o_ptr, shared_lse_ptr, shared_ptr, members_ptr, merges_at, shared_at,
    N: tl.constexpr, GROUP: tl.constexpr, H: tl.constexpr, SINKS: tl.constexpr, WAIT: tl.constexpr,
    ROWS: tl.constexpr, USED: tl.constexpr, SHARED_ROWS: tl.constexpr, PIECES: tl.constexpr,
    SHARED_PIECES: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Merges split lines; programs take (line, row, part of the width) in turn.

    The number of lines comes from the plan, the grid is fixed. No block has more than USED rows. The plan is read
    before WAIT, while the last reads are running. With SHARED_ROWS requests may be in a group (:mod:`cascade`), whose
    states have blocks of so many rows.
    """
    PARTS: tl.constexpr = (H + BLOCK_H - 1) // BLOCK_H
    tasks = tl.load(plan_ptr) * USED * PARTS
    for task in range(tl.program_id(0), tasks, tl.num_programs(0)):
        at = plan_ptr + merges_at + task // (USED * PARTS) * FIELDS
        request, head, block = tl.load(at), tl.load(at + 1), tl.load(at + 2)
        first, end = tl.load(at + 3), tl.load(at + 4)
        row = task // PARTS % USED
        m = block * ROWS + row
        t = tl.load(cu_ptr + request) + m // GROUP
        valid = t < tl.load(cu_ptr + request + 1)
        shared_first, shared_end, group_row = 0, 0, m
        if SHARED_ROWS:
            line = tl.load(members_ptr + request * 4)
            blocks, before = tl.load(members_ptr + request * 4 + 1), tl.load(members_ptr + request * 4 + 2)
            group_row = before * GROUP + m
            line_at = shared_ptr + shared_at + (line + head * blocks + group_row // SHARED_ROWS) * FIELDS
            shared_first, shared_end = tl.load(line_at + 3, line >= 0, 0), tl.load(line_at + 4, line >= 0, 0)
        if WAIT:
            tl.extra.cuda.gdc_wait()  # returns at once from the second task on
        if valid:
            n = head * GROUP + m % GROUP
            h = task % PARTS * BLOCK_H + tl.arange(0, BLOCK_H)
            o, row_max, row_sum = _initial_sums(n, sinks_ptr, SINKS, BLOCK_H)
            o, row_max, row_sum = _accumulate(
                o, row_max, row_sum, h, slot_o_ptr, slot_lse_ptr, first, end, ROWS, row, H, PIECES
            )
            if SHARED_ROWS:
                o, row_max, row_sum = _accumulate(
                    o, row_max, row_sum, h, shared_o_ptr, shared_lse_ptr, shared_first, shared_end, SHARED_ROWS,
                    group_row % SHARED_ROWS, H, SHARED_PIECES,
                )  # fmt: skip
            _store_row(o, row_max, row_sum, h, t.to(tl.int64) * N + n, o_ptr, lse_ptr, H)
    if WAIT:
        tl.extra.cuda.gdc_wait()  # later kernels rely on the reads being complete, too


@triton.jit
def _merge_row(
    h_at, n, line, from_slot, to_slot, row, o_ptr, lse_ptr, slot_o_ptr, slot_lse_ptr, sinks_ptr,
    H: tl.constexpr, SINKS: tl.constexpr, ROWS: tl.constexpr, PIECES: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Merges the elements of a row from ``h_at`` on."""
    h = h_at + tl.arange(0, BLOCK_H)
    o, row_max, row_sum = _initial_sums(n, sinks_ptr, SINKS, BLOCK_H)
    o, row_max, row_sum = _accumulate(
        o, row_max, row_sum, h, slot_o_ptr, slot_lse_ptr, from_slot, to_slot, ROWS, row, H, PIECES
    )
    _store_row(o, row_max, row_sum, h, line, o_ptr, lse_ptr, H)


@triton.jit(do_not_specialize=["merges_at", "used"])
def merge_chunks(
    o_ptr, lse_ptr, slot_o_ptr, slot_lse_ptr, plan_ptr, cu_ptr, lengths_ptr, sinks_ptr, merges_at, used,
    N: tl.constexpr, GROUP: tl.constexpr, H: tl.constexpr, SINKS: tl.constexpr, WAIT: tl.constexpr,
    ROWS: tl.constexpr, CHUNK: tl.constexpr, FEW: tl.constexpr, WHOLE: tl.constexpr, PIECES: tl.constexpr,
    BLOCK_H: tl.constexpr,
):  # fmt: skip
    """:func:`merge` for fixed splits without a window, where every line starts with key 0.

    A row's position determines how many chunks it sees. Up to FEW chunks are added in parallel over the whole width,
    more in parts of it: mostly empty tiles cost a fifth of a step of short requests. Later chunks, of later queries of
    the block or of a plan made ahead, are skipped. If there are many rows, a program takes all parts of one.
    """
    PARTS: tl.constexpr = (H + BLOCK_H - 1) // BLOCK_H
    rows = tl.load(plan_ptr) * used
    programs_per_row = tl.where(2 * rows <= tl.num_programs(0), PARTS, 1)
    for task in range(tl.program_id(0), rows * programs_per_row, tl.num_programs(0)):
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
                for h_at in range(part * BLOCK_H, H, programs_per_row * BLOCK_H):
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
    """Allocates the states of a plan's pieces, for outputs of this width."""
    shape = max(1, ready.capacity.slots), ready.layout.shape.rows, o_TNH.shape[2]
    return State(o_TNH.new_empty(shape, dtype=torch.float32), o_TNH.new_empty(shape[:2], dtype=torch.float32))


def _part_width(ready: DevicePlan, H: int, max_programs: int) -> int:
    """Elements of a row that one program merges.

    All of them if there are rows enough for ``room`` programs, else as few as the table says. With fixed splits always
    as the table says, because a sum's bits depend on its layout.
    """
    layout = ready.layout
    least, part = min(layout.tiles.part, triton.next_power_of_2(H)), triton.next_power_of_2(H)
    if layout.chunk is not None:
        return least
    while part > least and 2 * ready.capacity.merges * layout.used_rows * triton.cdiv(H, part) < max_programs:
        part //= 2
    return part


def _parallel_pieces(ready: DevicePlan) -> int:
    """Pieces of a line that a program loads in parallel: as many as lines have on average."""
    layout, most = ready.layout, ready.layout.tiles.pieces
    if layout.chunk is not None:
        # With a window, a block's rows start in different chunks: the position of a row's states depends on the batch,
        # and only a sequential sum does not depend on it. A window has few chunks.
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
    """Merges the split lines of ``ready`` into ``state``; ``shared`` are slots, plan and membership of groups."""
    if not ready.has_merges:
        return
    (_, N, H), shape = state.o.shape, ready.layout.shape
    shared_slots, shared_plan, members = shared or (slots, ready, ready.flat)
    used, max_programs = ready.layout.used_rows, MERGE_PROGRAMS * multiprocessors(state.o.device)
    part = _part_width(ready, H, max_programs)
    if ready.layout.chunk is not None and shape.window is None:
        _launch_merge_chunks(state, slots, table, ready, sinks_N, part, max_programs)
        return
    programs = min(ready.capacity.merges * used * triton.cdiv(H, part), max_programs)
    merge[programs,](
        *state, *slots, ready.flat, table.cu_queries, slots.lse if sinks_N is None else sinks_N,
        *shared_slots, shared_plan.flat, members,
        flat_offsets(ready.capacity)[2], flat_offsets(shared_plan.capacity)[2],
        N=N, GROUP=shape.group, H=H, SINKS=sinks_N is not None, WAIT=ready.overlaps_merge,
        ROWS=shape.rows, USED=used,
        SHARED_ROWS=shared_plan.layout.shape.rows if shared else 0, PIECES=_parallel_pieces(ready),
        SHARED_PIECES=_parallel_pieces(shared_plan), BLOCK_H=part, num_warps=4,
        **ready.pdl_options,
    )  # fmt: skip


def _launch_merge_chunks(
    state: State,
    slots: State,
    table: PageTable,
    ready: DevicePlan,
    sinks_N: Tensor | None,
    part: int,
    max_programs: int,
) -> None:
    # Rows that no request of this step has are skipped. ``used`` is no constexpr, lest the layout of sums depend on it.
    (_, N, H), layout = state.o.shape, ready.layout
    used = min(layout.used_rows, layout.shape.group * max(1, table.longest_query))
    merge_chunks[min(ready.capacity.merges * used * triton.cdiv(H, part), max_programs),](
        *state, *slots, ready.flat, table.cu_queries, table.lengths_R, slots.lse if sinks_N is None else sinks_N,
        flat_offsets(ready.capacity)[2], used, N=N, GROUP=layout.shape.group, H=H, SINKS=sinks_N is not None,
        WAIT=ready.overlaps_merge, ROWS=layout.shape.rows, CHUNK=layout.chunk, FEW=FEW_CHUNKS,
        WHOLE=min(MAX_WIDTH, triton.next_power_of_2(H)), PIECES=layout.tiles.pieces, BLOCK_H=part, num_warps=4,
        **ready.pdl_options,
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
    row_max = tl.max(lse, 0)
    weight = tl.exp(lse - tl.where(row_max == float("-inf"), 0.0, row_max))
    row_sum = tl.sum(weight, 0)
    part = tl.load(at[:, None] + h[None, :], (r < RANKS)[:, None] & (h < H)[None, :], 0.0)
    o = tl.sum(weight[:, None] * part, 0) / tl.where(row_sum > 0.0, row_sum, 1.0)
    tl.store(o_ptr + line * H + h, o.to(o_ptr.dtype.element_ty), h < H)


def merge_states(each_STNz: Tensor, more: Sequence[State], dtype: torch.dtype) -> Tensor:
    """o_TNH (see :func:`sharded_cache.merge_states`); with ``more`` states, as long steps have, in plain torch."""
    if more:
        return sharded_cache.merge_states(each_STNz, more, dtype)
    ranks, T, N, z = each_STNz.shape
    o_TNH = each_STNz.new_empty(T, N, z - 1, dtype=dtype)
    if T:
        blocks = {"BLOCK_R": triton.next_power_of_2(ranks), "BLOCK_H": triton.next_power_of_2(z - 1)}
        _merge_rank_states[T * N,](o_TNH, each_STNz.contiguous(), T * N, H=z - 1, RANKS=ranks, **blocks)
    return o_TNH
