"""Attention of many rows over pages, in Triton: chunks of prompts, and requests that share a prefix.

The same pieces of the same plans as :mod:`~colonnade.kernels.attention.triton_split_kv`, for blocks of rows that fill
the matrix units: 64 or 128 queries and heads of one request or, LISTED, of all requests of a group, whose rows are
listed one by one. What matters is arithmetic and not reading, so that keys which every row of the block sees, nearly
all of a long context, are not compared with anyone's position:

    low                  a            b          high
     | some rows' window |   all see  | causal    |          a, b: whole tiles

FlashAttention-2's loop (Dao, arXiv 2307.08691) over pages that lie anywhere. Pages outside the cache are keys that are
not there, as there. COPIED, a page holds whole tiles, and the tensor copy engine fetches those that all rows see: no
warp spends instructions on addresses, and a tile outside the cache is zeros.

A group's keys are read BESIDE the requests' own, by a launch that waits for the other one's end only before it ends
itself (programmatic dependent launch): neither reads what the other writes.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false
# pyright: reportGeneralTypeIssues=false
# A kernel is launched with more than its signature says, and its constants are plain numbers.

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
    """(each row's place in the stream, query head, position, whether it is one)."""
    at = members_ptr + groups_at + group * 4
    m = block * ROWS + tl.arange(0, ROWS)
    there = m // GROUP < tl.load(at + 2)
    entry = members_ptr + tl.load(at + 1) + m // GROUP * 2
    request, query = tl.load(entry, there, 0), tl.load(entry + 1, there, 0)
    start, end = tl.load(cu_ptr + request, there, 0), tl.load(cu_ptr + request + 1, there, 0)
    position = tl.load(lengths_ptr + request, there, 0) - (end - start) + query
    return start + query, head * GROUP + m % GROUP, position, there


@triton.jit
def _attend_tiles_tma(
    q, o, top, total, start, stop, page, position, n, there, head, table_ptr, k_rows, v_rows, slopes_ptr, columns,
    pages, factor, cap,
    PAGE: tl.constexpr, CAPPED: tl.constexpr, SLOPES: tl.constexpr, TILE: tl.constexpr, BLOCK_H: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """:func:`attend_tiles` of whole tiles that every row sees, from caches as the copy engine knows them, (P · PAGE, K · H).

    The first one lies on ``page``.
    """
    for at in tl.range(start, stop, TILE, num_stages=STAGES):
        j = at + tl.arange(0, TILE)
        inside = (page >= 0) & (page < pages)
        row = tl.where(inside, page * PAGE + at % PAGE, -TILE)
        k, v = k_rows.load([row, head * BLOCK_H]), v_rows.load([row, head * BLOCK_H])
        page = load_page_ids(table_ptr, at + TILE, columns, PAGE, TILE)
        s = tl.dot(q, tl.trans(k), input_precision="ieee")
        known, lift = tl.where(inside, j, -1) >= 0, tl.where(inside, 0.0, float("-inf"))
        p, shrink, top, total = softmax_tile(
            s, top, total, factor, position, j, known, lift, n, there, slopes_ptr, cap,
            PAGE, TILE, 0, CAPPED, SLOPES, False,
        )  # fmt: skip
        o = tl.dot(p.to(q.dtype), v, o * shrink[:, None], input_precision="ieee")
    return o, top, total


@triton.jit(do_not_specialize=["pages_r", "columns", "pages", "items_at", "firsts_at", "groups_at"])
def attend(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, slot_o_ptr, slot_lse_ptr, plan_ptr, pages_ptr, cu_ptr, lengths_ptr,
    slopes_ptr, sinks_ptr, k_scale_ptr, v_scale_ptr, members_ptr, k_rows, v_rows,
    q_t, q_n, k_page, k_p, k_k, v_page, v_p, v_k, pages_r, columns, pages, items_at, firsts_at, groups_at,
    scale, cap,
    N: tl.constexpr, GROUP: tl.constexpr, H: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr,
    CAPPED: tl.constexpr, SLOPES: tl.constexpr, SINKS: tl.constexpr, SCALED: tl.constexpr, LISTED: tl.constexpr,
    COPIED: tl.constexpr, BESIDE: tl.constexpr, ALIKE: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
    BLOCK_H: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """All pieces of one worker."""
    h = tl.arange(0, BLOCK_H)
    if BESIDE:
        tl.extra.cuda.gdc_launch_dependents()
    # Read as in :func:`triton_splits.attend`, for the same reason.
    at_first = plan_ptr + firsts_at + tl.program_id(0) * FIELDS
    request, head, block, first, end, slot = load_item(at_first, 0)
    count = tl.load(at_first + 6)
    start = tl.load(plan_ptr + 4 + tl.program_id(0))
    for i in range(count):
        low, group = first // TILE * TILE, request
        if LISTED:
            request = tl.load(members_ptr + groups_at + group * 4)  # one of them, all have these pages
        table_ptr = pages_ptr + request.to(tl.int64) * pages_r
        page = load_page_ids(table_ptr, low, columns, PAGE, TILE)  # on its way while the rows are found
        if LISTED:
            t, n, position, there = _group_rows(
                members_ptr, groups_at, group, head, block, cu_ptr, lengths_ptr, GROUP, ROWS
            )
        else:
            t, n, query, there, new = block_rows(cu_ptr, request, head, block, GROUP, ROWS)
            position = tl.load(lengths_ptr + request) - new + query
        high = tl.minimum(end, tl.load(lengths_ptr + request))
        b = tl.minimum(tl.min(tl.where(there, position, high)) + 1, high) // TILE * TILE
        q_at = q_ptr + t.to(tl.int64)[:, None] * q_t + n[:, None] * q_n + h[None, :]
        q = tl.load(q_at, there[:, None] & (h < H)[None, :], 0.0)
        factor = scale
        if SCALED:
            factor = scale * tl.load(k_scale_ptr + head)
        top = tl.full((ROWS,), float("-inf"), tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        o = tl.zeros((ROWS, BLOCK_H), tl.float32)
        a = low
        if WINDOW:
            a = tl.max(tl.where(there, position, 0)) - WINDOW + 1
            a = tl.minimum(tl.maximum((a + TILE - 1) // TILE * TILE, low), tl.maximum(high, low))
            o, top, total = attend_tiles(
                q, o, top, total, low, a, high, page, position, n, there, head, table_ptr, k_ptr, v_ptr, slopes_ptr,
                k_page, k_p, k_k, v_page, v_p, v_k, columns, pages, factor, cap,
                H, PAGE, WINDOW, CAPPED, SLOPES, ALIKE, True, TILE, BLOCK_H, STAGES,
            )  # fmt: skip
            page = load_page_ids(table_ptr, a, columns, PAGE, TILE)
        b = tl.maximum(a, b)
        if COPIED:
            o, top, total = _attend_tiles_tma(
                q, o, top, total, a, b, page, position, n, there, head, table_ptr, k_rows, v_rows, slopes_ptr,
                columns, pages, factor, cap, PAGE, CAPPED, SLOPES, TILE, BLOCK_H, STAGES,
            )  # fmt: skip
        else:
            o, top, total = attend_tiles(
                q, o, top, total, a, b, high, page, position, n, there, head, table_ptr, k_ptr, v_ptr, slopes_ptr,
                k_page, k_p, k_k, v_page, v_p, v_k, columns, pages, factor, cap,
                H, PAGE, WINDOW, CAPPED, SLOPES, ALIKE, False, TILE, BLOCK_H, STAGES,
            )  # fmt: skip
        o, top, total = attend_tiles(
            q, o, top, total, b, high, high, load_page_ids(table_ptr, b, columns, PAGE, TILE), position, n, there, head,
            table_ptr, k_ptr, v_ptr, slopes_ptr,
            k_page, k_p, k_k, v_page, v_p, v_k, columns, pages, factor, cap,
            H, PAGE, WINDOW, CAPPED, SLOPES, ALIKE, True, TILE, BLOCK_H, STAGES,
        )  # fmt: skip
        if SCALED:
            o = o * tl.load(v_scale_ptr + head)
        # Sinks are one key, not one a piece: of what was cut the merge adds them.
        o, lse = normalise(o, top, total, n, tl.where(slot < 0, there, False), sinks_ptr, SINKS)
        store_state(o, lse, slot, t, n, there, o_ptr, lse_ptr, slot_o_ptr, slot_lse_ptr, N, H, ROWS, BLOCK_H)
        request, head, block, first, end, slot = load_item(plan_ptr + items_at, start + i + 1, i + 1 < count, 0)
    if BESIDE:
        tl.extra.cuda.gdc_wait()  # who waits for this launch takes the one before it for over, too
