"""Paged attention of many rows, in Triton: prompt chunks, and groups that share a prefix.

Executes the same plans as :mod:`~colonnade.kernels.attention.triton_split_kv`, in blocks that fill the tensor cores: 64
or 128 queries and heads of one request or, if GROUPED, of all requests of a group, whose rows are listed individually.
The kernel is compute-bound, so keys that every row of the block sees, nearly all of a long context, are not masked:

    low                  a            b          high
     | some rows' window |   all see  | causal    |          a, b: whole tiles

This is FlashAttention-2's loop (Dao, arXiv 2307.08691) over scattered pages. Pages outside the cache are masked. With
TMA, a page holds whole tiles, and the unmasked ones are fetched by the tensor memory accelerator, which saves address
arithmetic; a tile outside the cache is zeros.

With OVERLAP, a group's keys are read concurrently with the requests' own, by a launch that waits for its predecessor
only at its end (programmatic dependent launch): neither reads what the other writes.
"""

import triton
from triton import language as tl

from colonnade.kernels.attention.triton_split_kv import (
    FIELDS,
    attend_tiles,
    block_rows,
    load_item,
    load_page_ids,
    normalise,
    softmax_tile,
    store_state,
)


@triton.jit
def _group_rows(
    members_ptr, groups_at, group, head, block, cu_ptr, lengths_ptr, GROUP: tl.constexpr, ROWS: tl.constexpr
):
    """(each row's index in the stream, query head, position, mask of valid rows)."""
    at = members_ptr + groups_at + group * 4
    m = block * ROWS + tl.arange(0, ROWS)
    row_mask = m // GROUP < tl.load(at + 2)
    entry = members_ptr + tl.load(at + 1) + m // GROUP * 2
    request, query = tl.load(entry, row_mask, 0), tl.load(entry + 1, row_mask, 0)
    start, end = tl.load(cu_ptr + request, row_mask, 0), tl.load(cu_ptr + request + 1, row_mask, 0)
    position = tl.load(lengths_ptr + request, row_mask, 0) - (end - start) + query
    return start + query, head * GROUP + m % GROUP, position, row_mask


@triton.jit
def _attend_tiles_tma(q, sums, start, stop, page, rows, head, table, k_rows, v_rows, mods, factor, cfg: tl.constexpr):
    """:func:`attend_tiles` over unmasked whole tiles, through TMA descriptors of (P · PAGE, K · H).

    ``page`` is the first tile's.
    """
    o, row_max, row_sum = sums
    table_ptr, columns, pages = table
    for at in tl.range(start, stop, cfg.TILE, num_stages=cfg.STAGES):
        j = at + tl.arange(0, cfg.TILE)
        inside = (page >= 0) & (page < pages)
        row = tl.where(inside, page * cfg.PAGE + at % cfg.PAGE, -cfg.TILE)
        k, v = k_rows.load([row, head * cfg.BLOCK_H]), v_rows.load([row, head * cfg.BLOCK_H])
        page = load_page_ids(table_ptr, at + cfg.TILE, columns, cfg.PAGE, cfg.TILE)
        s = tl.dot(q, tl.trans(k), input_precision="ieee")
        key_mask, bias = tl.where(inside, j, -1) >= 0, tl.where(inside, 0.0, float("-inf"))
        p, rescale, row_max, row_sum = softmax_tile(
            s, row_max, row_sum, factor, rows, j, key_mask, bias, mods, cfg, False
        )
        o = tl.dot(p.to(q.dtype), v, o * rescale[:, None], input_precision="ieee")
    return o, row_max, row_sum


@triton.jit(do_not_specialize=["pages_r", "columns", "pages", "items_at", "firsts_at", "groups_at"])
def attend(
    queries, keys, values, output, plan_ptr, batch, mods, k_rows, v_rows, pages_r, columns, pages, items_at, firsts_at,
    groups_at, cfg: tl.constexpr,
):  # fmt: skip
    """Executes all pieces of one worker."""
    h = tl.arange(0, cfg.BLOCK_H)
    if cfg.OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    # As in :func:`triton_split_kv.attend`, for the same reason.
    at_first = plan_ptr + firsts_at + tl.program_id(0) * FIELDS
    request, head, block, first, end, slot = load_item(at_first, 0)
    count = tl.load(at_first + 6)
    start = tl.load(plan_ptr + 4 + tl.program_id(0))
    for i in range(count):
        low, group = first // cfg.TILE * cfg.TILE, request
        if cfg.GROUPED:
            # any request of the group, since all share these pages
            request = tl.load(batch.members + groups_at + group * 4)
        table_ptr = batch.pages + request.to(tl.int64) * pages_r
        page = load_page_ids(table_ptr, low, columns, cfg.PAGE, cfg.TILE)  # loads while the rows are computed
        if cfg.GROUPED:
            t, n, position, row_mask = _group_rows(
                batch.members, groups_at, group, head, block, batch.cu_queries, batch.lengths, cfg.GROUP, cfg.ROWS
            )
        else:
            t, n, query, row_mask, new = block_rows(batch.cu_queries, request, head, block, cfg.GROUP, cfg.ROWS)
            position = tl.load(batch.lengths + request) - new + query
        rows, table = (position, n, row_mask), (table_ptr, columns, pages)
        high = tl.minimum(end, tl.load(batch.lengths + request))
        b = tl.minimum(tl.min(tl.where(row_mask, position, high)) + 1, high) // cfg.TILE * cfg.TILE
        q_at = queries.ptr + t.to(tl.int64)[:, None] * queries.token + n[:, None] * queries.head + h[None, :]
        q = tl.load(q_at, row_mask[:, None] & (h < cfg.H)[None, :], 0.0)
        factor = mods.scale
        if cfg.SCALED:
            factor = mods.scale * tl.load(mods.k_scale + head)
        row_max = tl.full((cfg.ROWS,), float("-inf"), tl.float32)
        row_sum = tl.zeros((cfg.ROWS,), tl.float32)
        o = tl.zeros((cfg.ROWS, cfg.BLOCK_H), tl.float32)
        a = low
        if cfg.WINDOW:
            a = tl.max(tl.where(row_mask, position, 0)) - cfg.WINDOW + 1
            a = tl.minimum(tl.maximum((a + cfg.TILE - 1) // cfg.TILE * cfg.TILE, low), tl.maximum(high, low))
            o, row_max, row_sum = attend_tiles(
                q, (o, row_max, row_sum), (low, a, high), page, rows, head, table,
                keys, values, mods, factor, cfg, True,
            )  # fmt: skip
            page = load_page_ids(table_ptr, a, columns, cfg.PAGE, cfg.TILE)
        b = tl.maximum(a, b)
        if cfg.TMA:
            o, row_max, row_sum = _attend_tiles_tma(
                q, (o, row_max, row_sum), a, b, page, rows, head, table, k_rows, v_rows, mods, factor, cfg
            )
        else:
            o, row_max, row_sum = attend_tiles(
                q, (o, row_max, row_sum), (a, b, high), page, rows, head, table,
                keys, values, mods, factor, cfg, False,
            )  # fmt: skip
        o, row_max, row_sum = attend_tiles(
            q, (o, row_max, row_sum), (b, high, high), load_page_ids(table_ptr, b, columns, cfg.PAGE, cfg.TILE), rows,
            head, table, keys, values, mods, factor, cfg, True,
        )  # fmt: skip
        if cfg.SCALED:
            o = o * tl.load(mods.v_scale + head)
        # Sinks are one key per row, not one per piece: the merge adds them to split lines.
        o, lse = normalise(o, row_max, row_sum, n, tl.where(slot < 0, row_mask, False), mods.sinks, cfg.SINKS)
        store_state(o, lse, slot, t, n, row_mask, output, cfg.N, cfg.H, cfg.ROWS, cfg.BLOCK_H)
        request, head, block, first, end, slot = load_item(plan_ptr + items_at, start + i + 1, i + 1 < count, 0)
    if cfg.OVERLAP:
        tl.extra.cuda.gdc_wait()  # launches that wait for this one also depend on its predecessor
