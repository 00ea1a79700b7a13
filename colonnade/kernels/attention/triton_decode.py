"""Flash-Decoding over a paged cache: a plan, the kernel that reads by it, and the merge of what it cut.

The plan (:mod:`splits`) is made on the CPU from true lengths, once a step for all layers that look alike, and goes to
the device as one tensor of fixed size, so that a captured graph finds the next step's plan in the same place. What a
line's splits find is merged by a second launch; a line that was not cut needs none, and where no line was, nothing is
launched.

Flash-Decoding for long-context inference (PyTorch blog, 2023). Different here: splits are balanced by work over all
requests and heads at once, not by a number of splits for all; a line's only split writes the output itself; the merge
runs in parallel over rows and width; and whatever sizes, groups and queries there are, splitting stays on.
"""

# pyright: reportCallIssue=false, reportArgumentType=false
# A kernel is launched with more than its signature says, and its constants are plain numbers.

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from colonnade.kernels.attention import held, sdpa, splits, triton_merge, triton_splits
from colonnade.kernels.attention.decode_tiles import Tiles, costs, pick
from colonnade.kernels.attention.pages import PageTable
from colonnade.kernels.attention.split_plan import Capacity, Plan, Shape, places
from colonnade.kernels.softmax_state import State

WIDEST, MOST_QUERIES = 256, 64
"""Heads and numbers of queries that :func:`paged` takes; longer prompts are products, not reading."""
MERGERS = 8
"""Programs that merge, a multiprocessor, at most."""


@dataclass(frozen=True, eq=False)
class Prepared:
    """A plan on the device, and what the kernels are compiled for."""

    flat: Tensor
    """int32, :meth:`split_plan.Plan.flat`."""
    capacity: Capacity
    shape: Shape
    tiles: Tiles

    @property
    def merges(self) -> bool:
        """Whether a merge is launched: in a graph always, since another step's plan may need it."""
        return self.capacity.merges > 0


@dataclass(frozen=True)
class Layout:
    """What is the same in every step: the sizes that plans are made for."""

    shape: Shape
    tiles: Tiles
    width: int
    element_bytes: int
    workers: int
    chunk: int | None

    @staticmethod
    def of(
        q_TNH: Tensor, k_PpKH: Tensor, longest_query: int, *, window: int | None = None, chunk: int | None = None
    ) -> "Layout":
        """For such tensors, and up to ``longest_query`` queries a request.

        With ``chunk`` keys are cut at its multiples only and blocks of rows do not depend on the number of queries:
        a request's numbers are then the same bits whoever else is in the batch.
        """
        (_, N, H), K, size = q_TNH.shape, k_PpKH.shape[2], k_PpKH.element_size()
        rows = min(64, max(16, triton.next_power_of_2(N // K * (1 if chunk else max(1, longest_query)))))
        tiles = pick(rows, H, max(size, q_TNH.element_size()))
        workers = tiles.workers * _processors(q_TNH.device)
        if chunk is not None:
            chunk = -(-chunk // tiles.tile) * tiles.tile
        return Layout(Shape(K, N // K, rows, tiles.tile, window), tiles, H, size, workers, chunk)

    def capacity(self, requests: int, queries: int, context: int) -> Capacity:
        """Of plans for ``requests`` requests of at most so many queries and keys."""
        return Capacity.of(requests, queries, self.shape, self.workers, chunk=self.chunk, context=context)

    def plan(self, lengths: Sequence[int], queries: Sequence[int], *, room: int | None = None, ahead: int = 0) -> Plan:
        """A plan for one step."""
        prices = costs(self.tiles, self.width, self.element_bytes, self.workers)
        return splits.plan(lengths, queries, self.shape, self.workers, prices, chunk=self.chunk, room=room, ahead=ahead)

    def prepare(self, plan: Plan, device: torch.device | str, capacity: Capacity | None = None) -> Prepared:
        """``plan`` on the device, in arrays of its own size or of ``capacity``."""
        room = capacity or plan.capacity
        # Pinned, since another copy would wait until the device has done all that it was given before.
        gpu = torch.device(device).type == "cuda"
        flat = torch.tensor(plan.flat(room), dtype=torch.int32, pin_memory=gpu)
        return Prepared(flat.to(device, non_blocking=gpu), room, self.shape, self.tiles)


def _processors(device: torch.device) -> int:
    # Triton's interpreter, on a CPU, has none; a few show all that can go wrong.
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def attend(
    q_TNH: Tensor,
    k_PpKH: Tensor,
    v_PpKH: Tensor,
    table: PageTable,
    ready: Prepared,
    *,
    cap: float | None = None,
    slopes_N: Tensor | None = None,
    sinks_N: Tensor | None = None,
    scales_K: tuple[Tensor, Tensor] | None = None,
) -> State:
    """The state (o_TNH as q, lse_TN in float32) of the requests in ``table``, following a plan that was made for them.

    Of the table only tensors are read, nothing is asked of the device. A cache of float8 or int8 has ``scales_K``,
    float32, of keys and of values, by which each head's numbers are multiplied. No gradient.
    """
    (T, N, H), (P, page_tokens) = q_TNH.shape, k_PpKH.shape[:2]
    q_TNH, k_PpKH, v_PpKH = (x if x.stride(-1) == 1 else x.contiguous() for x in (q_TNH, k_PpKH, v_PpKH))
    pages_RP = table.pages_RP if table.pages_RP.stride(-1) == 1 else table.pages_RP.contiguous()
    shape, tiles, capacity = ready.shape, ready.tiles, ready.capacity
    state = State(
        torch.empty_like(q_TNH, memory_format=torch.contiguous_format), q_TNH.new_empty(T, N, dtype=torch.float32)
    )
    if not T:
        return state
    slot_o = q_TNH.new_empty(max(1, capacity.slots), shape.rows, H, dtype=torch.float32)
    slot_lse = q_TNH.new_empty(max(1, capacity.slots), shape.rows, dtype=torch.float32)
    _, items_at, merges_at, _ = places(capacity)
    none = slot_lse  # in place of a tensor that is not read
    k_scale_K, v_scale_K = scales_K or (none, none)
    overlap = tiles.overlap and ready.merges
    same = {"N": N, "GROUP": shape.group, "H": H, "SINKS": sinks_N is not None, "ROWS": shape.rows}
    triton_splits.attend[capacity.workers,](
        q_TNH, k_PpKH, v_PpKH, *state, slot_o, slot_lse, ready.flat, pages_RP, table.cu_queries, table.lengths_R,
        none if slopes_N is None else slopes_N, none if sinks_N is None else sinks_N, k_scale_K, v_scale_K,
        *q_TNH.stride()[:2], *k_PpKH.stride()[:3], *v_PpKH.stride()[:3], pages_RP.stride(0), pages_RP.shape[1], P,
        items_at, H**-0.5, 1.0 if cap is None else cap,
        PAGE=page_tokens, WINDOW=shape.window or 0, CAPPED=cap is not None, SLOPES=slopes_N is not None,
        SCALED=scales_K is not None, LAUNCH_NEXT=overlap, TILE=tiles.tile, STAGES=tiles.stages,
        BLOCK_H=max(16, triton.next_power_of_2(H)), num_warps=tiles.warps, **same,
    )  # fmt: skip
    if ready.merges:
        part = min(tiles.part, triton.next_power_of_2(H))
        programs = min(capacity.merges * shape.rows * triton.cdiv(H, part), MERGERS * _processors(q_TNH.device))
        triton_merge.merge[programs,](
            *state, slot_o, slot_lse, ready.flat, table.cu_queries, none if sinks_N is None else sinks_N, merges_at,
            WAIT=overlap, PIECES=tiles.pieces, BLOCK_H=part, num_warps=4, **same,
            **({"launch_pdl": True} if overlap else {}),
        )  # fmt: skip
    return state


def paged(q_TNH: Tensor, k_PpKH: Tensor, v_PpKH: Tensor, table: PageTable, *, window: int | None = None) -> Tensor:
    """o_TNH of requests whose keys lie in pages (see :func:`reference.paged`); wide heads and prompts are SDPA's."""
    if q_TNH.shape[2] > WIDEST or table.longest_query > MOST_QUERIES:
        return sdpa.paged(q_TNH, k_PpKH, v_PpKH, table, window=window)
    return _planned(q_TNH, k_PpKH, v_PpKH, table, window).o


def held_state(q_TNH: Tensor, k_PpKH: Tensor, v_PpKH: Tensor, table: PageTable) -> State:
    """The state of requests of one new token over the keys that a rank holds (see :func:`held.attend`)."""
    if q_TNH.shape[2] > WIDEST:
        return held.attend(q_TNH, k_PpKH, v_PpKH, table)
    return _planned(q_TNH, k_PpKH, v_PpKH, table, None)


def _planned(q_TNH: Tensor, k_PpKH: Tensor, v_PpKH: Tensor, table: PageTable, window: int | None) -> State:
    """By the table's plan, which is made when the first layer of this layout asks."""
    layout = Layout.of(q_TNH, k_PpKH, table.longest_query, window=window)
    if layout not in table.prepared:
        new, lengths = table.host
        room = table.pages_RP.shape[1] * table.page_tokens
        table.prepared[layout] = layout.prepare(layout.plan(lengths, new, room=room), q_TNH.device)
    return attend(q_TNH, k_PpKH, v_PpKH, table, table.prepared[layout])
