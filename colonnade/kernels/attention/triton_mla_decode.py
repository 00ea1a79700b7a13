"""Latent attention's decoding in Triton: one cached vector a token is key and value of all heads, and is read once.

    s_n = q_n·c + p_n·r        o_n = Σ softmax(s_n) c        c the latent, r the rotary key beside it, [c; r] the cache

which is the absorbed form of DeepSeek-V2 (arXiv 2405.04434, section 2.1.2; see ``model/attention.py``): attention of
many query heads on one key head whose values are the first RANK numbers of its keys. A kernel that takes keys and
values apart reads everything twice, and multiplies numbers of r that nobody asked for. Here a tile of latents comes
once and is multiplied twice. 128 heads make 242 operations a byte, about what a GPU can do in the time that it reads
one: reading and matrix units are busy alike, so that blocks have 64 rows where there are as many.

The same plans, slots and merge as :mod:`~colonnade.kernels.attention.triton_split_kv`; any number of queries.

SCALED, latents have 8 bits (:mod:`~colonnade.kernels.attention.cache_write`), and are widened to the type of q in
registers, where every one of their values has its place; a token's scales multiply its scores and its weight, and not
its hundreds of numbers.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false
# A kernel is launched with more than its signature says, and its constants are plain numbers.

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
    SCALED: tl.constexpr, LAUNCH_NEXT: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, BLOCK_C: tl.constexpr,
    BLOCK_R: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """All pieces of one worker."""
    i, x = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_R)
    first_item = tl.load(plan_ptr + 4 + tl.program_id(0))
    end_item = tl.load(plan_ptr + 5 + tl.program_id(0))
    if LAUNCH_NEXT:
        tl.extra.cuda.gdc_launch_dependents()
    for item in range(first_item, end_item):
        at_item = plan_ptr + items_at + item * FIELDS
        request, block, slot = tl.load(at_item), tl.load(at_item + 2), tl.load(at_item + 5)
        t, n, query, there, new = block_rows(cu_ptr, request, 0, block, N, ROWS)
        length = tl.load(lengths_ptr + request)
        position = length - new + query
        low = tl.load(at_item + 3) // TILE * TILE
        high = tl.minimum(tl.load(at_item + 4), length)
        q_at = q_ptr + t.to(tl.int64)[:, None] * q_t + n[:, None] * q_n
        q = tl.load(q_at + i[None, :], there[:, None] & (i < RANK)[None, :], 0.0)
        p = tl.load(q_at + RANK + x[None, :], there[:, None] & (x < ROPE)[None, :], 0.0)
        top = tl.full((ROWS,), float("-inf"), tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        o = tl.zeros((ROWS, BLOCK_C), tl.float32)
        table_ptr = pages_ptr + request.to(tl.int64) * pages_r
        page = load_page_ids(table_ptr, low, columns, PAGE, TILE)
        for at in tl.range(low, high, TILE, num_stages=STAGES):
            j = at + tl.arange(0, TILE)
            number = page.to(tl.int64)
            known = valid_keys(page, j, high, pages)
            k_at = k_ptr + key_offsets(page, at, j, k_page, k_p, PAGE, TILE)
            page = load_page_ids(table_ptr, at + TILE, columns, PAGE, TILE)
            if BLOCK_C == RANK:
                c = tl.load(k_at + i[None, :], known[:, None], 0.0)
            else:
                c = tl.load(k_at + i[None, :], known[:, None] & (i < RANK)[None, :], 0.0)
            if BLOCK_R == ROPE:
                r = tl.load(k_at + RANK + x[None, :], known[:, None], 0.0)
            else:
                r = tl.load(k_at + RANK + x[None, :], known[:, None] & (x < ROPE)[None, :], 0.0)
            s = tl.dot(q, tl.trans(c.to(q.dtype)), input_precision="ieee")
            if SCALED:
                scales_at = scales_ptr + number * scales_page + j % PAGE * scales_p
                c_scale = tl.load(scales_at, known, 0.0)
                turned = tl.dot(p, tl.trans(r.to(q.dtype)), input_precision="ieee")
                s = (s * c_scale[None, :] + turned * tl.load(scales_at + 1, known, 0.0)[None, :]) * scale
            else:
                s = tl.dot(p, tl.trans(r.to(q.dtype)), s, input_precision="ieee") * scale
            s = modified_scores(s, position, j, known, n, there, q_ptr, 1.0, WINDOW, False, False)
            weight, shrink, top, total = online_softmax(s, top, total, 1.0, 0.0)
            if SCALED:
                weight *= c_scale[None, :]
            o = tl.dot(weight.to(q.dtype), c.to(q.dtype), o * shrink[:, None], input_precision="ieee")
        o, lse = normalise(o, top, total, n, there, q_ptr, False)
        store_state(o, lse, slot, t, n, there, o_ptr, lse_ptr, slot_o_ptr, slot_lse_ptr, N, RANK, ROWS, BLOCK_C)


def attend(
    q_TNH: Tensor, k_Pp1H: Tensor, rank: int, table: PageTable, ready: DevicePlan, scales_Pp2: Tensor | None = None
) -> State:
    """The state (o of ``rank`` numbers a head as q, lse_TN in float32) of requests whose latents lie in pages.

    Scores are divided by the root of the whole width; values are the first ``rank`` numbers of the one key head.
    ``scales_Pp2``, float32, are those of latents of 8 bits.
    ``ready`` is of a :meth:`KernelLayout.for_mla`. Of the table only tensors are read. No gradient.
    """
    (T, N, H), (P, page_tokens) = q_TNH.shape, k_Pp1H.shape[:2]
    q_TNH, k_Pp1H = (x if x.stride(-1) == 1 else x.contiguous() for x in (q_TNH, k_Pp1H))
    state = State(q_TNH.new_empty(T, N, rank), q_TNH.new_empty(T, N, dtype=torch.float32))
    if not T:
        return state
    pages_RP = table.pages_RP if table.pages_RP.stride(-1) == 1 else table.pages_RP.contiguous()
    shape, tiles = ready.layout.shape, ready.layout.tiles
    slots = allocate_slots(state.o, ready)
    scales = slots.lse if scales_Pp2 is None else scales_Pp2  # in place of a tensor that is not read
    mla_attend[ready.capacity.workers,](
        q_TNH, k_Pp1H, scales, *state, *slots, ready.flat, pages_RP, table.cu_queries, table.lengths_R,
        *q_TNH.stride()[:2], *k_Pp1H.stride()[:2], *scales.stride()[:2], pages_RP.stride(0), pages_RP.shape[1], P,
        flat_offsets(ready.capacity)[1], H**-0.5, N=N, RANK=rank, ROPE=H - rank, PAGE=page_tokens,
        WINDOW=shape.window or 0, SCALED=scales_Pp2 is not None, LAUNCH_NEXT=ready.overlaps, ROWS=shape.rows,
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
    """The state (o_TNz, z being ``rank`` numbers, lse_TN) of requests whose latents lie in pages."""
    key = "latent", q_TNH.shape[1], rank, q_TNH.dtype, k_Pp1H.dtype, window
    if key not in table.plan_cache:
        new, lengths = table.host_lengths
        layout = KernelLayout.for_mla(q_TNH, k_Pp1H, table.longest_query, window=window)
        plan = layout.plan(lengths, new, max_keys=table.max_keys)
        table.plan_cache[key] = (layout.prepare(plan, q_TNH.device),)
    return attend(q_TNH, k_Pp1H, rank, table, *table.plan_cache[key], scales_Pp2)
