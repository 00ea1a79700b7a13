"""Flash-Decoding over a paged cache: a plan, the kernels that read by it, and the merge of what it cut.

The plan (:mod:`~colonnade.kernels.attention.split_planner`) is made on the CPU from true lengths, once a step for all
layers that look alike (:mod:`~colonnade.kernels.attention.decode_plan`). What a line's splits find is merged by a
second launch; a line that was not cut needs none, and where no line was, nothing is launched. Requests of few rows,
such as decodes, and of many, such as chunks of prompts, are read by one kernel each, in the same step; requests that
share a prefix read it together first (:mod:`cascade`).

Flash-Decoding for long-context inference (PyTorch blog, 2023). Different here: splits are balanced by work over all
requests and heads at once, not by a number of splits for all; a line's only split writes the output itself; the merge
runs in parallel over rows and width; and whatever sizes, groups and queries there are, splitting stays on.
"""

# pyright: reportCallIssue=false, reportArgumentType=false
# A kernel is launched with more than its signature says, and its constants are plain numbers.

from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from colonnade.kernels.attention import (
    cuda_decode,
    sdpa,
    sharded_cache,
    triton_kv8,
    triton_mla_decode,
    triton_prefill,
    triton_split_kv,
)
from colonnade.kernels.attention.decode_plan import DevicePlan, KernelLayout, Kernels, is_decode
from colonnade.kernels.attention.decode_tiles import Tiles
from colonnade.kernels.attention.page_table import PageTable
from colonnade.kernels.attention.split_plan import flat_offsets
from colonnade.kernels.attention.triton_merge import allocate_slots, launch_merge
from colonnade.kernels.softmax_state import State

MAX_HEAD_DIM = 256
"""Heads that :func:`paged` takes."""
MAX_REGISTERS = 168
"""Of a thread, at most, where a page is one tile: there the compiler would take 250, and two such workers leave no room
for the merge to begin beside them, which costs a long request 10%."""


def attend(
    q_TNH: Tensor,
    k_PpKH: Tensor,
    v_PpKH: Tensor,
    table: PageTable,
    ready: DevicePlan,
    *,
    cap: float | None = None,
    slopes_N: Tensor | None = None,
    sinks_N: Tensor | None = None,
    scales_K: tuple[Tensor, Tensor] | None = None,
    into: State | None = None,
) -> State:
    """The state (o_TNH as q, lse_TN in float32) of the requests in ``table``, following a plan that was made for them.

    Of the table only tensors are read, nothing is asked of the device. A cache of float8 or int8 has ``scales_K``,
    float32, of keys and of values, by which each head's numbers are multiplied. Requests that the plan leaves out keep
    what ``into`` holds. No gradient.
    """
    T, N, _ = q_TNH.shape
    q_TNH, k_PpKH, v_PpKH = (x if x.stride(-1) == 1 else x.contiguous() for x in (q_TNH, k_PpKH, v_PpKH))
    layout, shared = ready.layout, ready.shared
    state = into or State(
        torch.empty_like(q_TNH, memory_format=torch.contiguous_format), q_TNH.new_empty(T, N, dtype=torch.float32)
    )
    if not T:
        return state
    bends = (cap, slopes_N, sinks_N, scales_K, layout.shape.window)
    if layout.cuda and shared is None and layout.chunk is None:
        cuda_decode.attend(q_TNH, k_PpKH, v_PpKH, state, None, table, ready, bends)
        return state
    slots, theirs = allocate_slots(state.o, ready), None
    _launch_attend(q_TNH, k_PpKH, v_PpKH, state, slots, table, ready, bends, ready.flat, None)
    if shared is not None:
        theirs = allocate_slots(state.o, shared.ready), shared.ready, shared.members
        groups = ready, shared.capacity.offsets[0]
        _launch_attend(q_TNH, k_PpKH, v_PpKH, state, theirs[0], table, shared.ready, bends, shared.members, groups)
    launch_merge(state, slots, table, ready, sinks_N, theirs)
    return state


def _launch_attend(
    q_TNH: Tensor,
    k_PpKH: Tensor,
    v_PpKH: Tensor,
    state: State,
    slots: State,
    table: PageTable,
    ready: DevicePlan,
    bends: tuple[float | None, Tensor | None, Tensor | None, tuple[Tensor, Tensor] | None, int | None],
    members: Tensor,
    groups: tuple[DevicePlan, int] | None,
) -> None:
    """All pieces of a plan. With ``groups`` its requests are groups: what was launched before, beside which they are
    read, and where they begin in ``members``.
    """
    if ready.layout.cuda:
        cuda_decode.attend(q_TNH, k_PpKH, v_PpKH, state, slots, table, ready, bends)
        return
    (_, N, H), (P, page_tokens) = q_TNH.shape, k_PpKH.shape[:2]
    pages_RP = table.pages_RP if table.pages_RP.stride(-1) == 1 else table.pages_RP.contiguous()
    layout = ready.layout
    shape, tiles = layout.shape, layout.tiles
    cap, slopes_N, sinks_N, scales_K, window = bends
    eight = None if layout.many else triton_kv8.kv8_kind(q_TNH, k_PpKH, v_PpKH)
    if eight:
        k_PpKH, v_PpKH = k_PpKH.view(torch.int16), v_PpKH.view(torch.int16)
    none = slots.lse  # in place of a tensor that is not read
    tensors = (
        q_TNH, k_PpKH, v_PpKH, *state, *slots, ready.flat, pages_RP, table.cu_queries, table.lengths_R,
        none if slopes_N is None else slopes_N, none if sinks_N is None else sinks_N, *(scales_K or (none, none)),
    )  # fmt: skip
    strides = (*q_TNH.stride()[:2], *k_PpKH.stride()[:3], *v_PpKH.stride()[:3], pages_RP.stride(0), pages_RP.shape[1])
    numbers = H**-0.5, 1.0 if cap is None else cap
    _, items_at, _, firsts_at, _ = flat_offsets(ready.capacity)
    # One sum of addresses for both spares instructions where each key has one of its own.
    alike = page_tokens % tiles.tile != 0 and k_PpKH.stride() == v_PpKH.stride()
    constants: dict[str, Any] = {
        "N": N, "GROUP": shape.group, "H": H, "PAGE": page_tokens, "WINDOW": window or 0, "CAPPED": cap is not None,
        "SLOPES": slopes_N is not None, "SINKS": sinks_N is not None, "SCALED": scales_K is not None,
        "ALIKE": alike, "ROWS": shape.rows, "TILE": tiles.tile, "STAGES": tiles.stages,
        "BLOCK_H": max(16, triton.next_power_of_2(H)), "num_warps": tiles.warps,
    }  # fmt: skip
    if layout.many:
        before, groups_at = groups or (ready, 0)  # of many rows nothing overlaps
        rows = [tma_descriptor(q_TNH, x, tiles.tile) for x in (k_PpKH, v_PpKH)]
        engine = all(rows)
        triton_prefill.attend[ready.capacity.workers,](
            *tensors, members, *(rows if engine else (none, none)), *strides, P, items_at, firsts_at, groups_at,
            *numbers, LISTED=groups is not None, COPIED=engine, BESIDE=before.overlaps, **constants, **before.early,
        )  # fmt: skip
    else:
        if eight:
            constants |= {"EIGHT": eight, "ASM": q_TNH.is_cuda}  # the interpreter has no assembler
        triton_split_kv.attend[ready.capacity.workers,](
            *tensors, *strides, P, items_at, firsts_at, *numbers, LAUNCH_NEXT=ready.overlaps,
            SINGLE=table.longest_query == 1 and len(q_TNH) == len(table.lengths_R),
            CHUNK=layout.chunk if layout.runs else 0, **constants,
            **prefetch_options(shape.rows, tiles, page_tokens, eight=bool(eight)),
        )  # fmt: skip


def prefetch_options(rows: int, tiles: Tiles, page_tokens: int, *, eight: bool) -> dict[str, Any]:
    """What a launch is told of how pieces of blocks of so many rows begin, and of the registers that leaves.

    Caches of 8 bits, whose loop has most to do, were 5 to 9% slower with the next piece at hand.
    """
    ahead = rows == 16 and not eight
    limit = ahead and tiles.workers == 2 and page_tokens == tiles.tile
    return {"AHEAD": ahead} | ({"maxnreg": MAX_REGISTERS} if limit else {})


def tma_descriptor(q_TNH: Tensor, x_PpKH: Tensor, tile: int) -> TensorDescriptor | None:
    """A cache as rows of all heads of a token, for the copy engine; None where a page does not hold whole tiles, or
    heads are not as wide as a block, or numbers not those of the queries.
    """
    P, page_tokens, K, H = x_PpKH.shape
    whole = page_tokens % tile == 0 and max(16, triton.next_power_of_2(H)) == H and 0 < P * page_tokens < 2**31
    alike = x_PpKH.dtype == q_TNH.dtype and x_PpKH.element_size() == 2
    if not (whole and alike and x_PpKH.is_contiguous()) or x_PpKH.data_ptr() % 16:
        return None
    return TensorDescriptor.from_tensor(x_PpKH.view(P * page_tokens, K * H), [tile, H])


def paged(
    q_TNH: Tensor,
    k_PpKH: Tensor,
    v_PpKH: Tensor,
    table: PageTable,
    *,
    window: int | None = None,
    values: int | None = None,
    scales_Pp2: Tensor | None = None,
    kernels: Kernels = "triton",
) -> Tensor:
    """o_TNH of requests whose keys lie in pages (see :func:`reference.paged`); heads over 256 wide are SDPA's.

    But those of latent attention, whose one head is key and value in one, may have any width. With ``kernels`` "auto"
    requests of few rows are read by the kernel in CUDA C++ where it takes them.
    """
    if v_PpKH is k_PpKH and k_PpKH.shape[2] == 1 and values is not None:
        return triton_mla_decode.paged_state(q_TNH, k_PpKH, values, table, window=window, scales_Pp2=scales_Pp2).o
    assert scales_Pp2 is None, "8 bits with a scale a token are for latents"
    if q_TNH.shape[2] > MAX_HEAD_DIM:
        return sdpa.paged(q_TNH, k_PpKH, v_PpKH, table, window=window, values=values)
    return _planned_attention(q_TNH, k_PpKH, v_PpKH, table, window, kernels).o[..., :values]


def sharded_state(
    q_TNH: Tensor,
    k_PpKH: Tensor,
    v_PpKH: Tensor,
    table: PageTable,
    *,
    values: int | None = None,
    scales_Pp2: Tensor | None = None,
) -> State:
    """The state of requests of one new token over the keys that a rank holds (see :func:`sharded_cache.attend`)."""
    if v_PpKH is k_PpKH and k_PpKH.shape[2] == 1 and values is not None:
        return triton_mla_decode.paged_state(q_TNH, k_PpKH, values, table, scales_Pp2=scales_Pp2)
    assert scales_Pp2 is None, "8 bits with a scale a token are for latents"
    if q_TNH.shape[2] > MAX_HEAD_DIM:
        return sharded_cache.attend(q_TNH, k_PpKH, v_PpKH, table, values=values)
    o_TNH, lse_TN = _planned_attention(q_TNH, k_PpKH, v_PpKH, table, None, "auto")
    return State(o_TNH[..., :values], lse_TN)


def _planned_attention(
    q_TNH: Tensor, k_PpKH: Tensor, v_PpKH: Tensor, table: PageTable, window: int | None, kernels: Kernels
) -> State:
    """By the table's plans, which are made when the first such layer asks."""
    key = q_TNH.shape[1], k_PpKH.shape[2], q_TNH.shape[2], q_TNH.dtype, k_PpKH.dtype, window, kernels
    if key not in table.plan_cache:
        table.plan_cache[key] = make_plans(q_TNH, k_PpKH, table, window, kernels)
    first, *rest = table.plan_cache[key]
    state = attend(q_TNH, k_PpKH, v_PpKH, table, first)
    for ready in rest:
        state = attend(q_TNH, k_PpKH, v_PpKH, table, ready, into=state)
    return state


def make_plans(
    q_TNH: Tensor, k_PpKH: Tensor, table: PageTable, window: int | None, kernels: Kernels = "auto"
) -> tuple[DevicePlan, ...]:
    """Plans for the requests of few rows and for those of many, on the device; either may be missing.

    Raises CapacityError where a request is longer than its table.
    """
    new, lengths = table.host_lengths
    group, device = q_TNH.shape[1] // k_PpKH.shape[2], q_TNH.device
    max_keys = table.max_keys
    some = [count if is_decode(count, group) else 0 for count in new]
    many = [count - small for count, small in zip(new, some, strict=True)]
    made: list[DevicePlan] = []
    if any(some) or not any(many):
        longest = max(some, default=1)
        layout = KernelLayout.of(q_TNH, k_PpKH, longest, window=window, shares=table.share, kernels=kernels)
        made.append(_make_plan(layout, table, lengths, some, max_keys, device))
    if any(many):
        layout = KernelLayout.for_prefill(q_TNH, k_PpKH, window=window)
        made.append(_make_plan(layout, table, lengths, many, max_keys, device))
    return tuple(made)


def _make_plan(
    layout: KernelLayout,
    table: PageTable,
    lengths: Sequence[int],
    queries: list[int],
    max_keys: int,
    device: torch.device,
) -> DevicePlan:
    tables = table.host_pages if layout.shared is not None and len(lengths) > 1 else None
    plan = layout.plan(lengths, queries, max_keys=max_keys, tables=tables, page_tokens=table.page_tokens)
    return layout.prepare(plan, device)
