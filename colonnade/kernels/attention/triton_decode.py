"""Flash-Decoding over a paged cache: plans, kernel launches, and the merge of split lines.

Plans (:mod:`~colonnade.kernels.attention.split_planner`) are made on the CPU from true lengths, once per step for all
layers with the same layout (:mod:`~colonnade.kernels.attention.decode_plan`). The states of split lines are merged by a
second launch; lines that were not split need none, and if there are none nothing is launched. Within a
step, requests with few rows (decodes) and requests with many (prompt chunks) use separate kernels; shared prefixes are
read first (:mod:`cascade`).

See "Flash-Decoding for long-context inference" (PyTorch blog, 2023). Unlike there, splits are balanced over all
requests and heads instead of one number of splits for all, unsplit lines write the output directly, and the merge is
parallel over rows and width.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from colonnade.kernels.attention import (
    cross,
    cuda_decode,
    reference,
    sdpa,
    triton_kv8,
    triton_mla_decode,
    triton_prefill,
    triton_split_kv,
)
from colonnade.kernels.attention.decode_plan import DevicePlan, KernelLayout, Kernels, is_decode
from colonnade.kernels.attention.decode_tiles import Tiles
from colonnade.kernels.attention.page_table import PageTable
from colonnade.kernels.attention.split_plan import flat_offsets
from colonnade.kernels.attention.triton_args import Batch, Cache, Config, Mods, Output, Queries
from colonnade.kernels.attention.triton_merge import allocate_slots, launch_merge
from colonnade.kernels.softmax_state import State
from colonnade.kernels.triton_constants import constexprs

MAX_HEAD_DIM = 256
"""The widest heads that :func:`paged` supports."""
MAX_REGISTERS = 168
"""Register limit per thread if a page is one tile: the compiler would use 250, and two such workers leave no room for
the overlapped merge, which costs a long request 10%."""


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
    near_RN: Tensor | None = None,
    into: State | None = None,
) -> State:
    """The state (o_TNH as q, lse_TN in float32) of the requests in ``table``, following their plan.

    Reads the table's tensors only, without a device synchronisation. A float8 or int8 cache may have ``scales_K``,
    float32 per-head scales of keys and of values. ``near_RN`` are relative biases (:mod:`cross`). Requests that are not
    in the plan keep the contents of ``into``. No gradient.
    """
    T, N, _ = q_TNH.shape
    q_TNH, k_PpKH, v_PpKH = (x if x.stride(-1) == 1 else x.contiguous() for x in (q_TNH, k_PpKH, v_PpKH))
    layout, shared = ready.layout, ready.shared
    state = into or State(
        torch.empty_like(q_TNH, memory_format=torch.contiguous_format), q_TNH.new_empty(T, N, dtype=torch.float32)
    )
    if not T:
        return state
    near_RN = None if near_RN is None else near_RN.contiguous()
    score_mods = (cap, slopes_N, sinks_N, scales_K, layout.shape.window, near_RN)
    if near_RN is None and ready.short_keys is not None and table.longest_query == 1 and len(table.lengths_R) == T:
        cuda_decode.attend_short(q_TNH, k_PpKH, v_PpKH, state, table, ready.short_keys, score_mods)
        return state
    if layout.cuda and shared is None:
        cuda_decode.attend(q_TNH, k_PpKH, v_PpKH, state, None, table, ready, score_mods)
        return state
    slots, shared_slots = allocate_slots(state.o, ready), None
    _launch_attend(q_TNH, k_PpKH, v_PpKH, state, slots, table, ready, score_mods, ready.flat, None)
    if shared is not None:
        shared_slots = allocate_slots(state.o, shared.ready), shared.ready, shared.members
        groups = ready, shared.capacity.offsets[0]
        _launch_attend(
            q_TNH, k_PpKH, v_PpKH, state, shared_slots[0], table, shared.ready, score_mods, shared.members, groups
        )
    launch_merge(state, slots, table, ready, sinks_N, shared_slots)
    return state


def _launch_attend(
    q_TNH: Tensor,
    k_PpKH: Tensor,
    v_PpKH: Tensor,
    state: State,
    slots: State,
    table: PageTable,
    ready: DevicePlan,
    score_mods: cuda_decode.ScoreMods,
    members: Tensor,
    groups: tuple[DevicePlan, int] | None,
) -> None:
    """Executes all pieces of a plan.

    With ``groups`` the plan's requests are groups: the plan that is launched before it, with which it overlaps, and the
    offset of the groups in ``members``.
    """
    if ready.layout.cuda:
        cuda_decode.attend(q_TNH, k_PpKH, v_PpKH, state, slots, table, ready, score_mods)
        return
    (_, N, H), (P, page_tokens) = q_TNH.shape, k_PpKH.shape[:2]
    pages_RP = table.pages_RP if table.pages_RP.stride(-1) == 1 else table.pages_RP.contiguous()
    layout = ready.layout
    shape, tiles = layout.shape, layout.tiles
    cap, slopes_N, sinks_N, scales_K, window, near_RN = score_mods
    kv8 = None if layout.prefill else triton_kv8.kv8_kind(q_TNH, k_PpKH, v_PpKH)
    if kv8:
        k_PpKH, v_PpKH = k_PpKH.view(torch.int16), v_PpKH.view(torch.int16)
    none = slots.lse  # placeholder for tensors that are not read
    strides = q_TNH.stride(), k_PpKH.stride(), v_PpKH.stride()
    none_or = lambda x: none if x is None else x  # noqa: E731
    arguments = (
        Queries(q_TNH, *strides[0][:2]), Cache(k_PpKH, *strides[1][:3]), Cache(v_PpKH, *strides[2][:3]),
        Output(*state, *slots), ready.flat,
        Batch(pages_RP, table.cu_queries, table.lengths_R, members if layout.prefill else None),
        Mods(
            H**-0.5, 1.0 if cap is None else cap, none_or(slopes_N), none_or(sinks_N), *(scales_K or (none, none)),
            none_or(near_RN),
        ),
    )  # fmt: skip
    _, items_at, _, firsts_at, _ = flat_offsets(ready.capacity)
    offsets = (pages_RP.stride(0), pages_RP.shape[1], P, items_at, firsts_at)
    # One address computation for both saves instructions if every key has its own page lookup.
    same_strides = page_tokens % tiles.tile != 0 and k_PpKH.stride() == v_PpKH.stride()
    config = Config(
        N, shape.group, H, max(16, triton.next_power_of_2(H)), page_tokens, shape.rows, tiles.tile, tiles.stages,
        window or 0, cap is not None, slopes_N is not None, sinks_N is not None, scales_K is not None,
        0 if near_RN is None else len(near_RN) // 2, same_strides,
    )  # fmt: skip
    if layout.prefill:
        before, groups_at = groups or (ready, 0)  # the prefill kernel does not overlap
        rows = [tma_descriptor(q_TNH, x, tiles.tile) for x in (k_PpKH, v_PpKH)]
        use_tma = all(rows)
        config = config._replace(GROUPED=groups is not None, TMA=use_tma, OVERLAP=before.overlaps_merge)
        triton_prefill.attend[ready.capacity.workers,](
            *arguments, *(rows if use_tma else (none, none)), *offsets, groups_at, constexprs(config),
            num_warps=tiles.warps, **before.pdl_options,
        )  # fmt: skip
    else:
        options = prefetch_options(shape.rows, tiles, page_tokens, kv8=bool(kv8))
        config = config._replace(
            LAUNCH_MERGE=ready.overlaps_merge, SINGLE=table.longest_query == 1 and len(q_TNH) == len(table.lengths_R),
            KV8=kv8, ASM=q_TNH.is_cuda,  # the interpreter has no inline assembly
            CHUNK=layout.chunk or 0 if layout.runs else 0, PREFETCH=options.pop("PREFETCH"),
        )  # fmt: skip
        triton_split_kv.attend[ready.capacity.workers,](
            *arguments, *offsets, constexprs(config), num_warps=tiles.warps, **options
        )


def prefetch_options(rows: int, tiles: Tiles, page_tokens: int, *, kv8: bool) -> dict[str, Any]:
    """Launch options: whether a piece prefetches the next one, and the register limit that this allows.

    With prefetching, 8-bit caches, whose loop does the most work, were 5 to 9% slower.
    """
    prefetch = rows == 16 and not kv8
    limit = prefetch and tiles.workers == 2 and page_tokens == tiles.tile
    return {"PREFETCH": prefetch} | ({"maxnreg": MAX_REGISTERS} if limit else {})


def tma_descriptor(q_TNH: Tensor, x_PpKH: Tensor, tile: int) -> TensorDescriptor | None:
    """A TMA descriptor of a cache as (tokens, heads · width).

    None if pages do not hold whole tiles, heads are padded, or the dtype differs from the queries'.
    """
    P, page_tokens, K, H = x_PpKH.shape
    whole_tiles = page_tokens % tile == 0 and max(16, triton.next_power_of_2(H)) == H and 0 < P * page_tokens < 2**31
    same_strides = x_PpKH.dtype == q_TNH.dtype and x_PpKH.element_size() == 2
    if not (whole_tiles and same_strides and x_PpKH.is_contiguous()) or x_PpKH.data_ptr() % 16:
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
    """o_TNH of requests with a paged KV cache (see :func:`reference.paged`); heads wider than 256 use SDPA.

    MLA heads, whose single key head is also the value, may have any width. With ``kernels`` "auto" the CUDA C++ kernel
    reads requests of few rows where it is supported and faster.
    """
    if v_PpKH is k_PpKH and k_PpKH.shape[2] == 1 and values is not None:
        return triton_mla_decode.paged_state(q_TNH, k_PpKH, values, table, window=window, scales_Pp2=scales_Pp2).o
    assert scales_Pp2 is None, "8 bits with one scale per token are for latents"
    if q_TNH.shape[2] > MAX_HEAD_DIM:
        return sdpa.paged(q_TNH, k_PpKH, v_PpKH, table, window=window, values=values)
    return _planned_attention(q_TNH, k_PpKH, v_PpKH, table, window, kernels).o[..., :values]


def relative_paged(q_TNH: Tensor, k_PpKH: Tensor, v_PpKH: Tensor, table: PageTable, near_RN: Tensor) -> Tensor:
    """o_TNH with relative biases (see :func:`cross.relative_paged_reference`); heads wider than 256 use SDPA."""
    if q_TNH.shape[2] > MAX_HEAD_DIM:
        return cross.relative_paged_sdpa(q_TNH, k_PpKH, v_PpKH, table, near_RN)
    return _planned_attention(q_TNH, k_PpKH, v_PpKH, table, None, "triton", near_RN).o


def sharded_state(
    q_TNH: Tensor,
    k_PpKH: Tensor,
    v_PpKH: Tensor,
    table: PageTable,
    *,
    values: int | None = None,
    scales_Pp2: Tensor | None = None,
) -> State:
    """The state of one-token requests over this rank's keys (see :func:`reference.sharded`)."""
    if v_PpKH is k_PpKH and k_PpKH.shape[2] == 1 and values is not None:
        return triton_mla_decode.paged_state(q_TNH, k_PpKH, values, table, scales_Pp2=scales_Pp2)
    assert scales_Pp2 is None, "8 bits with one scale per token are for latents"
    if q_TNH.shape[2] > MAX_HEAD_DIM:
        return reference.sharded(q_TNH, k_PpKH, v_PpKH, table, values=values)
    o_TNH, lse_TN = _planned_attention(q_TNH, k_PpKH, v_PpKH, table, None, "auto")
    return State(o_TNH[..., :values], lse_TN)


def _planned_attention(
    q_TNH: Tensor,
    k_PpKH: Tensor,
    v_PpKH: Tensor,
    table: PageTable,
    window: int | None,
    kernels: Kernels,
    near_RN: Tensor | None = None,
) -> State:
    """Follows the table's plans, which the first layer of this layout makes."""
    key = q_TNH.shape[1], k_PpKH.shape[2], q_TNH.shape[2], q_TNH.dtype, k_PpKH.dtype, window, kernels
    if key not in table.plan_cache:
        table.plan_cache[key] = make_plans(q_TNH, k_PpKH, table, window, kernels)
    first, *rest = table.plan_cache[key]
    state = attend(q_TNH, k_PpKH, v_PpKH, table, first, near_RN=near_RN)
    for ready in rest:
        state = attend(q_TNH, k_PpKH, v_PpKH, table, ready, near_RN=near_RN, into=state)
    return state


def make_plans(
    q_TNH: Tensor, k_PpKH: Tensor, table: PageTable, window: int | None, kernels: Kernels = "auto"
) -> tuple[DevicePlan, ...]:
    """Plans for the decode-like requests and for the prefill-like ones, on the device; either may be missing.

    Raises CapacityError if a request is longer than its table.
    """
    new, lengths = table.host_lengths
    group, device = q_TNH.shape[1] // k_PpKH.shape[2], q_TNH.device
    max_keys = table.max_keys
    decode_queries = [count if is_decode(count, group) else 0 for count in new]
    prefill_queries = [count - small for count, small in zip(new, decode_queries, strict=True)]
    plans: list[DevicePlan] = []
    if any(decode_queries) or not any(prefill_queries):
        longest = max(decode_queries, default=1)
        layout = KernelLayout.of(q_TNH, k_PpKH, longest, window=window, shares=table.share, kernels=kernels)
        plans.append(_make_plan(layout, table, lengths, decode_queries, max_keys, device))
    if any(prefill_queries):
        layout = KernelLayout.for_prefill(q_TNH, k_PpKH, window=window)
        plans.append(_make_plan(layout, table, lengths, prefill_queries, max_keys, device))
    return tuple(plans)


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
