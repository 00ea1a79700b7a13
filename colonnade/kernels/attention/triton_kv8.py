"""8-bit keys and values on 16-bit tensor cores, converted in registers.

    s = q⁰ k⁰ᵀ + q¹ k¹ᵀ        oʲ ← oʲ · rescale + p vʲ        j: even and odd elements of a head

The cache is read as 16-bit words of two elements each: a tile of words is loaded from shared memory like float16
(``ldmatrix``), and each register's two words become four float16 numbers, with these instructions:

    float8    one that sorts bytes by j; for each j one that converts two
    int8      one that flips signs; for each j one that builds 1152 + n from a byte, and one that subtracts 1152

All are exact. The result is float16 for bfloat16 queries too, since no instruction converts to pairs of bfloat16. A
block of queries is scaled by a power of 2 such that its maximum is between 2^14 and 2^15. Relative to the maximum,
float16 then represents values above 2^−32 as precisely as bfloat16, and values below 2^−40 underflow. Softmax weights
are scaled to at most 2^15 instead of 1, so that many small weights with a significant sum do not underflow; they are
rounded to 11 bits instead of 8.
"""

import torch
import triton
from torch import Tensor
from triton import language as tl

KINDS = {torch.float8_e4m3fn: "float8", torch.int8: "int8"}
MIN_WIDTH = 64
"""Minimum block width of a head: with 32 elements a warp would not have its own part."""


def kv8_kind(q_TNH: Tensor, k_PpKH: Tensor, v_PpKH: Tensor) -> str | None:
    """The kind of 8-bit cache that this path supports; None for other dtypes, odd strides or float32 queries."""
    even = all(not n % 2 for x in (k_PpKH, v_PpKH) for n in (x.shape[-1], x.storage_offset(), *x.stride()[:-1]))
    if even and q_TNH.element_size() == 2 and triton.next_power_of_2(q_TNH.shape[-1]) >= MIN_WIDTH:
        return KINDS.get(k_PpKH.dtype) if k_PpKH.dtype == v_PpKH.dtype else None
    return None


@triton.constexpr_function
def _unpack_ptx(kind: str, j: int) -> str:
    """PTX that makes two numbers, of element ``j``, from a register of two words."""
    if kind == "float8":
        return (
            "{ .reg .b32 t; .reg .b16 a, b; prmt.b32 t, $1, 0, 0x3120; mov.b32 {a, b}, t; "
            f"cvt.rn.f16x2.e4m3x2 $0, {'ab'[j]}; }}"
        )
    return (
        "{ .reg .b32 t, m; xor.b32 t, $1, 0x80808080; mov.b32 m, 0x64806480; "
        f"prmt.b32 t, t, 0x64646464, {('0x4240', '0x4341')[j]}; sub.rn.f16x2 $0, t, m; }}"
    )


@triton.jit
def _unpack(w, j: tl.constexpr, KIND: tl.constexpr, ASM: tl.constexpr):
    """Element j of each word, in float16."""
    if ASM:
        CODE: tl.constexpr = _unpack_ptx(KIND, j)
        bits = tl.inline_asm_elementwise(CODE, "=r,r", [w], tl.int16, is_pure=True, pack=2)
        return bits.to(tl.float16, bitcast=True)
    byte = (w >> (8 * j)).to(tl.int8)
    return (byte.to(tl.float8e4nv, bitcast=True) if KIND == "float8" else byte).to(tl.float16)


@triton.jit
def split_queries(q):
    """(even elements, odd elements, factor for the products) of q (rows, width).

    The first two are float16, (rows, width / 2).
    """
    q32 = q.to(tl.float32)
    magnitude = tl.abs(q32)
    # A row that is not finite must not affect the others.
    largest = tl.max(tl.max(tl.where(magnitude < float("inf"), magnitude, 0.0), 1), 0)
    # If all queries are below 2^-31, scores are 0; a factor of 0 would make NaN of masked scores.
    exponent = tl.maximum(largest.to(tl.int32, bitcast=True) >> 23, 96)
    query_scale = ((268 - exponent) << 23).to(tl.float32, bitcast=True)
    product_scale = ((exponent - 14) << 23).to(tl.float32, bitcast=True)
    even, odd = tl.split(tl.reshape((q32 * query_scale).to(tl.float16), [q.shape[0], q.shape[1] // 2, 2]))
    return even, odd, product_scale


@triton.jit
def scores(even, odd, k, KIND: tl.constexpr, ASM: tl.constexpr):
    """(rows, TILE): products of :func:`split_queries` with a tile of key words (TILE, width / 2)."""
    s = tl.dot(even, tl.trans(_unpack(k, 0, KIND, ASM)))
    return tl.dot(odd, tl.trans(_unpack(k, 1, KIND, ASM)), s)


@triton.jit
def weighted_values(p, v, even, odd, KIND: tl.constexpr, ASM: tl.constexpr):
    """Adds a tile's weighted values to the sums (rows, width / 2) of even and odd elements."""
    p = p.to(tl.float16)
    return tl.dot(p, _unpack(v, 0, KIND, ASM), even), tl.dot(p, _unpack(v, 1, KIND, ASM), odd)


@triton.jit
def interleave(even, odd):
    """(rows, width) from the even and odd elements."""
    return tl.reshape(tl.join(even, odd), [even.shape[0], even.shape[1] * 2])
