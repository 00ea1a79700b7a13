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

# pyright: reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false
# pyright: reportGeneralTypeIssues=false
# Triton adds launch options to a kernel's signature, and constexpr arguments are plain Python values.

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
def _attend_tiles_tma(
    q, o, row_max, row_sum, start, stop, page, position, n, row_mask, head, table_ptr, k_rows, v_rows, slopes_ptr,
    columns, pages, factor, cap,
    PAGE: tl.constexpr, CAPPED: tl.constexpr, SLOPES: tl.constexpr, TILE: tl.constexpr, BLOCK_H: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """:func:`attend_tiles` over unmasked whole tiles, through TMA descriptors of (P · PAGE, K · H).

    ``page`` is the first tile's.
    """
    for at in tl.range(start, stop, TILE, num_stages=STAGES):
        j = at + tl.arange(0, TILE)
        inside = (page >= 0) & (page < pages)
        row = tl.where(inside, page * PAGE + at % PAGE, -TILE)
        k, v = k_rows.load([row, head * BLOCK_H]), v_rows.load([row, head * BLOCK_H])
        page = load_page_ids(table_ptr, at + TILE, columns, PAGE, TILE)
        s = tl.dot(q, tl.trans(k), input_precision="ieee")
        key_mask, bias = tl.where(inside, j, -1) >= 0, tl.where(inside, 0.0, float("-inf"))
        p, rescale, row_max, row_sum = softmax_tile(
            s, row_max, row_sum, factor, position, j, key_mask, bias, n, row_mask, slopes_ptr, cap,
            PAGE, TILE, 0, CAPPED, SLOPES, False,
        )  # fmt: skip
        o = tl.dot(p.to(q.dtype), v, o * rescale[:, None], input_precision="ieee")
    return o, row_max, row_sum


@triton.jit(do_not_specialize=["pages_r", "columns", "pages", "items_at", "firsts_at", "groups_at"])
def attend(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, slot_o_ptr, slot_lse_ptr, plan_ptr, pages_ptr, cu_ptr, lengths_ptr,
    slopes_ptr, sinks_ptr, k_scale_ptr, v_scale_ptr, members_ptr, k_rows, v_rows,
    q_t, q_n, k_page, k_p, k_k, v_page, v_p, v_k, pages_r, columns, pages, items_at, firsts_at, groups_at,
    scale, cap,
    N: tl.constexpr, GROUP: tl.constexpr, H: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr,
    CAPPED: tl.constexpr, SLOPES: tl.constexpr, SINKS: tl.constexpr, SCALED: tl.constexpr, GROUPED: tl.constexpr,
    TMA: tl.constexpr, OVERLAP: tl.constexpr, SAME_STRIDES: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
    BLOCK_H: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Executes all pieces of one worker."""
    h = tl.arange(0, BLOCK_H)
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    # As in :func:`triton_split_kv.attend`, for the same reason.
    at_first = plan_ptr + firsts_at + tl.program_id(0) * FIELDS
    request, head, block, first, end, slot = load_item(at_first, 0)
    count = tl.load(at_first + 6)
    start = tl.load(plan_ptr + 4 + tl.program_id(0))
    for i in range(count):
        low, group = first // TILE * TILE, request
        if GROUPED:
            request = tl.load(members_ptr + groups_at + group * 4)  # any of its requests, since all share these pages
        table_ptr = pages_ptr + request.to(tl.int64) * pages_r
        page = load_page_ids(table_ptr, low, columns, PAGE, TILE)  # loads while the rows are computed
        if GROUPED:
            t, n, position, row_mask = _group_rows(
                members_ptr, groups_at, group, head, block, cu_ptr, lengths_ptr, GROUP, ROWS
            )
        else:
            t, n, query, row_mask, new = block_rows(cu_ptr, request, head, block, GROUP, ROWS)
            position = tl.load(lengths_ptr + request) - new + query
        high = tl.minimum(end, tl.load(lengths_ptr + request))
        b = tl.minimum(tl.min(tl.where(row_mask, position, high)) + 1, high) // TILE * TILE
        q_at = q_ptr + t.to(tl.int64)[:, None] * q_t + n[:, None] * q_n + h[None, :]
        q = tl.load(q_at, row_mask[:, None] & (h < H)[None, :], 0.0)
        factor = scale
        if SCALED:
            factor = scale * tl.load(k_scale_ptr + head)
        row_max = tl.full((ROWS,), float("-inf"), tl.float32)
        row_sum = tl.zeros((ROWS,), tl.float32)
        o = tl.zeros((ROWS, BLOCK_H), tl.float32)
        a = low
        if WINDOW:
            a = tl.max(tl.where(row_mask, position, 0)) - WINDOW + 1
            a = tl.minimum(tl.maximum((a + TILE - 1) // TILE * TILE, low), tl.maximum(high, low))
            o, row_max, row_sum = attend_tiles(
                q, o, row_max, row_sum, low, a, high, page, position, n, row_mask, head, table_ptr, k_ptr, v_ptr,
                slopes_ptr, k_page, k_p, k_k, v_page, v_p, v_k, columns, pages, factor, cap,
                H, PAGE, WINDOW, CAPPED, SLOPES, SAME_STRIDES, True, TILE, BLOCK_H, STAGES,
            )  # fmt: skip
            page = load_page_ids(table_ptr, a, columns, PAGE, TILE)
        b = tl.maximum(a, b)
        if TMA:
            o, row_max, row_sum = _attend_tiles_tma(
                q, o, row_max, row_sum, a, b, page, position, n, row_mask, head, table_ptr, k_rows, v_rows, slopes_ptr,
                columns, pages, factor, cap, PAGE, CAPPED, SLOPES, TILE, BLOCK_H, STAGES,
            )  # fmt: skip
        else:
            o, row_max, row_sum = attend_tiles(
                q, o, row_max, row_sum, a, b, high, page, position, n, row_mask, head, table_ptr, k_ptr, v_ptr,
                slopes_ptr, k_page, k_p, k_k, v_page, v_p, v_k, columns, pages, factor, cap,
                H, PAGE, WINDOW, CAPPED, SLOPES, SAME_STRIDES, False, TILE, BLOCK_H, STAGES,
            )  # fmt: skip
        o, row_max, row_sum = attend_tiles(
            q, o, row_max, row_sum, b, high, high, load_page_ids(table_ptr, b, columns, PAGE, TILE), position, n,
            row_mask, head, table_ptr, k_ptr, v_ptr, slopes_ptr,
            k_page, k_p, k_k, v_page, v_p, v_k, columns, pages, factor, cap,
            H, PAGE, WINDOW, CAPPED, SLOPES, SAME_STRIDES, True, TILE, BLOCK_H, STAGES,
        )  # fmt: skip
        if SCALED:
            o = o * tl.load(v_scale_ptr + head)
        # Sinks are one key per row, not one per piece: the merge adds them to split lines.
        o, lse = normalise(o, row_max, row_sum, n, tl.where(slot < 0, row_mask, False), sinks_ptr, SINKS)
        store_state(o, lse, slot, t, n, row_mask, o_ptr, lse_ptr, slot_o_ptr, slot_lse_ptr, N, H, ROWS, BLOCK_H)
        request, head, block, first, end, slot = load_item(plan_ptr + items_at, start + i + 1, i + 1 < count, 0)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()  # launches that wait for this one rely on its predecessor, too
