"""Kernels for products with quantised weights: each weight is read once, in its few bits, and widened in registers.

``thin``, for one row: a program has BN outputs, keeps a sum for every column of its tile, and adds them up at the
end. An int4 word's eight nibbles are never shifted down to integers: a nibble put into bits 16 … 19 of the bits of
128.0 *is* 128 + q, and in bits 12 … 15 of those of 2048.0 it is 2048 + q; so two nibbles a shift, one ``and``-``or``
each, and what was added to all comes off once a column.

``tiles``, for more rows: a tile of weights, widened to the type of x, times a tile of x on the matrix units. Of int4,
one product for each of a word's nibbles, since the words' nibble i are neighbouring inputs.

``widen`` writes W out, for a product of many rows.

The first two cut the inputs into ``splits`` where there are too few outputs to keep a GPU busy; every split writes sums
of its own, in float32, which ``add`` adds afterwards in their order: two runs give the same bits.
"""

# pyright: reportArgumentType=false, reportOptionalMemberAccess=false, reportGeneralTypeIssues=false

import triton
import triton.language as tl


@triton.jit
def scale_and_low(pairs_ptr, rows, groups, group_count, mask):
    """s and m of int4 groups, which lie side by side in one int32."""
    pair = tl.load(pairs_ptr + rows * group_count + groups, mask=mask, other=0)
    return (pair << 16).to(tl.float32, bitcast=True), (pair & -65536).to(tl.float32, bitcast=True)


@triton.jit
def nibble(words, i: tl.constexpr):
    """The q in bits 4i … 4i+3, which come to bits 16 … 19 of 128.0."""
    moved = words << (16 - 4 * i) if i < 4 else words >> (4 * i - 16)
    return ((moved & 0xF0000) | 0x43000000).to(tl.float32, bitcast=True) - 128.0


@triton.jit
def gemv_kernel(
    x_ptr, w_ptr, scale_ptr, out_ptr,
    outputs, inputs, columns, groups, step,
    KIND: tl.constexpr, WORDS: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """out[split, outputs] of one row x; ``columns`` are those of the stored weights: inputs, or words of eight. A split
    has ``step`` of them; a group has WORDS.
    """
    n = (tl.program_id(0) * BN + tl.arange(0, BN))[:, None]
    split = tl.program_id(1)
    inside = n < outputs
    first = split * step
    last = tl.minimum(columns, first + step)
    w_row = w_ptr + n.to(tl.int64) * columns
    total = tl.zeros([BN, BK], tl.float32)
    for at in range(first, last, BK):
        c = (at + tl.arange(0, BK))[None, :]
        here = inside & (c < last)
        w = tl.load(w_row + c, mask=here, other=0.0)
        if KIND == "int4":
            group = c // WORDS
            scale, low = scale_and_low(scale_ptr, n, group, groups, here)
            k = group * (8 * WORDS) + c % WORDS
            part = tl.zeros([BN, BK], tl.float32)
            sums, lifted = tl.zeros([1, BK], tl.float32), tl.zeros([1, BK], tl.float32)
            for i in tl.static_range(8):
                place = k + i * WORDS
                x = tl.load(x_ptr + place, mask=(c < last) & (place < inputs), other=0).to(tl.float32)
                sums += x
                if i % 2 == 0:  # bits 4i … 4i+3 come to bits 12 … 15
                    moved = w << (12 - 4 * i) if i < 3 else w >> (4 * i - 12)
                    part += ((moved & 0xF000) | 0x45000000).to(tl.float32, bitcast=True) * x
                    lifted += 2048.0 * x
                else:  # to bits 16 … 19
                    moved = w << (16 - 4 * i) if i < 4 else w >> (4 * i - 16)
                    part += ((moved & 0xF0000) | 0x43000000).to(tl.float32, bitcast=True) * x
                    lifted += 128.0 * x
            total += (part - lifted) * scale + sums * low
        else:
            x = tl.load(x_ptr + c, mask=c < last, other=0).to(tl.float32)
            total += w.to(tl.float32) * x
    y = tl.sum(total, 1)[:, None]
    if KIND != "int4":
        y *= tl.load(scale_ptr + n, mask=inside, other=0)
    tl.store(out_ptr + split.to(tl.int64) * outputs + n, y, mask=inside)


@triton.jit
def skinny_kernel(
    x_ptr, w_ptr, scale_ptr, out_ptr,
    rows, outputs, inputs, columns, groups, x_t, step,
    KIND: tl.constexpr, WORDS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """out[split, rows, outputs] of at most BM rows, as :func:`gemv_kernel`."""
    n = (tl.program_id(0) * BN + tl.arange(0, BN))[:, None]
    split, m = tl.program_id(1), tl.arange(0, BM)
    inside = n < outputs
    first = split * step
    last = tl.minimum(columns, first + step)
    w_row = w_ptr + n.to(tl.int64) * columns
    x_row = x_ptr + m[None, :].to(tl.int64) * x_t
    theirs = (m < rows)[None, :]
    kind = x_ptr.dtype.element_ty
    total = tl.zeros([BN, BM], tl.float32)
    for at in range(first, last, BK):
        c = at + tl.arange(0, BK)
        w = tl.load(w_row + c[None, :], mask=inside & (c[None, :] < last), other=0.0)
        if KIND == "int4":
            group = c // WORDS
            scale, low = scale_and_low(scale_ptr, n, group[None, :], groups, inside & (c[None, :] < last))
            k = (group * (8 * WORDS) + c % WORDS)[:, None]
            for i in tl.static_range(8):
                place = k + i * WORDS
                seen = theirs & (c[:, None] < last) & (place < inputs)
                x = tl.load(x_row + place, mask=seen, other=0)
                total = tl.dot((nibble(w, i) * scale + low).to(kind), x, total, input_precision="ieee")
        else:
            x = tl.load(x_row + c[:, None], mask=theirs & (c[:, None] < last), other=0)
            total = tl.dot(w.to(kind), x, total, input_precision="ieee")
    if KIND != "int4":
        total *= tl.load(scale_ptr + n, mask=inside, other=0)
    places = (split * rows + m[None, :]).to(tl.int64) * outputs + n
    tl.store(out_ptr + places, total, mask=inside & theirs)


@triton.jit
def dequantise_kernel(
    w_ptr, scale_ptr, out_ptr, outputs, inputs, columns, groups,
    KIND: tl.constexpr, WORDS: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """out[outputs, inputs] of the type that is asked for."""
    n = (tl.program_id(0) * BN + tl.arange(0, BN))[:, None]
    c = (tl.program_id(1) * BK + tl.arange(0, BK))[None, :]
    here = (n < outputs) & (c < columns)
    w = tl.load(w_ptr + n.to(tl.int64) * columns + c, mask=here, other=0.0)
    out_row = out_ptr + n.to(tl.int64) * inputs
    if KIND == "int4":
        group = c // WORDS
        scale, low = scale_and_low(scale_ptr, n, group, groups, here)
        k = group * (8 * WORDS) + c % WORDS
        for i in tl.static_range(8):
            place = k + i * WORDS
            q = ((w >> 4 * i) & 15).to(tl.float32)
            tl.store(out_row + place, q * scale + low, mask=here & (place < inputs))
    else:
        scale = tl.load(scale_ptr + n, mask=n < outputs, other=0)
        tl.store(out_row + c, w.to(tl.float32) * scale, mask=here)


@triton.jit
def sum_splits_kernel(parts_ptr, out_ptr, numbers, splits, BLOCK: tl.constexpr):
    """out = Σ parts, split by split."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for split in range(splits):
        total += tl.load(parts_ptr + split * numbers + i, mask=i < numbers, other=0)
    tl.store(out_ptr + i, total, mask=i < numbers)
