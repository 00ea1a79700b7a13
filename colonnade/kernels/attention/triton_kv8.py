"""Products with keys and values of 8 bits as they lie in a cache, on the matrix units of 16-bit numbers.

    s = q⁰ k⁰ᵀ + q¹ k¹ᵀ        oʲ ← oʲ · shrink + p vʲ        j: numbers of even and of odd places of a head

A cache is read as halves of 16 bits, two numbers each: a tile of halves goes from shared memory into registers as one
of float16 would (``ldmatrix``), and a register's two halves become four numbers of float16 there, with these
instructions:

    float8    one that sorts bytes by j; for each j one that converts two
    int8      one that turns signs; for each j one that sets bytes as 1152 + n, and one that takes 1152 off

All are exact. They are float16 for queries of bfloat16 too, for no instruction makes two of these. A block of queries
is multiplied by the power of 2 that takes its largest number to between 2^14 and 2^15: then float16 holds whatever is
above 2^−32 of it as bfloat16 does, and loses what is below 2^−40 of it. Weights are 2^15 at most, not 1, lest many
small ones vanish that together count; they are rounded to 11 bits, not to 8.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# pyright: reportCallIssue=false, reportAssignmentType=false

import torch
import triton
from torch import Tensor
from triton import language as tl

KINDS = {torch.float8_e4m3fn: "float8", torch.int8: "int8"}
MIN_WIDTH = 64
"""Numbers of a head's block: of half as many a warp would not have a part of its own."""


def kv8_kind(q_TNH: Tensor, k_PpKH: Tensor, v_PpKH: Tensor) -> str | None:
    """How such caches are read here; None: other types, places of odd numbers, queries of float32."""
    even = all(not n % 2 for x in (k_PpKH, v_PpKH) for n in (x.shape[-1], x.storage_offset(), *x.stride()[:-1]))
    if even and q_TNH.element_size() == 2 and triton.next_power_of_2(q_TNH.shape[-1]) >= MIN_WIDTH:
        return KINDS.get(k_PpKH.dtype) if k_PpKH.dtype == v_PpKH.dtype else None
    return None


@triton.constexpr_function
def _unpack_ptx(kind: str, j: int) -> str:
    """What makes two numbers, of place ``j``, of a register of two halves; both places share what they can."""
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
    """Number j of each half, in float16."""
    if ASM:
        CODE: tl.constexpr = _unpack_ptx(KIND, j)
        bits = tl.inline_asm_elementwise(CODE, "=r,r", [w], tl.int16, is_pure=True, pack=2)
        return bits.to(tl.float16, bitcast=True)
    byte = (w >> (8 * j)).to(tl.int8)
    return (byte.to(tl.float8e4nv, bitcast=True) if KIND == "float8" else byte).to(tl.float16)


@triton.jit
def split_queries(q):
    """(numbers of even places, of odd places, by what products are to be multiplied) of q (rows, width).

    The first two are (rows, width / 2), in float16.
    """
    wide = q.to(tl.float32)
    size = tl.abs(wide)
    # A row that is not finite is so by itself.
    largest = tl.max(tl.max(tl.where(size < float("inf"), size, 0.0), 1), 0)
    # Of queries all below 2^-31 scores are 0, and a factor of them that came to 0 would make NaN of what is not seen.
    exponent = tl.maximum(largest.to(tl.int32, bitcast=True) >> 23, 96)
    up = ((268 - exponent) << 23).to(tl.float32, bitcast=True)
    back = ((exponent - 14) << 23).to(tl.float32, bitcast=True)
    even, odd = tl.split(tl.reshape((wide * up).to(tl.float16), [q.shape[0], q.shape[1] // 2, 2]))
    return even, odd, back


@triton.jit
def scores(even, odd, k, KIND: tl.constexpr, ASM: tl.constexpr):
    """(rows, TILE) of :func:`split_queries` with the halves (TILE, width / 2) of keys."""
    s = tl.dot(even, tl.trans(_unpack(k, 0, KIND, ASM)))
    return tl.dot(odd, tl.trans(_unpack(k, 1, KIND, ASM)), s)


@triton.jit
def weighted_values(p, v, even, odd, KIND: tl.constexpr, ASM: tl.constexpr):
    """Sums (rows, width / 2) of weighted values of even and of odd places, with those of a tile of halves."""
    p = p.to(tl.float16)
    return tl.dot(p, _unpack(v, 0, KIND, ASM), even), tl.dot(p, _unpack(v, 1, KIND, ASM), odd)


@triton.jit
def interleave(even, odd):
    """(rows, width) of :func:`weighted_values`."""
    return tl.reshape(tl.join(even, odd), [even.shape[0], even.shape[1] * 2])
