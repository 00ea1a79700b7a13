"""Flash-Decoding in Triton: workers read the pages in place, each the pieces of keys that a plan gives it.

    o_s = softmax(q·kₛ) vₛ        lse_s = log Σ exp(q·kₛ)        for every piece s of a line; then merge

A line (see :mod:`~colonnade.kernels.attention.split_planner`) is up to ROWS rows, a row being one query of one query
head of a group: all of them read the same keys, which come from memory once. So the matrix units get a tile of rows
whatever the group, and several queries (speculation, chunks of a prompt) fill rows that a single one leaves empty.
Rows are flat, query m // GROUP and head m % GROUP, and a block of them may begin in the middle of a group.

A worker is a program that stays and takes one piece after another. A piece that is a whole line writes the output; of
others the states go to slots in float32, which :mod:`~colonnade.kernels.attention.triton_merge` folds, in the order of
their keys. Under fixed cuts a piece may be a run of chunks, which is read as one and leaves a state of each.

Nothing is believed: keys stop at the length that the device holds, whatever was planned; a page id outside the cache,
or beyond the table, reads nothing, as if its keys were not there. Products of a page's number and its size are 64-bit.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false, reportPossiblyUnboundVariable=false
# A kernel is launched with more than its signature says, and its constants are plain numbers and say what is bound.

import math

import triton
from triton import language as tl

from colonnade.kernels.attention import triton_kv8
from colonnade.kernels.attention.split_plan import FIELDS as _FIELDS

FIELDS = tl.constexpr(_FIELDS)
LN_2 = tl.constexpr(math.log(2))
LOG2_E = tl.constexpr(1 / math.log(2))
"""Scores are kept in powers of 2, for which there is an instruction."""


@triton.jit
def block_rows(cu_ptr, request, head, block, GROUP: tl.constexpr, ROWS: tl.constexpr):
    """(each row's place in the stream, its query head, its number among the request's queries, whether it is one)."""
    start = tl.load(cu_ptr + request)
    new = tl.load(cu_ptr + request + 1) - start
    m = block * ROWS + tl.arange(0, ROWS)
    query = m // GROUP
    return start + query, head * GROUP + m % GROUP, query, query < new, new


@triton.jit
def block_rows_single_query(request, head, block, GROUP: tl.constexpr, ROWS: tl.constexpr):
    """:func:`block_rows` where every request has one query: nothing to look up."""
    m = block * ROWS + tl.arange(0, ROWS)
    query = m // GROUP
    return request + query, head * GROUP + m % GROUP, query, query < 1, 1


@triton.jit
def normalise(o, top, total, n, there, sinks_ptr, SINKS: tl.constexpr):
    """(o, lse) of sums of 2^(s − top), with the key whose value is 0 where there is one."""
    if SINKS:
        sink = tl.load(sinks_ptr + n, there, float("-inf")).to(tl.float32) * LOG2_E
        new = tl.maximum(top, sink)
        base = tl.where(new == float("-inf"), 0.0, new)
        shrink = tl.exp2(top - base)
        o, total, top = o * shrink[:, None], total * shrink + tl.exp2(sink - base), new
    some = tl.where(total > 0.0, total, 1.0)  # a row that sees nothing is the identity
    return o / some[:, None], tl.where(total > 0.0, top + tl.log2(some), float("-inf")) * LN_2


@triton.jit
def load_page_ids(table_ptr, at, columns, PAGE: tl.constexpr, TILE: tl.constexpr):
    """The page of each key of the tile at ``at``; one number where pages hold whole tiles."""
    column = at // PAGE if PAGE % TILE == 0 else (at + tl.arange(0, TILE)) // PAGE
    return tl.load(table_ptr + column, column < columns, -1)


@triton.jit
def visible(position, j, known, WINDOW: tl.constexpr):
    """Which keys each row sees, (rows, TILE)."""
    seen = (j[None, :] <= position[:, None]) & known[None, :]
    if WINDOW:
        seen = seen & (j[None, :] > position[:, None] - WINDOW)
    return seen


@triton.jit
def modified_scores(
    s, position, j, known, n, there, slopes_ptr, cap,
    WINDOW: tl.constexpr, CAPPED: tl.constexpr, SLOPES: tl.constexpr, MASKED: tl.constexpr = True,
):  # fmt: skip
    """Scores in powers of 2 of products that were scaled, −∞ where a row does not see a key.

    Not MASKED, every row sees every key that is known.
    """
    if CAPPED:
        # tanh x = 2 sigmoid(2x) − 1
        s = cap * (2.0 * tl.sigmoid(2.0 * s / cap) - 1.0)
    if SLOPES:
        slope = tl.load(slopes_ptr + n, there, 0.0).to(tl.float32)
        s = s - slope[:, None] * (position[:, None] - j[None, :])
    if not MASKED:
        return s * LOG2_E + tl.where(known, 0.0, float("-inf"))[None, :]
    return tl.where(visible(position, j, known, WINDOW), s * LOG2_E, float("-inf"))


@triton.jit
def valid_keys(page, j, high, pages):
    """Which keys j of a tile there are, below ``high`` and on pages of the cache."""
    return j < tl.where((page >= 0) & (page < pages), high, 0)


@triton.jit
def key_offsets(page, at, j, x_page, x_p, PAGE: tl.constexpr, TILE: tl.constexpr):
    """Where in a cache each key of the tile at ``at`` begins, (TILE, 1)."""
    first = page.to(tl.int64) * x_page
    return first + (at % PAGE + j - at)[:, None] * x_p if PAGE % TILE == 0 else (first + j % PAGE * x_p)[:, None]


@triton.jit
def online_softmax(s, top, total, factor, lift, below=0.0):
    """(each key's weight, by what older sums shrink, the new top, the new total) of a tile's scores s · factor + lift.

    Multiplied where the row's largest is taken off, in one instruction a key; ``factor`` is above 0. The top is kept so
    much ``below`` the row's largest: weights are 2^below at most.
    """
    higher = tl.maximum(top, tl.max(s, 1) * factor + (lift - below))
    base = tl.where(higher == float("-inf"), 0.0, higher)  # a row that has seen nothing yet
    weight = tl.exp2(s * factor + (lift - base)[:, None])
    shrink = tl.exp2(top - base)
    return weight, shrink, higher, total * shrink + tl.sum(weight, 1)


@triton.jit
def softmax_of_products(
    s, top, total, factor, position, j, known, lift, PAGE: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr,
    MASKED: tl.constexpr, below=0.0,
):  # fmt: skip
    """:func:`online_softmax` of products as they come, of which scores in powers of 2 are ``factor`` times as much.

    With many rows what stands around the products of matrices takes as long as these. ``lift``, where a tile is of one
    page, is 0 if that page is there and −∞ if not.
    """
    if MASKED:
        s = tl.where(visible(position, j, known, WINDOW), s, float("-inf"))
        lift = 0.0
    elif PAGE % TILE != 0:
        s = s + tl.where(known, 0.0, float("-inf"))[None, :]
        lift = 0.0
    return online_softmax(s, top, total, factor, lift, below)


@triton.jit
def softmax_tile(
    s, top, total, factor, position, j, known, lift, n, there, slopes_ptr, cap,
    PAGE: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr, SLOPES: tl.constexpr,
    MASKED: tl.constexpr, below=0.0,
):  # fmt: skip
    """:func:`online_softmax` of a tile's products, of which scores are ``factor`` times as much before they are bent."""
    if CAPPED or SLOPES:
        s = modified_scores(s * factor, position, j, known, n, there, slopes_ptr, cap, WINDOW, CAPPED, SLOPES, MASKED)
        return online_softmax(s, top, total, 1.0, 0.0, below)
    return softmax_of_products(
        s, top, total, factor * LOG2_E, position, j, known, lift, PAGE, TILE, WINDOW, MASKED, below
    )


@triton.jit
def attend_tiles(
    q, o, top, total, start, stop, high, page, position, n, there, head, table_ptr, k_ptr, v_ptr, slopes_ptr,
    k_page, k_p, k_k, v_page, v_p, v_k, columns, pages, factor, cap,
    H: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr, SLOPES: tl.constexpr,
    ALIKE: tl.constexpr, MASKED: tl.constexpr, TILE: tl.constexpr, BLOCK_H: tl.constexpr, STAGES: tl.constexpr,
    EIGHT: tl.constexpr = None, ASM: tl.constexpr = True,
    slot=-1, times=1.0, slot_o_ptr=None, slot_lse_ptr=None, CHUNK: tl.constexpr = 0,
):  # fmt: skip
    """(o, top, total) with the keys of the tiles from ``start`` to ``stop``; of these there are those below ``high``.

    ``page`` is that of the tile at ``start``: who calls may have asked for it long ago.
    Not MASKED, every row sees all of them. ALIKE, keys and values lie alike in their caches. EIGHT, these are halves
    of two numbers of 8 bits (see :mod:`~colonnade.kernels.attention.triton_kv8`), and ``o`` is 0. With CHUNK sums
    begin anew at its multiples, and are those of the last chunk; states of earlier ones, values ``times`` as large, go
    to slots, that of keys from 0 on to ``slot``.
    """
    EACH: tl.constexpr = 2 if EIGHT is not None else 1
    BELOW: tl.constexpr = 15.0 if EIGHT is not None else 0.0
    h = tl.arange(0, BLOCK_H // EACH)
    if EIGHT is not None:
        q, q_odd, back = triton_kv8.split_queries(q)
        factor = factor * back
        o = tl.zeros(q.shape, tl.float32)
        o_odd = o
    # Page numbers are fetched a tile ahead, by hand: loads that wait for loads within a step are what the compiler
    # does not bring under way together.
    for at in tl.range(start, stop, TILE, num_stages=STAGES):
        j = at + tl.arange(0, TILE)
        known = valid_keys(page, j, high, pages)
        lift = tl.where((page >= 0) & (page < pages), 0.0, float("-inf"))
        k_i = key_offsets(page, at, j, k_page, k_p, PAGE, TILE) + h[None, :]
        v_i = k_i
        if not ALIKE:
            v_i = key_offsets(page, at, j, v_page, v_p, PAGE, TILE) + h[None, :]
        k_at, v_at = k_ptr + head * k_k + k_i, v_ptr + head * v_k + v_i
        page = load_page_ids(table_ptr, at + TILE, columns, PAGE, TILE)
        if BLOCK_H == H:
            k = tl.load(k_at, known[:, None], 0.0)
            v = tl.load(v_at, known[:, None], 0.0)
        else:
            k = tl.load(k_at, known[:, None] & (h < H // EACH)[None, :], 0.0)
            v = tl.load(v_at, known[:, None] & (h < H // EACH)[None, :], 0.0)
        if EIGHT is not None:
            s = triton_kv8.scores(q, q_odd, k, EIGHT, ASM)
        else:
            s = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee")
        p, shrink, top, total = softmax_tile(
            s, top, total, factor, position, j, known, lift, n, there, slopes_ptr, cap,
            PAGE, TILE, WINDOW, CAPPED, SLOPES, MASKED, BELOW,
        )  # fmt: skip
        if EIGHT is not None:
            o, o_odd = triton_kv8.weighted_values(p, v, o * shrink[:, None], o_odd * shrink[:, None], EIGHT, ASM)
        else:
            o = tl.dot(p.to(q.dtype), v.to(q.dtype), o * shrink[:, None], input_precision="ieee")
        if CHUNK:
            # Where a chunk ends and another follows, sums are put away and begin anew while tiles are on their way: a
            # loop for each chunk would begin with nothing on its way, which costs as much as a 10th of a chunk.
            if ((at + TILE) % CHUNK == 0) & (at + TILE < stop):
                if EIGHT is not None:
                    found = triton_kv8.interleave(o, o_odd)
                    o_odd = tl.zeros_like(o_odd)
                else:
                    found = o
                found, lse = normalise(found * times, top, total, n, there, slopes_ptr, False)
                store_slot(found, lse, slot + at // CHUNK, there, slot_o_ptr, slot_lse_ptr, H, q.shape[0], BLOCK_H)
                o, total = tl.zeros_like(o), tl.zeros_like(total)
                top = tl.full(top.shape, float("-inf"), tl.float32)
    if EIGHT is not None:
        o = triton_kv8.interleave(o, o_odd)
    return o, top, total


@triton.jit
def store_slot(
    o, lse, slot, there, slot_o_ptr, slot_lse_ptr, H: tl.constexpr, ROWS: tl.constexpr, BLOCK_H: tl.constexpr
):
    """A state, to be merged."""
    h = tl.arange(0, BLOCK_H)
    line = slot.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    tl.store(slot_o_ptr + line[:, None] * H + h[None, :], o, there[:, None] & (h < H)[None, :])
    tl.store(slot_lse_ptr + line, lse, there)


@triton.jit
def store_state(
    o, lse, slot, t, n, there, o_ptr, lse_ptr, slot_o_ptr, slot_lse_ptr,
    N: tl.constexpr, H: tl.constexpr, ROWS: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """What a piece found: to the output where it is a whole line, else to its slot."""
    if slot < 0:
        h = tl.arange(0, BLOCK_H)
        line = t.to(tl.int64) * N + n
        tl.store(
            o_ptr + line[:, None] * H + h[None, :], o.to(o_ptr.dtype.element_ty), there[:, None] & (h < H)[None, :]
        )
        tl.store(lse_ptr + line, lse, there)
    else:
        store_slot(o, lse, slot, there, slot_o_ptr, slot_lse_ptr, H, ROWS, BLOCK_H)


@triton.jit
def last_slot(slot, first, end, CHUNK: tl.constexpr):
    """Where the last chunk of keys ``first`` .. ``end`` − 1 goes, the first going to ``slot``."""
    return tl.where(slot < 0, slot, slot + tl.maximum(end - 1, first) // CHUNK - first // CHUNK)


@triton.jit
def clear_unreached(
    slot, last, there, slot_o_ptr, slot_lse_ptr, H: tl.constexpr, ROWS: tl.constexpr, BLOCK_H: tl.constexpr
):
    """The identity to the slots behind ``slot``, up to ``last``: of chunks that were planned ahead."""
    o, lse = tl.zeros((ROWS, BLOCK_H), tl.float32), tl.full((ROWS,), float("-inf"), tl.float32)
    for ahead in range(1, last - slot + 1):
        store_slot(o, lse, slot + ahead, there, slot_o_ptr, slot_lse_ptr, H, ROWS, BLOCK_H)


@triton.jit
def load_item(items_ptr, i, there=None, other=None):
    """(request, head, block, first key, end, slot) of a plan's i-th piece; ``other`` where it is not ``there``."""
    at = items_ptr + i * FIELDS
    request, head = tl.load(at, there, other), tl.load(at + 1, there, other)
    block, first = tl.load(at + 2, there, other), tl.load(at + 3, there, other)
    return request, head, block, first, tl.load(at + 4, there, other), tl.load(at + 5, there, other)


@triton.jit
def _load_length_and_page(
    lengths_ptr, pages_ptr, request, first, pages_r, columns, PAGE: tl.constexpr, TILE: tl.constexpr
):
    """(how long a request is, the page of the tile at ``first``)."""
    page = load_page_ids(pages_ptr + request.to(tl.int64) * pages_r, first // TILE * TILE, columns, PAGE, TILE)
    return tl.load(lengths_ptr + request), page


@triton.jit
def _load_queries(
    q_ptr, cu_ptr, request, head, block, q_t, q_n,
    GROUP: tl.constexpr, H: tl.constexpr, SINGLE: tl.constexpr, ROWS: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """A block's rows."""
    h = tl.arange(0, BLOCK_H)
    if SINGLE:
        t, n, _, there, _ = block_rows_single_query(request, head, block, GROUP, ROWS)
    else:
        t, n, _, there, _ = block_rows(cu_ptr, request, head, block, GROUP, ROWS)
    q_at = q_ptr + t.to(tl.int64)[:, None] * q_t + n[:, None] * q_n + h[None, :]
    return tl.load(q_at, there[:, None] & (h < H)[None, :], 0.0)


# They change from step to step.
@triton.jit(do_not_specialize=["pages_r", "columns", "pages", "items_at", "firsts_at"])
def attend(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, slot_o_ptr, slot_lse_ptr, plan_ptr, pages_ptr, cu_ptr, lengths_ptr,
    slopes_ptr, sinks_ptr, k_scale_ptr, v_scale_ptr,
    q_t, q_n, k_page, k_p, k_k, v_page, v_p, v_k, pages_r, columns, pages, items_at, firsts_at, scale, cap,
    N: tl.constexpr, GROUP: tl.constexpr, H: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr,
    CAPPED: tl.constexpr, SLOPES: tl.constexpr, SINKS: tl.constexpr, SCALED: tl.constexpr, LAUNCH_NEXT: tl.constexpr,
    SINGLE: tl.constexpr, ALIKE: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, BLOCK_H: tl.constexpr,
    STAGES: tl.constexpr, EIGHT: tl.constexpr = None, ASM: tl.constexpr = True, CHUNK: tl.constexpr = 0,
    AHEAD: tl.constexpr = True,
):  # fmt: skip
    """All pieces of one worker. SINGLE: every request has one query, number r that of request r.

    With AHEAD what a piece begins with is there before the one before it is written, for 30 registers more. With CHUNK
    a piece is a run of chunks, each of which has a state of its own, in slots one after another.
    """
    # Until keys are on their way, every load that waits for another costs a 30th of a short call: a worker's first
    # piece stands where it is found at once, and where nothing needs to be looked up nothing is.
    at_first = plan_ptr + firsts_at + tl.program_id(0) * FIELDS
    request, head, block, first, end, slot = load_item(at_first, 0)
    count = tl.load(at_first + 6)
    start = tl.load(plan_ptr + 4 + tl.program_id(0))
    if LAUNCH_NEXT:
        # The merge may take its place now; it waits for the end of this before it reads.
        tl.extra.cuda.gdc_launch_dependents()
    if AHEAD:
        length, page = _load_length_and_page(lengths_ptr, pages_ptr, request, first, pages_r, columns, PAGE, TILE)
        q = _load_queries(q_ptr, cu_ptr, request, head, block, q_t, q_n, GROUP, H, SINGLE, ROWS, BLOCK_H)
        request_1, head_1, block_1, first_1, end_1, slot_1 = request, head, block, first, end, slot
        if count > 1:
            request_1, head_1, block_1, first_1, end_1, slot_1 = load_item(plan_ptr + items_at, start + 1)
    for i in range(count):
        if AHEAD:
            # What the next piece is was asked for a piece ago; what it needs is asked for now, beside this one's keys.
            length_1, page_1, q_1 = length, page, q
            request_2, head_2, block_2, first_2, end_2, slot_2 = request_1, head_1, block_1, first_1, end_1, slot_1
            if i + 1 < count:
                length_1, page_1 = _load_length_and_page(
                    lengths_ptr, pages_ptr, request_1, first_1, pages_r, columns, PAGE, TILE
                )
                q_1 = _load_queries(
                    q_ptr, cu_ptr, request_1, head_1, block_1, q_t, q_n, GROUP, H, SINGLE, ROWS, BLOCK_H
                )
                if i + 2 < count:
                    request_2, head_2, block_2, first_2, end_2, slot_2 = load_item(plan_ptr + items_at, start + i + 2)
        else:
            length = tl.load(lengths_ptr + request)
        if SINGLE:
            t, n, query, there, new = block_rows_single_query(request, head, block, GROUP, ROWS)
        else:
            t, n, query, there, new = block_rows(cu_ptr, request, head, block, GROUP, ROWS)
        position = length - new + query
        low, high = first // TILE * TILE, tl.minimum(end, length)
        if not AHEAD:
            q = _load_queries(q_ptr, cu_ptr, request, head, block, q_t, q_n, GROUP, H, SINGLE, ROWS, BLOCK_H)
        factor = scale
        if SCALED:
            factor = scale * tl.load(k_scale_ptr + head)
        top = tl.full((ROWS,), float("-inf"), tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        o = tl.zeros((ROWS, BLOCK_H), tl.float32)
        table_ptr = pages_ptr + request.to(tl.int64) * pages_r
        times, last = 1.0, slot
        if CHUNK:
            last = last_slot(slot, first, end, CHUNK)
            if SCALED:
                times = tl.load(v_scale_ptr + head)
        if not AHEAD:
            page = load_page_ids(table_ptr, low, columns, PAGE, TILE)
        o, top, total = attend_tiles(
            q, o, top, total, low, high, high, page, position, n, there, head, table_ptr, k_ptr, v_ptr, slopes_ptr,
            k_page, k_p, k_k, v_page, v_p, v_k, columns, pages, factor, cap,
            H, PAGE, WINDOW, CAPPED, SLOPES, ALIKE, True, TILE, BLOCK_H, STAGES, EIGHT, ASM,
            slot - first // CHUNK if CHUNK else slot, times, slot_o_ptr, slot_lse_ptr, CHUNK,
        )  # fmt: skip
        if CHUNK:
            slot = last_slot(slot, first, high, CHUNK)
        if SCALED:
            o = o * tl.load(v_scale_ptr + head)
        # Sinks are one key, not one a piece: of what was cut the merge adds them.
        o, lse = normalise(o, top, total, n, tl.where(slot < 0, there, False), sinks_ptr, SINKS)
        store_state(o, lse, slot, t, n, there, o_ptr, lse_ptr, slot_o_ptr, slot_lse_ptr, N, H, ROWS, BLOCK_H)
        if CHUNK:
            clear_unreached(slot, last, there, slot_o_ptr, slot_lse_ptr, H, ROWS, BLOCK_H)
        if AHEAD:
            request, head, block, first, end, slot = request_1, head_1, block_1, first_1, end_1, slot_1
            request_1, head_1, block_1, first_1, end_1, slot_1 = request_2, head_2, block_2, first_2, end_2, slot_2
            length, page, q = length_1, page_1, q_1
        else:
            request, head, block, first, end, slot = load_item(plan_ptr + items_at, start + i + 1, i + 1 < count, 0)
