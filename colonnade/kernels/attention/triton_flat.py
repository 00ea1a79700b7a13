"""Flash-Decoding of many short lines: all tiles of a worker's pieces in one loop.

What :mod:`triton_splits` does, of the same plan. There a piece ends before the next begins, and the first keys of each
are waited for: with a hundred keys a line that is most of the time. Here the loop goes over tiles, whatever piece they
are of, so that keys of the next piece are on their way while one is reckoned with; what a piece is (its request, head,
keys, slot) is looked up one piece ahead. For that a tile of queries travels with each tile of keys.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false
# A kernel is launched with more than its signature says, and its constants are plain numbers.

import triton
from triton import language as tl

from colonnade.kernels.attention.triton_splits import (
    FIELDS,
    LOG2_E,
    finish,
    known_at,
    page_of,
    places_of,
    row_of,
    row_of_one,
    score,
    weigh,
    weigh_products,
    write,
)


@triton.jit(do_not_specialize=["pages_r", "columns", "pages", "items_at", "firsts_at"])
def attend(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, slot_o_ptr, slot_lse_ptr, plan_ptr, pages_ptr, cu_ptr, lengths_ptr,
    slopes_ptr, sinks_ptr, k_scale_ptr, v_scale_ptr,
    q_t, q_n, k_page, k_p, k_k, v_page, v_p, v_k, pages_r, columns, pages, items_at, firsts_at, scale, cap,
    N: tl.constexpr, GROUP: tl.constexpr, H: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr,
    CAPPED: tl.constexpr, SLOPES: tl.constexpr, SINKS: tl.constexpr, SCALED: tl.constexpr, LAUNCH_NEXT: tl.constexpr,
    SINGLE: tl.constexpr, ALIKE: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, BLOCK_H: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """All tiles of one worker; arguments as those of :func:`triton_splits.attend`."""
    h = tl.arange(0, BLOCK_H)
    at_item = plan_ptr + firsts_at + tl.program_id(0) * FIELDS
    request, head, block = tl.load(at_item), tl.load(at_item + 1), tl.load(at_item + 2)
    at, end, slot = tl.load(at_item + 3) // TILE * TILE, tl.load(at_item + 4), tl.load(at_item + 5)
    tiles, items = tl.load(at_item + 6), tl.load(at_item + 7)
    next_item = plan_ptr + items_at + (tl.load(plan_ptr + 4 + tl.program_id(0)) + 1) * FIELDS
    left = items - 1
    next_request, next_head = tl.load(next_item, left > 0, 0), tl.load(next_item + 1, left > 0, 0)
    next_block, next_first = tl.load(next_item + 2, left > 0, 0), tl.load(next_item + 3, left > 0, 0)
    next_end, next_slot = tl.load(next_item + 4, left > 0, 0), tl.load(next_item + 5, left > 0, 0)
    page = page_of(pages_ptr + request.to(tl.int64) * pages_r, at, columns, PAGE, TILE)
    if LAUNCH_NEXT:
        tl.extra.cuda.gdc_launch_dependents()
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    o = tl.zeros((ROWS, BLOCK_H), tl.float32)
    begins = tiles >= 0  # here true
    for _ in tl.range(0, tiles, num_stages=STAGES):
        length = tl.load(lengths_ptr + request)
        if SINGLE:
            t, n, query, there, new = row_of_one(request, head, block, GROUP, ROWS)
        else:
            t, n, query, there, new = row_of(cu_ptr, request, head, block, GROUP, ROWS)
        j = at + tl.arange(0, TILE)
        known = known_at(page, j, tl.minimum(end, length), pages)
        k_i = places_of(page, at, j, k_page, k_p, PAGE, TILE) + h[None, :]
        v_i = k_i
        if not ALIKE:
            v_i = places_of(page, at, j, v_page, v_p, PAGE, TILE) + h[None, :]
        q_at = q_ptr + t.to(tl.int64)[:, None] * q_t + n[:, None] * q_n + h[None, :]
        k_at, v_at = k_ptr + head * k_k + k_i, v_ptr + head * v_k + v_i
        if BLOCK_H == H:
            q = tl.load(q_at, there[:, None], 0.0)
            k = tl.load(k_at, known[:, None], 0.0)
            v = tl.load(v_at, known[:, None], 0.0)
        else:
            q = tl.load(q_at, there[:, None] & (h < H)[None, :], 0.0)
            k = tl.load(k_at, known[:, None] & (h < H)[None, :], 0.0)
            v = tl.load(v_at, known[:, None] & (h < H)[None, :], 0.0)
        position = length - new + query
        factor = scale
        if SCALED:
            factor = scale * tl.load(k_scale_ptr + head)
        top, total = tl.where(begins, float("-inf"), top), tl.where(begins, 0.0, total)
        s = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee")
        if CAPPED or SLOPES:
            s = score(s * factor, position, j, known, n, there, slopes_ptr, cap, WINDOW, CAPPED, SLOPES, True)
            p, shrink, top, total = weigh(s, top, total, 1.0, 0.0)
        else:
            p, shrink, top, total = weigh_products(
                s, top, total, factor * LOG2_E, position, j, known, 0.0, PAGE, TILE, WINDOW, True
            )
        # Not by a shrink of 0: what is not finite in one request is no other's.
        o = tl.where(begins, 0.0, o * shrink[:, None])
        o = tl.dot(p.to(q.dtype), v.to(q.dtype), o, input_precision="ieee")
        at += TILE
        begins = at >= end
        if begins:
            found = o
            if SCALED:
                found = o * tl.load(v_scale_ptr + head)
            found, lse = finish(found, top, total, n, tl.where(slot < 0, there, False), sinks_ptr, SINKS)
            write(found, lse, slot, t, n, there, o_ptr, lse_ptr, slot_o_ptr, slot_lse_ptr, N, H, ROWS, BLOCK_H)
        request, head = tl.where(begins, next_request, request), tl.where(begins, next_head, head)
        block, slot = tl.where(begins, next_block, block), tl.where(begins, next_slot, slot)
        at, end = tl.where(begins, next_first // TILE * TILE, at), tl.where(begins, next_end, end)
        page = page_of(pages_ptr + request.to(tl.int64) * pages_r, at, columns, PAGE, TILE)
        left -= begins.to(tl.int32)
        next_item += tl.where(begins, FIELDS, 0)
        next_request, next_head = tl.load(next_item, left > 0, 0), tl.load(next_item + 1, left > 0, 0)
        next_block, next_first = tl.load(next_item + 2, left > 0, 0), tl.load(next_item + 3, left > 0, 0)
        next_end, next_slot = tl.load(next_item + 4, left > 0, 0), tl.load(next_item + 5, left > 0, 0)
