"""MLA decoding in Triton: each cached latent is key and value of all heads, and read once.

    s_n = q_n·c + p_n·r        o_n = Σ softmax(s_n) c        c the latent, r its rotary key, [c; r] the cache

This is the absorbed form of DeepSeek-V2 (arXiv 2405.04434, section 2.1.2; see ``model/attention.py``): many query heads
attend to one key head whose values are the first RANK elements of its keys. A kernel with separate keys and values
would read everything twice, and compute unused products of r. Here a tile of latents is loaded once and used in two
GEMMs. With 128 heads it takes 242 operations per byte, about the ratio of a GPU's compute to its bandwidth, so blocks
have up to 64 rows.

Up to 16 rows of 16-bit latents use the CUDA C++ kernel where it is supported (cuda_decode_mla.cu).

Plans, slots and merge are those of :mod:`~colonnade.kernels.attention.triton_split_kv`; any number of queries.

With SCALED, latents have 8 bits (:mod:`~colonnade.kernels.attention.cache_write`) and are converted exactly to the type
of q in registers; a token's scales multiply its scores and weights instead of its hundreds of elements.
"""

import torch
import triton
from torch import Tensor
from triton import language as tl

from colonnade.kernels.attention import cuda_decode
from colonnade.kernels.attention.decode_plan import DevicePlan, KernelLayout
from colonnade.kernels.attention.page_table import PageTable
from colonnade.kernels.attention.split_plan import flat_offsets
from colonnade.kernels.attention.triton_args import Batch, Cache, MlaConfig, Output, Queries
from colonnade.kernels.attention.triton_merge import allocate_slots, launch_merge
from colonnade.kernels.attention.triton_split_kv import (
    FIELDS,
    LOG2_E,
    block_rows,
    key_offsets,
    load_page_ids,
    normalise,
    online_softmax,
    store_state,
    valid_keys,
    visible,
)
from colonnade.kernels.softmax_state import State
from colonnade.kernels.triton_constants import constexprs


@triton.jit(do_not_specialize=["pages_r", "columns", "pages", "items_at"])
def mla_attend(
    queries, latents, scales, output, plan_ptr, batch, pages_r, columns, pages, items_at, scale, cfg: tl.constexpr
):
    """Executes all pieces of one worker."""
    i, x = tl.arange(0, cfg.BLOCK_C), tl.arange(0, cfg.BLOCK_R)
    first_item = tl.load(plan_ptr + 4 + tl.program_id(0))
    end_item = tl.load(plan_ptr + 5 + tl.program_id(0))
    if cfg.LAUNCH_MERGE:
        tl.extra.cuda.gdc_launch_dependents()
    for item in range(first_item, end_item):
        at_item = plan_ptr + items_at + item * FIELDS
        request, block, slot = tl.load(at_item), tl.load(at_item + 2), tl.load(at_item + 5)
        t, n, query, row_mask, new = block_rows(batch.cu_queries, request, 0, block, cfg.N, cfg.ROWS)
        length = tl.load(batch.lengths + request)
        position = length - new + query
        low = tl.load(at_item + 3) // cfg.TILE * cfg.TILE
        high = tl.minimum(tl.load(at_item + 4), length)
        q_at = queries.ptr + t.to(tl.int64)[:, None] * queries.token + n[:, None] * queries.head
        q = tl.load(q_at + i[None, :], row_mask[:, None] & (i < cfg.RANK)[None, :], 0.0)
        p = tl.load(q_at + cfg.RANK + x[None, :], row_mask[:, None] & (x < cfg.ROPE)[None, :], 0.0)
        row_max = tl.full((cfg.ROWS,), float("-inf"), tl.float32)
        row_sum = tl.zeros((cfg.ROWS,), tl.float32)
        o = tl.zeros((cfg.ROWS, cfg.BLOCK_C), tl.float32)
        table_ptr = batch.pages + request.to(tl.int64) * pages_r
        page = load_page_ids(table_ptr, low, columns, cfg.PAGE, cfg.TILE)
        for at in tl.range(low, high, cfg.TILE, num_stages=cfg.STAGES):
            j = at + tl.arange(0, cfg.TILE)
            page_id = page.to(tl.int64)
            key_mask = valid_keys(page, j, high, pages)
            k_at = latents.ptr + key_offsets(page, at, j, latents.page, latents.token, cfg.PAGE, cfg.TILE)
            page = load_page_ids(table_ptr, at + cfg.TILE, columns, cfg.PAGE, cfg.TILE)
            if cfg.BLOCK_C == cfg.RANK:
                c = tl.load(k_at + i[None, :], key_mask[:, None], 0.0)
            else:
                c = tl.load(k_at + i[None, :], key_mask[:, None] & (i < cfg.RANK)[None, :], 0.0)
            if cfg.BLOCK_R == cfg.ROPE:
                r = tl.load(k_at + cfg.RANK + x[None, :], key_mask[:, None], 0.0)
            else:
                r = tl.load(k_at + cfg.RANK + x[None, :], key_mask[:, None] & (x < cfg.ROPE)[None, :], 0.0)
            s = tl.dot(q, tl.trans(c.to(q.dtype)), input_precision="ieee")
            if cfg.SCALED:
                scales_at = scales.ptr + page_id * scales.page + j % cfg.PAGE * scales.token
                c_scale = tl.load(scales_at, key_mask, 0.0)
                rotary_scores = tl.dot(p, tl.trans(r.to(q.dtype)), input_precision="ieee")
                s = (s * c_scale[None, :] + rotary_scores * tl.load(scales_at + 1, key_mask, 0.0)[None, :]) * scale
            else:
                s = tl.dot(p, tl.trans(r.to(q.dtype)), s, input_precision="ieee") * scale
            s = tl.where(visible(position, j, key_mask, cfg.WINDOW), s * LOG2_E, float("-inf"))
            weight, rescale, row_max, row_sum = online_softmax(s, row_max, row_sum, 1.0, 0.0)
            if cfg.SCALED:
                weight *= c_scale[None, :]
            o = tl.dot(weight.to(q.dtype), c.to(q.dtype), o * rescale[:, None], input_precision="ieee")
        o, lse = normalise(o, row_max, row_sum, n, row_mask, queries.ptr, False)
        store_state(o, lse, slot, t, n, row_mask, output, cfg.N, cfg.RANK, cfg.ROWS, cfg.BLOCK_C)


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
    if ready.layout.cuda:
        assert scales_Pp2 is None, "8-bit latents have another layout"
        cuda_decode.attend_mla(q_TNH, k_Pp1H, rank, state, table, ready)
        return state
    pages_RP = table.pages_RP if table.pages_RP.stride(-1) == 1 else table.pages_RP.contiguous()
    shape, tiles = ready.layout.shape, ready.layout.tiles
    slots = allocate_slots(state.o, ready)
    scales = slots.lse if scales_Pp2 is None else scales_Pp2  # placeholder for a tensor that is not read
    config = MlaConfig(
        N, rank, H - rank, max(16, triton.next_power_of_2(rank)), max(16, triton.next_power_of_2(H - rank)),
        page_tokens, shape.rows, tiles.tile, tiles.stages, shape.window or 0, scales_Pp2 is not None,
        ready.overlaps_merge,
    )  # fmt: skip
    mla_attend[ready.capacity.workers,](
        Queries(q_TNH, *q_TNH.stride()[:2]), Cache(k_Pp1H, *k_Pp1H.stride()[:2]), Cache(scales, *scales.stride()[:2]),
        Output(*state, *slots), ready.flat, Batch(pages_RP, table.cu_queries, table.lengths_R),
        pages_RP.stride(0), pages_RP.shape[1], P, flat_offsets(ready.capacity)[1], H**-0.5, constexprs(config),
        num_warps=tiles.warps,
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
        layout = KernelLayout.for_mla(q_TNH, k_Pp1H, table.longest_query, rank=rank, window=window)
        plan = layout.plan(lengths, new, max_keys=table.max_keys)
        table.plan_cache[key] = (layout.prepare(plan, q_TNH.device),)
    return attend(q_TNH, k_Pp1H, rank, table, *table.plan_cache[key], scales_Pp2)
