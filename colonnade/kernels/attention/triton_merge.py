"""The merge of what :mod:`triton_splits` cut: every number of the output by itself, all its pieces at once.

    lse = log Σ_s exp(lse_s)        o = Σ_s exp(lse_s − lse) o_s

Done by one program that goes through the pieces in sequence, the merge of a long context took as long as the reading
(36 µs in all where 21 would do). Here a line's rows and parts of its width go to different programs, and each loads
PIECES of its pieces side by side, of several rows where there are many lines; more pieces it adds in the same way, in a
fixed order, so that the bits are the same each time. A line of no pieces is the identity, which is how queries without
keys get their output. Where a request shares a prefix (:mod:`cascade`), the states of its group's blocks of rows come
first, as their keys do.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false
# pyright: reportGeneralTypeIssues=false
# A kernel is launched with more than its signature says, and its constants are plain numbers.

from typing import Any

import torch
import triton
from torch import Tensor
from triton import language as tl

from colonnade.kernels.attention.decode_layout import Prepared
from colonnade.kernels.attention.pages import PageTable
from colonnade.kernels.attention.split_plan import places
from colonnade.kernels.attention.triton_splits import FIELDS, LN_2, LOG2_E
from colonnade.kernels.device import processors
from colonnade.kernels.softmax_state import State

MERGERS = 8
"""Programs that merge, a multiprocessor, at most."""
BESIDE = 2
"""Of these, how many there is room for beside the reading."""
MOST_ROWS = 8
"""That one program merges at once."""


@triton.jit(do_not_specialize=["merges_at", "shared_at"])
def merge(
    o_ptr, lse_ptr, slot_o_ptr, slot_lse_ptr, plan_ptr, cu_ptr, sinks_ptr,
    shared_o_ptr, shared_lse_ptr, shared_ptr, members_ptr, merges_at, shared_at,
    N: tl.constexpr, GROUP: tl.constexpr, H: tl.constexpr, SINKS: tl.constexpr, WAIT: tl.constexpr,
    ROWS: tl.constexpr, USED: tl.constexpr, SHARED_ROWS: tl.constexpr, PIECES: tl.constexpr,
    TOGETHER: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Each program takes (line, TOGETHER rows, part of the width) in turn: the number of lines is the plan's, the grid
    fixed.

    No block has more than USED rows. What the plan says is read before WAIT, beside the last of the reading. With
    SHARED_ROWS a request may be in a group (:mod:`cascade`), whose states, of blocks of so many rows, come first; then
    a program has one row.
    """
    parts: tl.constexpr = (H + BLOCK_H - 1) // BLOCK_H
    rows_of_line: tl.constexpr = (USED + TOGETHER - 1) // TOGETHER
    tasks = tl.load(plan_ptr) * rows_of_line * parts
    for task in range(tl.program_id(0), tasks, tl.num_programs(0)):
        at = plan_ptr + merges_at + task // (rows_of_line * parts) * FIELDS
        request, head, block = tl.load(at), tl.load(at + 1), tl.load(at + 2)
        first, end = tl.load(at + 3), tl.load(at + 4)
        first_row = task // parts % rows_of_line * TOGETHER
        row = first_row + tl.arange(0, TOGETHER)
        m = block * ROWS + row
        t = tl.load(cu_ptr + request) + m // GROUP
        there = (t < tl.load(cu_ptr + request + 1)) & (row < USED)
        n = head * GROUP + m % GROUP
        h = task % parts * BLOCK_H + tl.arange(0, BLOCK_H)
        if WAIT:
            tl.extra.cuda.gdc_wait()  # at the second task it is over
        top = tl.full((TOGETHER,), float("-inf"), tl.float32)
        total = tl.zeros((TOGETHER,), tl.float32)
        if SINKS:
            top = tl.load(sinks_ptr + n, there, float("-inf")).to(tl.float32) * LOG2_E
            total = tl.where(top == float("-inf"), 0.0, 1.0)
        o = tl.zeros((TOGETHER, BLOCK_H), tl.float32)
        for source in tl.static_range(0 if SHARED_ROWS else 1, 2):
            from_slot, to_slot, rows, place = first, end, ROWS, row
            slots_o, slots_lse = slot_o_ptr, slot_lse_ptr
            if source == 0:
                line = tl.load(members_ptr + request * 4)
                blocks, before = tl.load(members_ptr + request * 4 + 1), tl.load(members_ptr + request * 4 + 2)
                among = before * GROUP + block * ROWS + first_row
                line_at = shared_ptr + shared_at + (line + head * blocks + among // SHARED_ROWS) * FIELDS
                from_slot, to_slot = tl.load(line_at + 3, line >= 0, 0), tl.load(line_at + 4, line >= 0, 0)
                rows, place = SHARED_ROWS, among % SHARED_ROWS + tl.arange(0, TOGETHER)
                slots_o, slots_lse = shared_o_ptr, shared_lse_ptr
            for piece in range(from_slot, to_slot, PIECES):
                s = piece + tl.arange(0, PIECES)
                at_row = s[:, None].to(tl.int64) * rows + place[None, :]
                held = (s < to_slot)[:, None] & there[None, :]
                lse = tl.load(slots_lse + at_row, held, float("-inf")) * LOG2_E
                held_part = held[:, :, None] & (h < H)[None, None, :]
                part = tl.load(slots_o + at_row[:, :, None] * H + h[None, None, :], held_part, 0.0)
                higher = tl.maximum(top, tl.max(lse, 0))
                base = tl.where(higher == float("-inf"), 0.0, higher)
                weight = tl.exp2(lse - base[None, :])
                shrink = tl.exp2(top - base)
                total = total * shrink + tl.sum(weight, 0)
                o = o * shrink[:, None] + tl.sum(weight[:, :, None] * part, 0)
                top = higher
        some = tl.where(total > 0.0, total, 1.0)
        o = o / some[:, None]
        line = t.to(tl.int64) * N + n
        o_at = o_ptr + line[:, None] * H + h[None, :]
        tl.store(o_at, o.to(o_ptr.dtype.element_ty), there[:, None] & (h < H)[None, :])
        tl.store(lse_ptr + line, tl.where(total > 0.0, top + tl.log2(some), float("-inf")) * LN_2, there)
    if WAIT:
        tl.extra.cuda.gdc_wait()  # whatever comes after this kernel takes the reading for over, too


def slots_of(o_TNH: Tensor, ready: Prepared) -> State:
    """Room for the states of a plan's pieces, for outputs of this width."""
    shape = max(1, ready.capacity.slots), ready.layout.shape.rows, o_TNH.shape[2]
    return State(o_TNH.new_empty(shape, dtype=torch.float32), o_TNH.new_empty(shape[:2], dtype=torch.float32))


def _cut(ready: Prepared, H: int, device: torch.device, *, shared: bool) -> tuple[int, int, int]:
    """(numbers of a row, rows, pieces) that one program merges at once.

    All of a row, and several rows, where there are rows enough, so that all programs have their place beside the
    reading and wait there; as few numbers as the table says where there are few rows. Under fixed cuts always the same,
    for a sum's bits depend on how it is laid out.
    """
    layout, part = ready.layout, triton.next_power_of_2(H)
    least, pieces, lines = min(layout.tiles.part, part), layout.tiles.pieces, ready.capacity.merges
    if layout.chunk is not None:
        # Of a block with a window, rows begin in different chunks: a row's states stand further back in company than
        # alone, and only one by one is that the same sum. They are few, those of a window.
        return least, 1, 1 if layout.shape.window is not None else pieces
    room, together = MERGERS * processors(device), 1
    while part > least and 2 * lines * layout.used * triton.cdiv(H, part) < room:
        part //= 2
    while (
        not shared
        and together < min(MOST_ROWS, layout.used)
        and (lines * triton.cdiv(layout.used, together) * triton.cdiv(H, part) > BESIDE * processors(device))
    ):
        together *= 2
    return part, together, max(1, pieces // together)


def launch(
    state: State,
    slots: State,
    table: PageTable,
    ready: Prepared,
    sinks_N: Tensor | None = None,
    shared: tuple[State, Prepared, Tensor] | None = None,
) -> None:
    """Merge what ``ready`` cut into ``state``; ``shared`` are slots, plan and members of groups with a prefix."""
    if not ready.merges:
        return
    (_, N, H), shape = state.o.shape, ready.layout.shape
    their_slots, theirs, members = shared or (slots, ready, ready.flat)
    used = ready.layout.used
    part, together, pieces = _cut(ready, H, state.o.device, shared=shared is not None)
    tasks = ready.capacity.merges * triton.cdiv(used, together) * triton.cdiv(H, part)
    programs = min(tasks, MERGERS * processors(state.o.device))
    options: dict[str, Any] = {"launch_pdl": True} if ready.overlaps else {}
    merge[programs,](
        *state, *slots, ready.flat, table.cu_queries, slots.lse if sinks_N is None else sinks_N,
        *their_slots, theirs.flat, members, places(ready.capacity)[2], places(theirs.capacity)[2],
        N=N, GROUP=shape.group, H=H, SINKS=sinks_N is not None, WAIT=ready.overlaps,
        ROWS=shape.rows, USED=used,
        SHARED_ROWS=theirs.layout.shape.rows if shared else 0, PIECES=pieces, TOGETHER=together, BLOCK_H=part,
        num_warps=4,
        **options,
    )  # fmt: skip
