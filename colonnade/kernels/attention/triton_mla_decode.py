"""MLA decoding in Triton: each cached latent is key and value of all heads, and read once.

    s_n = q_n·c + p_n·r        o_n = Σ softmax(s_n) c        c the latent, r the rotary key beside it, [c; r] the cache

This is the absorbed form of DeepSeek-V2 (arXiv 2405.04434, section 2.1.2; see ``model/attention.py``): many query heads
attend to one key head whose values are the first RANK elements of its keys. A kernel with separate keys and values
would read everything twice, and compute unused products of r. Here a tile of latents is loaded once and used in two
GEMMs. 128 heads make 242 operations per byte, about the ratio of a GPU's compute to its bandwidth, so blocks have 64
rows if there are as many.

Plans, slots and merge are those of :mod:`~colonnade.kernels.attention.triton_split_kv`; any number of queries.

With SCALED, latents have 8 bits (:mod:`~colonnade.kernels.attention.cache_write`) and are converted exactly to the type
of q in registers; a token's scales multiply its scores and weights instead of its hundreds of elements.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false
# Triton adds launch options to a kernel's signature, and constexpr arguments are plain Python values.

import torch
import triton
from torch import Tensor
from triton import language as tl

from colonnade.kernels.attention.decode_plan import DevicePlan, KernelLayout
from colonnade.kernels.attention.page_table import PageTable
from colonnade.kernels.attention.split_plan import flat_offsets
from colonnade.kernels.attention.triton_merge import allocate_slots, launch_merge
from colonnade.kernels.attention.triton_split_kv import (
    FIELDS,
    block_rows,
    key_offsets,
    load_page_ids,
    modified_scores,
    normalise,
    online_softmax,
    store_state,
    valid_keys,
)
from colonnade.kernels.softmax_state import State


@triton.jit(do_not_specialize=["pages_r", "columns", "pages", "items_at"])
def mla_attend(
    q_ptr, k_ptr, scales_ptr, o_ptr, lse_ptr, slot_o_ptr, slot_lse_ptr, plan_ptr, pages_ptr, cu_ptr, lengths_ptr,
    q_t, q_n, k_page, k_p, scales_page, scales_p, pages_r, columns, pages, items_at, scale,
    N: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr,
    SCALED: tl.constexpr, LAUNCH_MERGE: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, BLOCK_C: tl.constexpr,
    BLOCK_R: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Executes all pieces of one worker."""
    i, x = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_R)
    first_item = tl.load(plan_ptr + 4 + tl.program_id(0))
    end_item = tl.load(plan_ptr + 5 + tl.program_id(0))
    if LAUNCH_MERGE:
        tl.extra.cuda.gdc_launch_dependents()
    for item in range(first_item, end_item):
        at_item = plan_ptr + items_at + item * FIELDS
        request, block, slot = tl.load(at_item), tl.load(at_item + 2), tl.load(at_item + 5)
        t, n, query, row_mask, new = block_rows(cu_ptr, request, 0, block, N, ROWS)
        length = tl.load(lengths_ptr + request)
        position = length - new + query
        low = tl.load(at_item + 3) // TILE * TILE
        high = tl.minimum(tl.load(at_item + 4), length)
        q_at = q_ptr + t.to(tl.int64)[:, None] * q_t + n[:, None] * q_n
        q = tl.load(q_at + i[None, :], row_mask[:, None] & (i < RANK)[None, :], 0.0)
        p = tl.load(q_at + RANK + x[None, :], row_mask[:, None] & (x < ROPE)[None, :], 0.0)
        row_max = tl.full((ROWS,), float("-inf"), tl.float32)
        row_sum = tl.zeros((ROWS,), tl.float32)
        o = tl.zeros((ROWS, BLOCK_C), tl.float32)
        table_ptr = pages_ptr + request.to(tl.int64) * pages_r
        page = load_page_ids(table_ptr, low, columns, PAGE, TILE)
        for at in tl.range(low, high, TILE, num_stages=STAGES):
            j = at + tl.arange(0, TILE)
            page_id = page.to(tl.int64)
            key_mask = valid_keys(page, j, high, pages)
            k_at = k_ptr + key_offsets(page, at, j, k_page, k_p, PAGE, TILE)
            page = load_page_ids(table_ptr, at + TILE, columns, PAGE, TILE)
            if BLOCK_C == RANK:
                c = tl.load(k_at + i[None, :], key_mask[:, None], 0.0)
            else:
                c = tl.load(k_at + i[None, :], key_mask[:, None] & (i < RANK)[None, :], 0.0)
            if BLOCK_R == ROPE:
                r = tl.load(k_at + RANK + x[None, :], key_mask[:, None], 0.0)
            else:
                r = tl.load(k_at + RANK + x[None, :], key_mask[:, None] & (x < ROPE)[None, :], 0.0)
            s = tl.dot(q, tl.trans(c.to(q.dtype)), input_precision="ieee")
            if SCALED:
                scales_at = scales_ptr + page_id * scales_page + j % PAGE * scales_p
                c_scale = tl.load(scales_at, key_mask, 0.0)
                rotary_scores = tl.dot(p, tl.trans(r.to(q.dtype)), input_precision="ieee")
                s = (s * c_scale[None, :] + rotary_scores * tl.load(scales_at + 1, key_mask, 0.0)[None, :]) * scale
            else:
                s = tl.dot(p, tl.trans(r.to(q.dtype)), s, input_precision="ieee") * scale
            s = modified_scores(s, position, j, key_mask, n, row_mask, q_ptr, 1.0, WINDOW, False, False)
            weight, rescale, row_max, row_sum = online_softmax(s, row_max, row_sum, 1.0, 0.0)
            if SCALED:
                weight *= c_scale[None, :]
            o = tl.dot(weight.to(q.dtype), c.to(q.dtype), o * rescale[:, None], input_precision="ieee")
        o, lse = normalise(o, row_max, row_sum, n, row_mask, q_ptr, False)
        store_state(o, lse, slot, t, n, row_mask, o_ptr, lse_ptr, slot_o_ptr, slot_lse_ptr, N, RANK, ROWS, BLOCK_C)


def attend(
    q_TNH: Tensor, k_Pp1H: Tensor, rank: int, table: PageTable, ready: DevicePlan, scales_Pp2: Tensor | None = None
) -> State:
    """The state (o of width ``rank`` as q, lse_TN in float32) of requests with a paged latent cache.

    Scores are divided by the root of the whole width; values are the first ``rank`` elements of the single key head.
    ``scales_Pp2``, float32, are those of 8-bit latents. ``ready`` is a plan of a :meth:`KernelLayout.for_mla`. Reads
    the table's tensors only. No gradient.
    """
    (T, N, H), (P, page_tokens) = q_TNH.shape, k_Pp1H.shape[:2]
    q_TNH, k_Pp1H = (x if x.stride(-1) == 1 else x.contiguous() for x in (q_TNH, k_Pp1H))
    state = State(q_TNH.new_empty(T, N, rank), q_TNH.new_empty(T, N, dtype=torch.float32))
    if not T:
        return state
    pages_RP = table.pages_RP if table.pages_RP.stride(-1) == 1 else table.pages_RP.contiguous()
    shape, tiles = ready.layout.shape, ready.layout.tiles
    slots = allocate_slots(state.o, ready)
    scales = slots.lse if scales_Pp2 is None else scales_Pp2  # stands in for a tensor that is not read
    mla_attend[ready.capacity.workers,](
        q_TNH, k_Pp1H, scales, *state, *slots, ready.flat, pages_RP, table.cu_queries, table.lengths_R,
        *q_TNH.stride()[:2], *k_Pp1H.stride()[:2], *scales.stride()[:2], pages_RP.stride(0), pages_RP.shape[1], P,
        flat_offsets(ready.capacity)[1], H**-0.5, N=N, RANK=rank, ROPE=H - rank, PAGE=page_tokens,
        WINDOW=shape.window or 0, SCALED=scales_Pp2 is not None, LAUNCH_MERGE=ready.overlaps_merge, ROWS=shape.rows,
        TILE=tiles.tile, STAGES=tiles.stages, BLOCK_C=max(16, triton.next_power_of_2(rank)),
        BLOCK_R=max(16, triton.next_power_of_2(H - rank)), num_warps=tiles.warps,
    )  # fmt: skip
    launch_merge(state, slots, table, ready)
    return state


def paged_state(
    q_TNH: Tensor,
    k_Pp1H: Tensor,
    rank: int,
    table: PageTable,
    *,
    window: int | None = None,
    scales_Pp2: Tensor | None = None,
) -> State:
    """The state (o_TNz with z = ``rank``, lse_TN) of requests with a paged latent cache."""
    key = "latent", q_TNH.shape[1], rank, q_TNH.dtype, k_Pp1H.dtype, window
    if key not in table.plan_cache:
        new, lengths = table.host_lengths
        layout = KernelLayout.for_mla(q_TNH, k_Pp1H, table.longest_query, window=window)
        plan = layout.plan(lengths, new, max_keys=table.max_keys)
        table.plan_cache[key] = (layout.prepare(plan, q_TNH.device),)
    return attend(q_TNH, k_Pp1H, rank, table, *table.plan_cache[key], scales_Pp2)
