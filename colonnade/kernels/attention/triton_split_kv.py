"""Flash-Decoding in Triton: a persistent kernel whose workers read the KV pieces that a plan assigns.

    o_s = softmax(q·kₛ) vₛ        lse_s = log Σ exp(q·kₛ)        for every piece s of a line; then merge

A line (see :mod:`~colonnade.kernels.attention.split_planner`) has up to ROWS rows; a row is one query of one query head
of a group. All rows read the same keys, which are loaded once. So the tensor cores process a tile of rows for any group
size, and several queries (speculation, prompt chunks) fill rows that would otherwise be empty. Row m is query m //
GROUP, head m % GROUP, and a block may start in the middle of a group.

A worker is a persistent program that takes one piece after another. A piece that is a whole line writes the output;
other states go to slots in float32, which :mod:`~colonnade.kernels.attention.triton_merge` merges in key order. With
fixed splits a piece may be a run of chunks, which is read in one loop and writes a state for each.

Lengths and page ids are bounds-checked on the device: keys end at the length that the device holds, whatever was
planned; a page id outside the cache or beyond the table is masked. Products of page ids and strides are 64-bit.
"""

import math

import triton
from triton import language as tl

from colonnade.kernels.attention import triton_kv8
from colonnade.kernels.attention.split_plan import FIELDS as _FIELDS

FIELDS = tl.constexpr(_FIELDS)
LN_2 = tl.constexpr(math.log(2))
LOG2_E = tl.constexpr(1 / math.log(2))
"""Scores are in base 2, since the GPU has an exp2 instruction."""


@triton.jit
def block_rows(cu_ptr, request, head, block, GROUP: tl.constexpr, ROWS: tl.constexpr):
    """(each row's index in the stream, query head, query index, mask of valid rows, number of queries)."""
    start = tl.load(cu_ptr + request)
    new = tl.load(cu_ptr + request + 1) - start
    m = block * ROWS + tl.arange(0, ROWS)
    query = m // GROUP
    return start + query, head * GROUP + m % GROUP, query, query < new, new


@triton.jit
def block_rows_single_query(request, head, block, GROUP: tl.constexpr, ROWS: tl.constexpr):
    """:func:`block_rows` if every request has one query: no lookups."""
    m = block * ROWS + tl.arange(0, ROWS)
    query = m // GROUP
    return request + query, head * GROUP + m % GROUP, query, query < 1, 1


@triton.jit
def normalise(o, row_max, row_sum, n, row_mask, sinks_ptr, SINKS: tl.constexpr):
    """(o, lse) from sums of 2^(s − row_max), with the sink if there is one."""
    if SINKS:
        sink = tl.load(sinks_ptr + n, row_mask, float("-inf")).to(tl.float32) * LOG2_E
        new = tl.maximum(row_max, sink)
        safe_max = tl.where(new == float("-inf"), 0.0, new)
        rescale = tl.exp2(row_max - safe_max)
        o, row_sum, row_max = o * rescale[:, None], row_sum * rescale + tl.exp2(sink - safe_max), new
    safe_sum = tl.where(row_sum > 0.0, row_sum, 1.0)  # a row without visible keys is the identity
    return o / safe_sum[:, None], tl.where(row_sum > 0.0, row_max + tl.log2(safe_sum), float("-inf")) * LN_2


@triton.jit
def load_page_ids(table_ptr, at, columns, PAGE: tl.constexpr, TILE: tl.constexpr):
    """The page of each key of the tile at ``at``; a scalar if pages hold whole tiles."""
    column = at // PAGE if PAGE % TILE == 0 else (at + tl.arange(0, TILE)) // PAGE
    return tl.load(table_ptr + column, column < columns, -1)


@triton.jit
def visible(position, j, key_mask, WINDOW: tl.constexpr):
    """Which keys each row sees, (rows, TILE)."""
    mask = (j[None, :] <= position[:, None]) & key_mask[None, :]
    if WINDOW:
        mask = mask & (j[None, :] > position[:, None] - WINDOW)
    return mask


@triton.jit
def modified_scores(s, rows, j, key_mask, mods, cfg: tl.constexpr, MASKED: tl.constexpr):
    """Base-2 scores after soft cap and biases, −∞ where masked; not MASKED, every row sees every valid key."""
    position, n, row_mask = rows
    if cfg.CAPPED:
        # tanh x = 2 sigmoid(2x) − 1
        s = mods.cap * (2.0 * tl.sigmoid(2.0 * s / mods.cap) - 1.0)
    if cfg.SLOPES:
        slope = tl.load(mods.slopes + n, row_mask, 0.0).to(tl.float32)
        s = s - slope[:, None] * (position[:, None] - j[None, :])
    if cfg.NEAR:
        distance = tl.minimum(tl.maximum(j[None, :] - position[:, None], -cfg.NEAR), cfg.NEAR)
        s = s + tl.load(mods.near + (distance + cfg.NEAR) * cfg.N + n[:, None]).to(tl.float32)
    if not MASKED:
        return s * LOG2_E + tl.where(key_mask, 0.0, float("-inf"))[None, :]
    return tl.where(visible(position, j, key_mask, cfg.WINDOW), s * LOG2_E, float("-inf"))


@triton.jit
def valid_keys(page, j, high, pages):
    """Mask of the keys j below ``high`` on pages of the cache."""
    return j < tl.where((page >= 0) & (page < pages), high, 0)


@triton.jit
def key_offsets(page, at, j, x_page, x_p, PAGE: tl.constexpr, TILE: tl.constexpr):
    """Offsets of the keys of the tile at ``at`` in a cache, (TILE, 1)."""
    first = page.to(tl.int64) * x_page
    return first + (at % PAGE + j - at)[:, None] * x_p if PAGE % TILE == 0 else (first + j % PAGE * x_p)[:, None]


@triton.jit
def online_softmax(s, row_max, row_sum, factor, bias, headroom=0.0):
    """(weights, rescale factor, new row_max, new row_sum) of a tile's scores s · factor + bias.

    The scale is applied while the maximum is subtracted, one instruction per key; ``factor`` is positive. row_max is
    kept ``headroom`` below the true maximum, so weights are at most 2^headroom.
    """
    new_max = tl.maximum(row_max, tl.max(s, 1) * factor + (bias - headroom))
    safe_max = tl.where(new_max == float("-inf"), 0.0, new_max)  # a row without visible keys so far
    weight = tl.exp2(s * factor + (bias - safe_max)[:, None])
    rescale = tl.exp2(row_max - safe_max)
    return weight, rescale, new_max, row_sum * rescale + tl.sum(weight, 1)


@triton.jit
def softmax_of_products(
    s, row_max, row_sum, factor, position, j, key_mask, bias, cfg: tl.constexpr, MASKED: tl.constexpr, headroom=0.0
):
    """:func:`online_softmax` of unscaled products, whose base-2 scores are ``factor`` times as large.

    With many rows, the work around the GEMMs takes as long as they do. If a tile is within one page, ``bias`` is 0 if
    that page is valid and −∞ if not.
    """
    if MASKED:
        s = tl.where(visible(position, j, key_mask, cfg.WINDOW), s, float("-inf"))
        bias = 0.0
    elif cfg.PAGE % cfg.TILE != 0:
        s = s + tl.where(key_mask, 0.0, float("-inf"))[None, :]
        bias = 0.0
    return online_softmax(s, row_max, row_sum, factor, bias, headroom)


@triton.jit
def softmax_tile(
    s, row_max, row_sum, factor, rows, j, key_mask, bias, mods, cfg: tl.constexpr, MASKED: tl.constexpr, headroom=0.0
):
    """:func:`online_softmax` of a tile's products; ``factor`` is applied before soft cap and biases."""
    if cfg.CAPPED or cfg.SLOPES or cfg.NEAR:
        s = modified_scores(s * factor, rows, j, key_mask, mods, cfg, MASKED)
        return online_softmax(s, row_max, row_sum, 1.0, 0.0, headroom)
    return softmax_of_products(s, row_max, row_sum, factor * LOG2_E, rows[0], j, key_mask, bias, cfg, MASKED, headroom)


@triton.jit
def attend_tiles(
    q, sums, span, page, rows, head, table, keys, values, mods, factor, cfg: tl.constexpr, MASKED: tl.constexpr,
    chunk=None,
):  # fmt: skip
    """(o, row_max, row_sum) with the tiles of ``span`` (start, stop, high) added; keys from ``high`` on are masked.

    ``page`` is that of the tile at ``start``, which the caller may have prefetched. Not MASKED, every row sees all
    keys. With SAME_STRIDES keys and values have the same strides. With KV8 they are words of two 8-bit elements (see
    :mod:`~colonnade.kernels.attention.triton_kv8`), and ``o`` is 0. With CHUNK sums restart at its multiples, and the
    result is the last chunk's; states of earlier chunks, values scaled by ``times``, go to slots, that of keys from 0
    on to ``slot``.
    """
    o, row_max, row_sum = sums
    start, stop, high = span
    table_ptr, columns, pages = table
    ELEMENTS_PER_WORD: tl.constexpr = 2 if cfg.KV8 is not None else 1
    HEADROOM: tl.constexpr = 15.0 if cfg.KV8 is not None else 0.0
    h = tl.arange(0, cfg.BLOCK_H // ELEMENTS_PER_WORD)
    if cfg.KV8 is not None:
        q, q_odd, back = triton_kv8.split_queries(q)
        factor = factor * back
        o = tl.zeros(q.shape, tl.float32)
        o_odd = o
    # Page ids are prefetched one tile ahead by hand: the compiler does not pipeline dependent loads.
    for at in tl.range(start, stop, cfg.TILE, num_stages=cfg.STAGES):
        j = at + tl.arange(0, cfg.TILE)
        key_mask = valid_keys(page, j, high, pages)
        bias = tl.where((page >= 0) & (page < pages), 0.0, float("-inf"))
        k_i = key_offsets(page, at, j, keys.page, keys.token, cfg.PAGE, cfg.TILE) + h[None, :]
        v_i = k_i
        if not cfg.SAME_STRIDES:
            v_i = key_offsets(page, at, j, values.page, values.token, cfg.PAGE, cfg.TILE) + h[None, :]
        k_at, v_at = keys.ptr + head * keys.head + k_i, values.ptr + head * values.head + v_i
        page = load_page_ids(table_ptr, at + cfg.TILE, columns, cfg.PAGE, cfg.TILE)
        if cfg.BLOCK_H == cfg.H:
            k = tl.load(k_at, key_mask[:, None], 0.0)
            v = tl.load(v_at, key_mask[:, None], 0.0)
        else:
            k = tl.load(k_at, key_mask[:, None] & (h < cfg.H // ELEMENTS_PER_WORD)[None, :], 0.0)
            v = tl.load(v_at, key_mask[:, None] & (h < cfg.H // ELEMENTS_PER_WORD)[None, :], 0.0)
        if cfg.KV8 is not None:
            s = triton_kv8.scores(q, q_odd, k, cfg.KV8, cfg.ASM)
        else:
            s = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee")
        p, rescale, row_max, row_sum = softmax_tile(
            s, row_max, row_sum, factor, rows, j, key_mask, bias, mods, cfg, MASKED, HEADROOM
        )
        if cfg.KV8 is not None:
            o, o_odd = triton_kv8.weighted_values(
                p, v, o * rescale[:, None], o_odd * rescale[:, None], cfg.KV8, cfg.ASM
            )
        else:
            o = tl.dot(p.to(q.dtype), v.to(q.dtype), o * rescale[:, None], input_precision="ieee")
        if cfg.CHUNK:
            slot, times, slot_o, slot_lse = chunk
            # At the end of a chunk that is not the last, its state is stored and the sums restart while tiles are in
            # flight: a loop per chunk would start with an empty pipeline, which costs a tenth of a chunk.
            if ((at + cfg.TILE) % cfg.CHUNK == 0) & (at + cfg.TILE < stop):
                if cfg.KV8 is not None:
                    state_o = triton_kv8.interleave(o, o_odd)
                    o_odd = tl.zeros_like(o_odd)
                else:
                    state_o = o
                state_o, lse = normalise(state_o * times, row_max, row_sum, rows[1], rows[2], mods.slopes, False)
                store_slot(
                    state_o, lse, slot + at // cfg.CHUNK, rows[2], slot_o, slot_lse, cfg.H, q.shape[0], cfg.BLOCK_H
                )
                o, row_sum = tl.zeros_like(o), tl.zeros_like(row_sum)
                row_max = tl.full(row_max.shape, float("-inf"), tl.float32)
    if cfg.KV8 is not None:
        o = triton_kv8.interleave(o, o_odd)
    return o, row_max, row_sum


@triton.jit
def store_slot(
    o, lse, slot, row_mask, slot_o_ptr, slot_lse_ptr, H: tl.constexpr, ROWS: tl.constexpr, BLOCK_H: tl.constexpr
):
    """Stores a state for the merge."""
    h = tl.arange(0, BLOCK_H)
    line = slot.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    tl.store(slot_o_ptr + line[:, None] * H + h[None, :], o, row_mask[:, None] & (h < H)[None, :])
    tl.store(slot_lse_ptr + line, lse, row_mask)


@triton.jit
def store_state(
    o, lse, slot, t, n, row_mask, output,
    N: tl.constexpr, H: tl.constexpr, ROWS: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Stores a piece's result: the output of a whole line, or a state in a slot."""
    if slot < 0:
        h = tl.arange(0, BLOCK_H)
        line = t.to(tl.int64) * N + n
        tl.store(
            output.o + line[:, None] * H + h[None, :],
            o.to(output.o.dtype.element_ty),
            row_mask[:, None] & (h < H)[None, :],
        )
        tl.store(output.lse + line, lse, row_mask)
    else:
        store_slot(o, lse, slot, row_mask, output.slot_o, output.slot_lse, H, ROWS, BLOCK_H)


@triton.jit
def last_slot(slot, first, end, CHUNK: tl.constexpr):
    """The slot of the last chunk of keys ``first`` .. ``end`` − 1, the first one's being ``slot``."""
    return tl.where(slot < 0, slot, slot + tl.maximum(end - 1, first) // CHUNK - first // CHUNK)


@triton.jit
def clear_unreached(
    slot, last, row_mask, slot_o_ptr, slot_lse_ptr, H: tl.constexpr, ROWS: tl.constexpr, BLOCK_H: tl.constexpr
):
    """Stores the identity in the slots after ``slot`` up to ``last``, of chunks that were planned ahead."""
    o, lse = tl.zeros((ROWS, BLOCK_H), tl.float32), tl.full((ROWS,), float("-inf"), tl.float32)
    for ahead in range(1, last - slot + 1):
        store_slot(o, lse, slot + ahead, row_mask, slot_o_ptr, slot_lse_ptr, H, ROWS, BLOCK_H)


@triton.jit
def load_item(items_ptr, i, row_mask=None, other=None):
    """(request, head, block, first key, end, slot) of a plan's i-th item; ``other`` where the mask is false."""
    at = items_ptr + i * FIELDS
    request, head = tl.load(at, row_mask, other), tl.load(at + 1, row_mask, other)
    block, first = tl.load(at + 2, row_mask, other), tl.load(at + 3, row_mask, other)
    return request, head, block, first, tl.load(at + 4, row_mask, other), tl.load(at + 5, row_mask, other)


@triton.jit
def _load_length_and_page(
    lengths_ptr, pages_ptr, request, first, pages_r, columns, PAGE: tl.constexpr, TILE: tl.constexpr
):
    """(length of a request, page of the tile at ``first``)."""
    page = load_page_ids(pages_ptr + request.to(tl.int64) * pages_r, first // TILE * TILE, columns, PAGE, TILE)
    return tl.load(lengths_ptr + request), page


@triton.jit
def _load_queries(queries, cu_queries, request, head, block, cfg: tl.constexpr):
    """A block's query rows."""
    h = tl.arange(0, cfg.BLOCK_H)
    if cfg.SINGLE:
        t, n, _, row_mask, _ = block_rows_single_query(request, head, block, cfg.GROUP, cfg.ROWS)
    else:
        t, n, _, row_mask, _ = block_rows(cu_queries, request, head, block, cfg.GROUP, cfg.ROWS)
    q_at = queries.ptr + t.to(tl.int64)[:, None] * queries.token + n[:, None] * queries.head + h[None, :]
    return tl.load(q_at, row_mask[:, None] & (h < cfg.H)[None, :], 0.0)


# These change from step to step.
@triton.jit(do_not_specialize=["pages_r", "columns", "pages", "items_at", "firsts_at"])
def attend(
    queries, keys, values, output, plan_ptr, batch, mods, pages_r, columns, pages, items_at, firsts_at,
    cfg: tl.constexpr,
):  # fmt: skip
    """Executes all pieces of one worker. SINGLE: every request has one query, so query r is request r's.

    With PREFETCH a piece's inputs are loaded before the previous one is written, for 30 more registers. With CHUNK a
    piece is a run of chunks, each of which has its own state, in consecutive slots.
    """
    # Each dependent load before the first keys are in flight takes a thirtieth of a short call. A worker's first item
    # is therefore stored at a fixed offset, and lookups are avoided.
    at_first = plan_ptr + firsts_at + tl.program_id(0) * FIELDS
    request, head, block, first, end, slot = load_item(at_first, 0)
    count = tl.load(at_first + 6)
    start = tl.load(plan_ptr + 4 + tl.program_id(0))
    if cfg.LAUNCH_MERGE:
        # The merge may start now; it waits for the end of this kernel before it reads.
        tl.extra.cuda.gdc_launch_dependents()
    if cfg.PREFETCH:
        length, page = _load_length_and_page(
            batch.lengths, batch.pages, request, first, pages_r, columns, cfg.PAGE, cfg.TILE
        )
        q = _load_queries(queries, batch.cu_queries, request, head, block, cfg)
        request_1, head_1, block_1, first_1, end_1, slot_1 = request, head, block, first, end, slot
        if count > 1:
            request_1, head_1, block_1, first_1, end_1, slot_1 = load_item(plan_ptr + items_at, start + 1)
    for i in range(count):
        if cfg.PREFETCH:
            # The next item was loaded one piece ago; its inputs are loaded now, together with this piece's keys.
            length_1, page_1, q_1 = length, page, q
            request_2, head_2, block_2, first_2, end_2, slot_2 = request_1, head_1, block_1, first_1, end_1, slot_1
            if i + 1 < count:
                length_1, page_1 = _load_length_and_page(
                    batch.lengths, batch.pages, request_1, first_1, pages_r, columns, cfg.PAGE, cfg.TILE
                )
                q_1 = _load_queries(queries, batch.cu_queries, request_1, head_1, block_1, cfg)
                if i + 2 < count:
                    request_2, head_2, block_2, first_2, end_2, slot_2 = load_item(plan_ptr + items_at, start + i + 2)
        else:
            length = tl.load(batch.lengths + request)
        if cfg.SINGLE:
            t, n, query, row_mask, new = block_rows_single_query(request, head, block, cfg.GROUP, cfg.ROWS)
        else:
            t, n, query, row_mask, new = block_rows(batch.cu_queries, request, head, block, cfg.GROUP, cfg.ROWS)
        position = length - new + query
        low, high = first // cfg.TILE * cfg.TILE, tl.minimum(end, length)
        if not cfg.PREFETCH:
            q = _load_queries(queries, batch.cu_queries, request, head, block, cfg)
        factor = mods.scale
        if cfg.SCALED:
            factor = mods.scale * tl.load(mods.k_scale + head)
        row_max = tl.full((cfg.ROWS,), float("-inf"), tl.float32)
        row_sum = tl.zeros((cfg.ROWS,), tl.float32)
        o = tl.zeros((cfg.ROWS, cfg.BLOCK_H), tl.float32)
        table_ptr = batch.pages + request.to(tl.int64) * pages_r
        times, last = 1.0, slot
        if cfg.CHUNK:
            last = last_slot(slot, first, end, cfg.CHUNK)
            if cfg.SCALED:
                times = tl.load(mods.v_scale + head)
        if not cfg.PREFETCH:
            page = load_page_ids(table_ptr, low, columns, cfg.PAGE, cfg.TILE)
        o, row_max, row_sum = attend_tiles(
            q, (o, row_max, row_sum), (low, high, high), page, (position, n, row_mask), head,
            (table_ptr, columns, pages), keys, values, mods, factor, cfg, True,
            (slot - first // cfg.CHUNK if cfg.CHUNK else slot, times, output.slot_o, output.slot_lse),
        )  # fmt: skip
        if cfg.CHUNK:
            slot = last_slot(slot, first, high, cfg.CHUNK)
        if cfg.SCALED:
            o = o * tl.load(mods.v_scale + head)
        # Sinks are one key per row, not one per piece: the merge adds them to split lines.
        o, lse = normalise(o, row_max, row_sum, n, tl.where(slot < 0, row_mask, False), mods.sinks, cfg.SINKS)
        store_state(o, lse, slot, t, n, row_mask, output, cfg.N, cfg.H, cfg.ROWS, cfg.BLOCK_H)
        if cfg.CHUNK:
            clear_unreached(slot, last, row_mask, output.slot_o, output.slot_lse, cfg.H, cfg.ROWS, cfg.BLOCK_H)
        if cfg.PREFETCH:
            request, head, block, first, end, slot = request_1, head_1, block_1, first_1, end_1, slot_1
            request_1, head_1, block_1, first_1, end_1, slot_1 = request_2, head_2, block_2, first_2, end_2, slot_2
            length, page, q = length_1, page_1, q_1
        else:
            request, head, block, first, end, slot = load_item(plan_ptr + items_at, start + i + 1, i + 1 < count, 0)
