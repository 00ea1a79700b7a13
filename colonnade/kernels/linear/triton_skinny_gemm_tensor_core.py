"""Skinny GEMM of 1 to 16 rows with quantised weights on tensor cores, fused with norm, gate and residual.

    y = act(W x̂) ⊙ (U x̂)   or   y = W x̂ + b,    + r         (see :mod:`~colonnade.kernels.linear.triton_skinny_gemm`)

On CUDA cores a weight takes four to six instructions, here one and a half (int4) to two and a half (float8), about one
of which unpacks it. Stored weights are read as 16-bit units, and a tile of units goes from shared memory to registers
like a tile of bfloat16 (``ldmatrix``): a register holds two units, and one ``and``-``or`` turns both into values of the
dtype of x:

    int4      q as the last bits of 128.0 makes 128 + q            four per unit, one shift each
    int8      128 + (q and 127) minus 128 + (q and 128)            two per unit; the difference is taken of the sums
    float8    sign, exponent and mantissa moved to bfloat16's      two per unit, all scaled by 2^−120

(1024.0 and 2^−8 in float16.) The values at one position of all units form a matrix of their own, and each such matrix
is multiplied with the inputs that belong to that position.

A tensor core instruction has at least eight columns. With fewer rows, int4 uses the other columns for groups: the
inputs of each group are in their own columns, with zeros elsewhere, so that sums of several groups come out separately,
and a group's s and m are applied once, to a sum. The lift of the nibbles is subtracted there too, with the sum of a
group's inputs, which is a product with ones.

A warp handles a part of the inputs (the batch of a 3-D product), not of the outputs. So 16 outputs occupy a whole SM,
and if STEPS is 1, a warp's inputs stay in its registers from one block of outputs to the next. Nothing is split between
programs, and sums are in a fixed order; a row's result does not depend on the other rows.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from colonnade.kernels.linear.triton_skinny_gemm import epilogue, load_residual

FLOAT8_SCALE = tl.constexpr(2.0**40)
"""Scale of x where weights are scaled by 2^−120, so that products stay within float32."""


class Constants(NamedTuple):
    """Compile-time constants of :func:`tensor_core_kernel`; :mod:`skinny_gemm_tiles` computes those of a step."""

    KIND: str
    SCALED: bool
    """Whether each output has a scale: all kinds but int4."""
    WORDS: int
    """Words per int4 group."""
    NORM: bool
    ACT: str
    """The gate's activation; empty without a gate."""
    BIASED: bool
    RESIDUAL: bool
    EVEN: bool
    STEPS: int
    M: int
    BN: int
    BATCH: int
    K: int
    PARTS: int
    SPAN: int
    STAGES: int
    ASM: bool
    """Whether PTX unpacks; the interpreter cannot run it."""


@triton.constexpr_function
def unpack_assembly(what: str, j: int, brain: bool) -> str:
    """PTX that unpacks a value from each of two units (see :func:`_unpack`), to bfloat16 (``brain``) or float16.

    In Triton code, constants become separate ``and`` and ``or`` instructions; as kernel arguments they would keep the
    compiler from loading units straight into tensor core registers.
    """
    if what == "float8":
        up, bits, mask = f"shl.b32 w, $1, {8 - 8 * j};", 4 if brain else 1, "0x07F007F0" if brain else "0x3F803F80"
        sign = "and.b32 w, w, 0x80008000;"
        return f"{{ .reg .b32 t, w; {up} shr.b32 t, w, {bits}; {sign} lop3.b32 $0, t, {mask}, w, 0xEA; }}"
    mask, each = {"nibble": ("0x000F000F", 4), "seven": ("0x007F007F", 8), "eighth": ("0x00800080", 8)}[what]
    lift = "0x43004300" if brain else "0x64006400"
    return f"{{ .reg .b32 t; shr.b32 t, $1, {each * j}; lop3.b32 $0, t, {mask}, {lift}, 0xEA; }}"


@triton.jit
def _unpack(w, j: tl.constexpr, WHAT: tl.constexpr, T: tl.constexpr, ASM: tl.constexpr):
    """A value of each unit as dtype T, by WHAT (for float16: 1024 and 2^−8).

    "nibble": 128 + nibble j. "seven": 128 + the low seven bits of byte j. "eighth": 128, or 256 where byte j is
    negative (128 with one more in its exponent). "float8": 2^−120 times the float8 in byte j.
    """
    B: tl.constexpr = T.is_bf16()
    if ASM:
        CODE: tl.constexpr = unpack_assembly(WHAT, j, B)
        bits = tl.inline_asm_elementwise(CODE, "=r,r", [w], tl.int16, is_pure=True, pack=2)
    elif WHAT == "float8":
        up = w << (8 - 8 * j)
        bits = (up & -32768) | ((up >> 4) & 0x07F0 if B else (up >> 1) & 0x3F80)
    else:
        shifted = w >> (4 * j if WHAT == "nibble" else 8 * j)
        bits = (shifted & (15 if WHAT == "nibble" else 127 if WHAT == "seven" else 128)) | (0x4300 if B else 0x6400)
    return bits.to(tl.int16).to(T, bitcast=True)


@triton.jit
def _dot(a, b, acc, ASM: tl.constexpr):
    """acc + a b; the interpreter cannot multiply bfloat16."""
    if ASM:
        return tl.dot(a, b, acc)
    return tl.dot(a.to(tl.float32), b.to(tl.float32), acc)


@triton.jit
def _permute_inputs(low, high, C: tl.constexpr):
    """The right operand (BATCH, K, PARTS · M) from inputs (M, words) of low and high units of words.

    SPAN units of each K belong to a part. Two inputs are moved as one 32-bit value: half as many selects and stores.
    """
    T: tl.constexpr = low.dtype
    pair = (low.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF) | (high.to(tl.int16, bitcast=True).to(tl.int32) << 16)
    pair = tl.permute(tl.reshape(pair, [C.M, C.BATCH, C.K // 2]), (1, 0, 2))[:, None, :, :]
    part = (tl.arange(0, C.K // 2) // (C.SPAN // 2))[None, None, None, :] == tl.arange(0, C.PARTS)[None, :, None, None]
    pair = tl.reshape(tl.where(part, pair, 0), [C.BATCH, C.PARTS * C.M, C.K // 2])
    x = tl.join(pair.to(tl.int16), (pair >> 16).to(tl.int16))
    return tl.permute(tl.reshape(x, [C.BATCH, C.PARTS * C.M, C.K]).to(T, bitcast=True), (0, 2, 1))


@triton.jit
def _load(ptr, at, valid, EVEN: tl.constexpr):
    """Elements ``at``, masked by ``valid`` unless EVEN."""
    if EVEN:
        return tl.load(ptr + at)
    return tl.load(ptr + at, valid, 0.0)


@triton.jit
def _load_inputs(x_row, gain_ptr, word, inputs, UP: tl.constexpr, C: tl.constexpr):
    """(x for each position in a unit, the sum of each part (BATCH, 1, PARTS · M), squares), from ``word`` on."""
    T: tl.constexpr = x_row.dtype.element_ty
    BW: tl.constexpr = C.BATCH * C.K // 2
    EACH: tl.constexpr = 8 if C.KIND == "int4" else 4
    at = EACH * word + tl.arange(0, EACH * BW)[None, :]
    x = _load(x_row, at, at < inputs, C.EVEN)
    wide = x.to(tl.float32)
    if C.NORM:
        x = (wide * _load(gain_ptr, at, at < inputs, C.EVEN).to(tl.float32) * UP).to(T)
    elif UP != 1.0:
        x = (wide * UP).to(T)
    xs = ()
    sums = tl.zeros([C.BATCH, 16, C.PARTS * C.M], tl.float32)
    if C.KIND == "int4":
        x = tl.permute(tl.reshape(x, [C.M, BW // C.WORDS, 8, C.WORDS]), (0, 1, 3, 2))
        even, odd = tl.split(tl.reshape(x, [C.M, BW, 2, 2, 2]))
        first, third = tl.split(even)
        second, fourth = tl.split(odd)
        halves = (first, second, third, fourth)
        for j in tl.static_range(4):
            low, high = tl.split(halves[j])
            b = _permute_inputs(low, high, C)
            sums = _dot(tl.full([C.BATCH, 16, C.K], 1.0, T), b, sums, C.ASM)
            xs = xs + (b,)  # noqa: RUF005 - what Triton compiles
    else:
        first, second = tl.split(tl.reshape(x, [C.M, BW, 2, 2]))
        halves = (first, second)
        for j in tl.static_range(2):
            low, high = tl.split(halves[j])
            xs = xs + (_permute_inputs(low, high, C),)  # noqa: RUF005
    # All sixteen rows of the product with ones are equal.
    return xs, tl.sum(sums, 1)[:, None, :] * 0.0625, wide * wide


@triton.jit
def _multiply(w, pairs, xs, sums, TWO_CHAINS: tl.constexpr, C: tl.constexpr):
    """Products (BATCH, BN, PARTS · M) of BN rows of units with x.

    Each product waits for the one that it accumulates to; TWO_CHAINS makes two accumulators.
    """
    T: tl.constexpr = xs[0].dtype
    N: tl.constexpr = C.PARTS * C.M
    y = tl.zeros([C.BATCH, C.BN, N], tl.float32)
    if C.KIND == "int4":
        odd = tl.zeros([C.BATCH, C.BN, N], tl.float32)
        for j in tl.static_range(4):
            if TWO_CHAINS and j % 2 == 1:
                odd = _dot(_unpack(w, j, "nibble", T, C.ASM), xs[j], odd, C.ASM)
            else:
                y = _dot(_unpack(w, j, "nibble", T, C.ASM), xs[j], y, C.ASM)
        if TWO_CHAINS:
            y += odd
        pairs = tl.reshape(tl.broadcast_to(pairs[:, :, :, None], [C.BATCH, C.BN, C.PARTS, C.M]), [C.BATCH, C.BN, N])
        scale, low = (pairs << 16).to(tl.float32, bitcast=True), (pairs & -65536).to(tl.float32, bitcast=True)
        return y * scale + (low - (128.0 if T.is_bf16() else 1024.0) * scale) * sums
    if C.KIND == "int8":
        subtract = tl.zeros([C.BATCH, C.BN, N], tl.float32)
        for j in tl.static_range(2):
            y = _dot(_unpack(w, j, "seven", T, C.ASM), xs[j], y, C.ASM)
            subtract = _dot(_unpack(w, j, "eighth", T, C.ASM), xs[j], subtract, C.ASM)
        return y - subtract
    for j in tl.static_range(2):
        y = _dot(_unpack(w, j, "float8", T, C.ASM), xs[j], y, C.ASM)
    return y * ((2.0**80) if T.is_bf16() else 256.0)


@triton.jit
def _reduce(acc, C: tl.constexpr):
    """Sums over all warps and parts, (M, BN, 1)."""
    y = tl.sum(tl.sum(tl.reshape(acc, [C.BATCH, C.BN, C.PARTS, C.M]), 2), 0)
    return tl.permute(y, (1, 0))[:, :, None]


@triton.jit
def tensor_core_kernel(
    x_ptr, gain_ptr, weight, up, residual_ptr, y_ptr, rows, outputs, inputs, x_t, w_f, groups, eps, C: tl.constexpr
):
    """Persistent over blocks of BN outputs, in steps of BATCH · K units; a row of weights has w_f units.

    An int4 group has WORDS words, and its scales are a pair of s and m in one int32.
    """
    INT4: tl.constexpr = C.KIND == "int4"
    UP: tl.constexpr = FLOAT8_SCALE if C.KIND == "float8" and x_ptr.dtype.element_ty.is_bf16() else 1.0
    N: tl.constexpr = C.PARTS * C.M
    first, programs = tl.program_id(0), tl.num_programs(0)
    blocks = ((outputs + C.BN - 1) // C.BN - first + programs - 1) // programs
    x_row = x_ptr + tl.minimum(tl.arange(0, C.M), rows - 1)[:, None].to(tl.int64) * x_t
    acc, acc_u = tl.zeros([C.BATCH, C.BN, N], tl.float32), tl.zeros([C.BATCH, C.BN, N], tl.float32)
    squares = tl.zeros([C.M, C.BATCH * C.K // 2], tl.float32)
    if C.STEPS == 1:
        xs, sums, new = _load_inputs(x_row, gain_ptr, 0, inputs, UP, C)
        square = tl.sum(new, 1)[:, None, None]
    unit = tl.arange(0, C.BATCH)[:, None, None] * C.K + tl.arange(0, C.K)[None, None, :]
    group = tl.arange(0, C.BATCH)[:, None, None] * C.PARTS + tl.arange(0, C.PARTS)[None, None, :]
    # A gate's two matrices alternate, one per step, where x stays in registers.
    MATRICES: tl.constexpr = 2 if C.ACT != "" and C.STEPS == 1 else 1
    for i in tl.range(0, blocks * C.STEPS * MATRICES, num_stages=C.STAGES):
        step, which = i // MATRICES % C.STEPS, i % MATRICES
        start = (first + i // (C.STEPS * MATRICES) * programs) * C.BN
        n = tl.minimum(start + tl.arange(0, C.BN), outputs - 1)[None, :, None]
        row, pair_row = n.to(tl.int64) * w_f, n.to(tl.int64) * groups
        at, g = step * (C.BATCH * C.K) + unit, step * (C.BATCH * C.PARTS) + group
        w_current = tl.where(which == 0, weight.stored, up.stored) if MATRICES == 2 else weight.stored
        w = _load(w_current, row + at, at < w_f, C.EVEN)
        pairs = w
        if C.STEPS == 1:  # loaded before the product, so that the epilogue does not wait for it
            residual = load_residual(residual_ptr, start, rows, outputs, C)
        if INT4:
            scale_current = tl.where(which == 0, weight.scales, up.scales) if MATRICES == 2 else weight.scales
            pairs = _load(scale_current, pair_row + g, g < groups, C.EVEN)
        if C.STEPS > 1:
            xs, sums, new = _load_inputs(x_row, gain_ptr, step * (C.BATCH * C.K // 2), inputs, UP, C)
            squares += tl.sum(tl.reshape(new, [C.M, C.BATCH * C.K // 2, 8 if INT4 else 4]), 2)
        new_acc = _multiply(w, pairs, xs, sums, C.STEPS == 1, C)
        if MATRICES == 2:
            acc, acc_u = acc_u, new_acc
        else:
            acc += new_acc
            if C.ACT != "":
                u = _load(up.stored, row + at, at < w_f, C.EVEN)
                pairs_u = _load(up.scales, pair_row + g, g < groups, C.EVEN) if INT4 else u
                acc_u += _multiply(u, pairs_u, xs, sums, C.STEPS == 1, C)
        if i % (C.STEPS * MATRICES) == C.STEPS * MATRICES - 1:
            if C.STEPS > 1:
                square = tl.sum(squares, 1)[:, None, None]
            y = _reduce(acc, C)
            y_u = _reduce(acc_u, C) if C.ACT != "" else y
            if C.STEPS > 1:
                residual = load_residual(residual_ptr, start, rows, outputs, C)
            epilogue(y, y_u, square, residual, start, weight, up, y_ptr, rows, outputs, inputs, eps, C)
            acc, acc_u = tl.zeros([C.BATCH, C.BN, N], tl.float32), tl.zeros([C.BATCH, C.BN, N], tl.float32)
            squares = tl.zeros([C.M, C.BATCH * C.K // 2], tl.float32)
