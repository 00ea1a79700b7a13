"""GEMM kernels with weight-only quantised weights, dequantised in registers: each weight is read once, in its few bits.

``split_k_kernel``, for a few rows: a tile of weights, converted to the dtype of x, times a tile of x on tensor cores.
int4 takes one product for each of a word's eight nibbles, since nibble i of consecutive words are consecutive inputs.
Where there are too few outputs to keep a GPU busy, the inputs are cut into splits. Each split writes its own sums, in
float32, which ``sum_splits_kernel`` adds in order, so results are reproducible bit for bit.

``dequantise_kernel`` writes W to memory, for GEMMs of many rows.
"""

import triton
import triton.language as tl


@triton.jit
def scale_and_low(pairs_ptr, rows, groups, group_count, mask):
    """s and m of int4 groups, a pair of bfloat16 in one int32."""
    pair = tl.load(pairs_ptr + rows * group_count + groups, mask=mask, other=0)
    return (pair << 16).to(tl.float32, bitcast=True), (pair & -65536).to(tl.float32, bitcast=True)


@triton.jit
def nibble(words, i: tl.constexpr):
    """The value q in bits 4i … 4i+3, as float32: as bits 16 … 19 of the bit pattern of 128.0 it makes 128 + q."""
    shifted = words << (16 - 4 * i) if i < 4 else words >> (4 * i - 16)
    return ((shifted & 0xF0000) | 0x43000000).to(tl.float32, bitcast=True) - 128.0


@triton.jit
def split_k_kernel(
    x_ptr, w_ptr, scale_ptr, out_ptr,
    rows, outputs, inputs, columns, groups, x_t, step,
    KIND: tl.constexpr, WORDS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """out[split, rows, outputs] of at most BM rows; a split has ``step`` of the stored ``columns``.

    Stored columns are inputs, or int32 words of eight int4 inputs; a group has WORDS words.
    """
    n = (tl.program_id(0) * BN + tl.arange(0, BN))[:, None]
    split, m = tl.program_id(1), tl.arange(0, BM)
    n_valid = n < outputs
    first = split * step
    last = tl.minimum(columns, first + step)
    w_row = w_ptr + n.to(tl.int64) * columns
    x_row = x_ptr + m[None, :].to(tl.int64) * x_t
    m_valid = (m < rows)[None, :]
    dtype = x_ptr.dtype.element_ty
    total = tl.zeros([BN, BM], tl.float32)
    for c0 in range(first, last, BK):
        c = c0 + tl.arange(0, BK)
        w = tl.load(w_row + c[None, :], mask=n_valid & (c[None, :] < last), other=0.0)
        if KIND == "int4":
            group = c // WORDS
            scale, low = scale_and_low(scale_ptr, n, group[None, :], groups, n_valid & (c[None, :] < last))
            k = (group * (8 * WORDS) + c % WORDS)[:, None]
            for i in tl.static_range(8):
                d = k + i * WORDS
                x_valid = m_valid & (c[:, None] < last) & (d < inputs)
                x = tl.load(x_row + d, mask=x_valid, other=0)
                total = tl.dot((nibble(w, i) * scale + low).to(dtype), x, total, input_precision="ieee")
        else:
            x = tl.load(x_row + c[:, None], mask=m_valid & (c[:, None] < last), other=0)
            total = tl.dot(w.to(dtype), x, total, input_precision="ieee")
    if KIND != "int4":
        total *= tl.load(scale_ptr + n, mask=n_valid, other=0)
    at = (split * rows + m[None, :]).to(tl.int64) * outputs + n
    tl.store(out_ptr + at, total, mask=n_valid & m_valid)


@triton.jit
def dequantise_kernel(
    w_ptr, scale_ptr, out_ptr, outputs, inputs, columns, groups,
    KIND: tl.constexpr, WORDS: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """out[outputs, inputs], dequantised."""
    n = (tl.program_id(0) * BN + tl.arange(0, BN))[:, None]
    c = (tl.program_id(1) * BK + tl.arange(0, BK))[None, :]
    valid = (n < outputs) & (c < columns)
    w = tl.load(w_ptr + n.to(tl.int64) * columns + c, mask=valid, other=0.0)
    out_row = out_ptr + n.to(tl.int64) * inputs
    if KIND == "int4":
        group = c // WORDS
        scale, low = scale_and_low(scale_ptr, n, group, groups, valid)
        k = group * (8 * WORDS) + c % WORDS
        for i in tl.static_range(8):
            d = k + i * WORDS
            q = ((w >> 4 * i) & 15).to(tl.float32)
            tl.store(out_row + d, q * scale + low, mask=valid & (d < inputs))
    else:
        scale = tl.load(scale_ptr + n, mask=n < outputs, other=0)
        tl.store(out_row + c, w.to(tl.float32) * scale, mask=valid)


@triton.jit
def sum_splits_kernel(parts_ptr, out_ptr, size, splits, BLOCK: tl.constexpr):
    """out = Σ parts, in the order of the splits."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for split in range(splits):
        total += tl.load(parts_ptr + split * size + i, mask=i < size, other=0)
    tl.store(out_ptr + i, total, mask=i < size)
