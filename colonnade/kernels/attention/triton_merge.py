"""Merges softmax states: the split lines of Flash-Decoding, and the states of all ranks.

    lse = log Σ_s exp(lse_s)        o = Σ_s exp(lse_s − lse) o_s

**Split lines.** With one program looping over the pieces, the merge of a long context took as long as reading it (36 µs
in total instead of 21). Here the rows of a line and parts of their width are divided among programs, and each loads
PIECES pieces in parallel; further pieces follow in a fixed order, so that results are deterministic. A line without
pieces gets the identity state, which is how queries without keys get their output. If a request shares a prefix
(:mod:`cascade`), the states of its group are added after its own.

With fixed splits, a sum must be bitwise independent of the batch, and its bits depend on its layout. The layout is
therefore a function of the row's position alone, that is, of the number of chunks that it sees.

**Ranks** (:mod:`~colonnade.kernels.attention.reference`): one launch where plain torch takes ten for a few
kilobytes. One program per query and head loads all ranks' values in parallel and sums in the order of ranks, so that
the result is bitwise equal on each.
"""

from collections.abc import Sequence

import torch
import triton
from torch import Tensor
from triton import language as tl

from colonnade.kernels.attention import reference
from colonnade.kernels.attention.decode_plan import DevicePlan
from colonnade.kernels.attention.page_table import PageTable
from colonnade.kernels.attention.split_plan import flat_offsets
from colonnade.kernels.attention.triton_args import MergeConfig, Output, SharedStates
from colonnade.kernels.attention.triton_split_kv import FIELDS, LN_2, LOG2_E
from colonnade.kernels.device import multiprocessors
from colonnade.kernels.softmax_state import State
from colonnade.kernels.triton_constants import constexprs

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
def _accumulate(sums, h, slots_o, slots_lse, from_slot, to_slot, rows, place, H: tl.constexpr, PIECES: tl.constexpr):
    """``sums`` (o, row_max, row_sum) with a row's states of these slots added."""
    o, row_max, row_sum = sums
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
def _store_row(sums, h, line, output, H: tl.constexpr):
    """Normalises and stores the elements ``h`` of a row."""
    o, row_max, row_sum = sums
    safe_sum = tl.where(row_sum > 0.0, row_sum, 1.0)
    o = o / safe_sum
    tl.store(output.o + line * H + h, o.to(output.o.dtype.element_ty), h < H)
    tl.store(output.lse + line, tl.where(row_sum > 0.0, row_max + tl.log2(safe_sum), float("-inf")) * LN_2)


@triton.jit(do_not_specialize=["merges_at", "shared_at"])
def merge(output, plan_ptr, cu_ptr, sinks_ptr, shared, merges_at, shared_at, cfg: tl.constexpr):
    """Merges split lines; programs take (line, row, part of the width) in turn.

    The number of lines comes from the plan, the grid is fixed. No block has more than USED rows. The plan is read
    before WAIT, while the last reads are running. With SHARED_ROWS requests may be in a group (:mod:`cascade`), whose
    states have blocks of so many rows.
    """
    PARTS: tl.constexpr = (cfg.H + cfg.BLOCK_H - 1) // cfg.BLOCK_H
    tasks = tl.load(plan_ptr) * cfg.USED * PARTS
    for task in range(tl.program_id(0), tasks, tl.num_programs(0)):
        at = plan_ptr + merges_at + task // (cfg.USED * PARTS) * FIELDS
        request, head, block = tl.load(at), tl.load(at + 1), tl.load(at + 2)
        first, end = tl.load(at + 3), tl.load(at + 4)
        row = task // PARTS % cfg.USED
        m = block * cfg.ROWS + row
        t = tl.load(cu_ptr + request) + m // cfg.GROUP
        valid = t < tl.load(cu_ptr + request + 1)
        shared_first, shared_end, group_row = 0, 0, m
        if cfg.SHARED_ROWS:
            line = tl.load(shared.members + request * 4)
            blocks, before = tl.load(shared.members + request * 4 + 1), tl.load(shared.members + request * 4 + 2)
            group_row = before * cfg.GROUP + m
            line_at = shared.plan + shared_at + (line + head * blocks + group_row // cfg.SHARED_ROWS) * FIELDS
            shared_first, shared_end = tl.load(line_at + 3, line >= 0, 0), tl.load(line_at + 4, line >= 0, 0)
        if cfg.WAIT:
            tl.extra.cuda.gdc_wait()  # no wait from the second task on
        if valid:
            n = head * cfg.GROUP + m % cfg.GROUP
            h = task % PARTS * cfg.BLOCK_H + tl.arange(0, cfg.BLOCK_H)
            sums = _initial_sums(n, sinks_ptr, cfg.SINKS, cfg.BLOCK_H)
            sums = _accumulate(sums, h, output.slot_o, output.slot_lse, first, end, cfg.ROWS, row, cfg.H, cfg.PIECES)
            if cfg.SHARED_ROWS:
                sums = _accumulate(
                    sums, h, shared.slot_o, shared.slot_lse, shared_first, shared_end, cfg.SHARED_ROWS,
                    group_row % cfg.SHARED_ROWS, cfg.H, cfg.SHARED_PIECES,
                )  # fmt: skip
            _store_row(sums, h, t.to(tl.int64) * cfg.N + n, output, cfg.H)
    if cfg.WAIT:
        tl.extra.cuda.gdc_wait()  # later kernels also assume that the reads are complete


@triton.jit
def _merge_row(
    h_at, n, line, first, end, row, output, sinks_ptr, cfg: tl.constexpr, PIECES: tl.constexpr, BLOCK_H: tl.constexpr
):
    """Merges the elements of a row from ``h_at`` on."""
    h = h_at + tl.arange(0, BLOCK_H)
    sums = _initial_sums(n, sinks_ptr, cfg.SINKS, BLOCK_H)
    sums = _accumulate(sums, h, output.slot_o, output.slot_lse, first, end, cfg.ROWS, row, cfg.H, PIECES)
    _store_row(sums, h, line, output, cfg.H)


@triton.jit(do_not_specialize=["merges_at", "used"])
def merge_chunks(output, plan_ptr, cu_ptr, lengths_ptr, sinks_ptr, merges_at, used, cfg: tl.constexpr):
    """:func:`merge` for fixed splits without a window, where every line starts with key 0.

    A row's position determines how many chunks it sees. Up to FEW chunks are added in parallel over the whole width,
    more in parts of it: mostly empty tiles cost a fifth of a step of short requests. Later chunks, of later queries of
    the block or of a plan made ahead, are skipped. If there are many rows, a program takes all parts of one.
    """
    PARTS: tl.constexpr = (cfg.H + cfg.BLOCK_H - 1) // cfg.BLOCK_H
    rows = tl.load(plan_ptr) * used
    programs_per_row = tl.where(2 * rows <= tl.num_programs(0), PARTS, 1)
    for task in range(tl.program_id(0), rows * programs_per_row, tl.num_programs(0)):
        part, row = task // rows, task % used
        at = plan_ptr + merges_at + task % rows // used * FIELDS
        request, head, block = tl.load(at), tl.load(at + 1), tl.load(at + 2)
        first, end = tl.load(at + 3), tl.load(at + 4)
        m = block * cfg.ROWS + row
        start = tl.load(cu_ptr + request)
        new = tl.load(cu_ptr + request + 1) - start
        chunks = tl.maximum(tl.load(lengths_ptr + request) - new + m // cfg.GROUP + cfg.CHUNK, 0) // cfg.CHUNK
        end = tl.minimum(end, first + chunks)
        if cfg.WAIT:
            tl.extra.cuda.gdc_wait()  # complete from the second task on
        if m // cfg.GROUP < new:
            n = head * cfg.GROUP + m % cfg.GROUP
            line = (start + m // cfg.GROUP).to(tl.int64) * cfg.N + n
            if chunks > cfg.FEW:
                for h_at in range(part * cfg.BLOCK_H, cfg.H, programs_per_row * cfg.BLOCK_H):
                    _merge_row(h_at, n, line, first, end, row, output, sinks_ptr, cfg, cfg.PIECES, cfg.BLOCK_H)
            elif part == 0:
                for h_at in range(0, cfg.H, cfg.WHOLE):
                    _merge_row(h_at, n, line, first, end, row, output, sinks_ptr, cfg, cfg.FEW, cfg.WHOLE)
    if cfg.WAIT:
        tl.extra.cuda.gdc_wait()  # kernels after this one also assume that the reads are complete


def allocate_slots(o_TNH: Tensor, ready: DevicePlan) -> State:
    """Allocates the states of a plan's pieces, for outputs of this width."""
    shape = max(1, ready.capacity.slots), ready.layout.shape.rows, o_TNH.shape[2]
    return State(o_TNH.new_empty(shape, dtype=torch.float32), o_TNH.new_empty(shape[:2], dtype=torch.float32))


def _part_width(ready: DevicePlan, H: int, max_programs: int) -> int:
    """Elements of a row that one program merges.

    All of them if there are enough rows for ``max_programs`` programs, otherwise as few as in the table. With fixed
    splits always as in the table, because a sum's bits depend on its layout.
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
    (_, N, H), layout, shape = state.o.shape, ready.layout, ready.layout.shape
    max_programs = MERGE_PROGRAMS * multiprocessors(state.o.device)
    part, used = _part_width(ready, H, max_programs), layout.used_rows
    in_chunks = layout.chunk is not None and shape.window is None
    if in_chunks:  # rows without a request in this step are skipped
        used = min(used, shape.group * max(1, table.longest_query))
    grid = (min(ready.capacity.merges * used * triton.cdiv(H, part), max_programs),)
    output, sinks, merges_at = Output(*state, *slots), sinks_N, flat_offsets(ready.capacity)[2]
    if sinks is None:
        sinks = slots.lse  # placeholder for a tensor that is not read
    config = MergeConfig(N, shape.group, H, part, shape.rows, sinks_N is not None, ready.overlaps_merge)
    options = {"num_warps": 4, **ready.pdl_options}
    if in_chunks:
        # ``used`` is not a constant, so that the layout of sums does not depend on it.
        whole = min(MAX_WIDTH, triton.next_power_of_2(H))
        config = config._replace(PIECES=layout.tiles.pieces, CHUNK=layout.chunk, FEW=FEW_CHUNKS, WHOLE=whole)
        merge_chunks[grid](
            output, ready.flat, table.cu_queries, table.lengths_R, sinks, merges_at, used, constexprs(config), **options
        )
        return
    shared_slots, shared_plan, members = shared or (slots, ready, ready.flat)
    config = config._replace(PIECES=_parallel_pieces(ready), USED=used)
    if shared:
        shared_rows = shared_plan.layout.shape.rows
        config = config._replace(SHARED_ROWS=shared_rows, SHARED_PIECES=_parallel_pieces(shared_plan))
    merge[grid](
        output, ready.flat, table.cu_queries, sinks, SharedStates(*shared_slots, shared_plan.flat, members),
        merges_at, flat_offsets(shared_plan.capacity)[2], constexprs(config), **options,
    )  # fmt: skip


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
    """o_TNH (see :func:`reference.merge_states`); with ``more`` states, as long steps have, in plain torch."""
    if more:
        return reference.merge_states(each_STNz, more, dtype)
    ranks, T, N, z = each_STNz.shape
    o_TNH = each_STNz.new_empty(T, N, z - 1, dtype=dtype)
    if T:
        blocks = {"BLOCK_R": triton.next_power_of_2(ranks), "BLOCK_H": triton.next_power_of_2(z - 1)}
        _merge_rank_states[T * N,](o_TNH, each_STNz.contiguous(), T * N, H=z - 1, RANKS=ranks, **blocks)
    return o_TNH
