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
inputs of a group are in columns of their own, with zeros beside them, so that sums of several groups come out
separately, and a group's s and m are applied once, to a sum. The lift of the nibbles is subtracted there too, with the
sum of a group's inputs, which is a product with ones.

A warp takes a part of the inputs (the batch of a 3-D product), not of the outputs. So 16 outputs are work for a whole
SM, and where STEPS is 1 a warp's inputs stay in its registers from one block of outputs to the next. Nothing is split
between programs, and sums are in a fixed order; a row's result does not depend on the other rows.
"""

# pyright: reportArgumentType=false, reportOptionalMemberAccess=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false, reportIndexIssue=false, reportAttributeAccessIssue=false
# pyright: reportPossiblyUnboundVariable=false, reportCallIssue=false, reportAssignmentType=false

import triton
import triton.language as tl

from colonnade.kernels.linear.triton_skinny_gemm import epilogue, load_residual

FLOAT8_SCALE = tl.constexpr(2.0**40)
"""Scale of x where weights are scaled by 2^−120, so that products stay within float32."""


@triton.constexpr_function
def unpack_assembly(what: str, j: int, brain: bool) -> str:
    """PTX that unpacks a value from each of two units (see :func:`_unpack`), to bfloat16 (``brain``) or float16.

    In Triton code, constants become an ``and`` and an ``or`` of their own; as kernel arguments they would keep the
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
def _permute_inputs(
    low, high, BATCH: tl.constexpr, K: tl.constexpr, M: tl.constexpr, PARTS: tl.constexpr, SPAN: tl.constexpr
):
    """The right operand (BATCH, K, PARTS · M) from inputs (M, words) of low and high units of words.

    SPAN units of each K belong to a part. Two inputs are moved as one 32-bit value: half as many selects and stores.
    """
    T: tl.constexpr = low.dtype
    pair = (low.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF) | (high.to(tl.int16, bitcast=True).to(tl.int32) << 16)
    pair = tl.permute(tl.reshape(pair, [M, BATCH, K // 2]), (1, 0, 2))[:, None, :, :]
    part = (tl.arange(0, K // 2) // (SPAN // 2))[None, None, None, :] == tl.arange(0, PARTS)[None, :, None, None]
    pair = tl.reshape(tl.where(part, pair, 0), [BATCH, PARTS * M, K // 2])
    x = tl.join(pair.to(tl.int16), (pair >> 16).to(tl.int16))
    return tl.permute(tl.reshape(x, [BATCH, PARTS * M, K]).to(T, bitcast=True), (0, 2, 1))


@triton.jit
def _load(ptr, at, valid, EVEN: tl.constexpr):
    """Elements ``at``, masked by ``valid`` unless EVEN."""
    if EVEN:
        return tl.load(ptr + at)
    return tl.load(ptr + at, valid, 0.0)


@triton.jit
def _load_inputs(
    x_row, gain_ptr, word, inputs, KIND: tl.constexpr, WORDS: tl.constexpr, NORM: tl.constexpr, EVEN: tl.constexpr,
    M: tl.constexpr, BATCH: tl.constexpr, K: tl.constexpr, PARTS: tl.constexpr, SPAN: tl.constexpr, UP: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """(x for each position in a unit, the sum of each part (BATCH, 1, PARTS · M), squares), from ``word`` on."""
    T: tl.constexpr = x_row.dtype.element_ty
    BW: tl.constexpr = BATCH * K // 2
    EACH: tl.constexpr = 8 if KIND == "int4" else 4
    at = EACH * word + tl.arange(0, EACH * BW)[None, :]
    x = _load(x_row, at, at < inputs, EVEN)
    wide = x.to(tl.float32)
    if NORM:
        x = (wide * _load(gain_ptr, at, at < inputs, EVEN).to(tl.float32) * UP).to(T)
    elif UP != 1.0:
        x = (wide * UP).to(T)
    xs = ()
    sums = tl.zeros([BATCH, 16, PARTS * M], tl.float32)
    if KIND == "int4":
        x = tl.permute(tl.reshape(x, [M, BW // WORDS, 8, WORDS]), (0, 1, 3, 2))
        even, odd = tl.split(tl.reshape(x, [M, BW, 2, 2, 2]))
        first, third = tl.split(even)
        second, fourth = tl.split(odd)
        halves = (first, second, third, fourth)
        for j in tl.static_range(4):
            low, high = tl.split(halves[j])
            b = _permute_inputs(low, high, BATCH, K, M, PARTS, SPAN)
            sums = _dot(tl.full([BATCH, 16, K], 1.0, T), b, sums, ASM)
            xs = xs + (b,)  # noqa: RUF005 - what Triton compiles
    else:
        first, second = tl.split(tl.reshape(x, [M, BW, 2, 2]))
        halves = (first, second)
        for j in tl.static_range(2):
            low, high = tl.split(halves[j])
            xs = xs + (_permute_inputs(low, high, BATCH, K, M, PARTS, SPAN),)  # noqa: RUF005
    # All sixteen rows of the product with ones are equal.
    return xs, tl.sum(sums, 1)[:, None, :] * 0.0625, wide * wide


@triton.jit
def _multiply(
    w, pairs, xs, sums, KIND: tl.constexpr, M: tl.constexpr, BN: tl.constexpr, BATCH: tl.constexpr,
    PARTS: tl.constexpr, TWO_CHAINS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Products (BATCH, BN, PARTS · M) of BN rows of units with x.

    Each product waits for the one that it accumulates to; TWO_CHAINS makes two accumulators.
    """
    T: tl.constexpr = xs[0].dtype
    N: tl.constexpr = PARTS * M
    y = tl.zeros([BATCH, BN, N], tl.float32)
    if KIND == "int4":
        odd = tl.zeros([BATCH, BN, N], tl.float32)
        for j in tl.static_range(4):
            if TWO_CHAINS and j % 2 == 1:
                odd = _dot(_unpack(w, j, "nibble", T, ASM), xs[j], odd, ASM)
            else:
                y = _dot(_unpack(w, j, "nibble", T, ASM), xs[j], y, ASM)
        if TWO_CHAINS:
            y += odd
        pairs = tl.reshape(tl.broadcast_to(pairs[:, :, :, None], [BATCH, BN, PARTS, M]), [BATCH, BN, N])
        scale, low = (pairs << 16).to(tl.float32, bitcast=True), (pairs & -65536).to(tl.float32, bitcast=True)
        return y * scale + (low - (128.0 if T.is_bf16() else 1024.0) * scale) * sums
    if KIND == "int8":
        subtract = tl.zeros([BATCH, BN, N], tl.float32)
        for j in tl.static_range(2):
            y = _dot(_unpack(w, j, "seven", T, ASM), xs[j], y, ASM)
            subtract = _dot(_unpack(w, j, "eighth", T, ASM), xs[j], subtract, ASM)
        return y - subtract
    for j in tl.static_range(2):
        y = _dot(_unpack(w, j, "float8", T, ASM), xs[j], y, ASM)
    return y * ((2.0**80) if T.is_bf16() else 256.0)


@triton.jit
def _reduce(acc, M: tl.constexpr, BN: tl.constexpr, BATCH: tl.constexpr, PARTS: tl.constexpr):
    """Sums over all warps and parts, (M, BN, 1)."""
    y = tl.sum(tl.sum(tl.reshape(acc, [BATCH, BN, PARTS, M]), 2), 0)
    return tl.permute(y, (1, 0))[:, :, None]


@triton.jit
def tensor_core_kernel(
    x_ptr, gain_ptr, w_ptr, w_scale_ptr, w_bias_ptr, u_ptr, u_scale_ptr, u_bias_ptr, residual_ptr, y_ptr,
    rows, outputs, inputs, x_t, w_f, groups, eps,
    KIND: tl.constexpr, WORDS: tl.constexpr, NORM: tl.constexpr, ACT: tl.constexpr, BIASED: tl.constexpr,
    RESIDUAL: tl.constexpr, EVEN: tl.constexpr, STEPS: tl.constexpr, M: tl.constexpr, BN: tl.constexpr,
    BATCH: tl.constexpr, K: tl.constexpr, PARTS: tl.constexpr, SPAN: tl.constexpr, STAGES: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """Persistent over blocks of BN outputs, in steps of BATCH · K units; a row of weights has w_f units.

    An int4 group has WORDS words, and its scales are a pair of s and m in one int32.
    """
    INT4: tl.constexpr = KIND == "int4"
    UP: tl.constexpr = FLOAT8_SCALE if KIND == "float8" and x_ptr.dtype.element_ty.is_bf16() else 1.0
    N: tl.constexpr = PARTS * M
    first, programs = tl.program_id(0), tl.num_programs(0)
    blocks = ((outputs + BN - 1) // BN - first + programs - 1) // programs
    x_row = x_ptr + tl.minimum(tl.arange(0, M), rows - 1)[:, None].to(tl.int64) * x_t
    acc, acc_u = tl.zeros([BATCH, BN, N], tl.float32), tl.zeros([BATCH, BN, N], tl.float32)
    squares = tl.zeros([M, BATCH * K // 2], tl.float32)
    if STEPS == 1:
        xs, sums, new = _load_inputs(
            x_row, gain_ptr, 0, inputs, KIND, WORDS, NORM, EVEN, M, BATCH, K, PARTS, SPAN, UP, ASM
        )  # fmt: skip
        square = tl.sum(new, 1)[:, None, None]
    unit = tl.arange(0, BATCH)[:, None, None] * K + tl.arange(0, K)[None, None, :]
    group = tl.arange(0, BATCH)[:, None, None] * PARTS + tl.arange(0, PARTS)[None, None, :]
    # A gate's two matrices alternate, one per step, where x stays in registers.
    MATRICES: tl.constexpr = 2 if ACT != "" and STEPS == 1 else 1
    for i in tl.range(0, blocks * STEPS * MATRICES, num_stages=STAGES):
        step, which = i // MATRICES % STEPS, i % MATRICES
        start = (first + i // (STEPS * MATRICES) * programs) * BN
        n = tl.minimum(start + tl.arange(0, BN), outputs - 1)[None, :, None]
        row, pair_row = n.to(tl.int64) * w_f, n.to(tl.int64) * groups
        at, g = step * (BATCH * K) + unit, step * (BATCH * PARTS) + group
        w_current = tl.where(which == 0, w_ptr, u_ptr) if MATRICES == 2 else w_ptr
        w = _load(w_current, row + at, at < w_f, EVEN)
        pairs = w
        if STEPS == 1:  # loaded before the product, so that the epilogue does not wait for it
            residual = load_residual(residual_ptr, start, rows, outputs, RESIDUAL, M, BN)
        if INT4:
            scale_current = tl.where(which == 0, w_scale_ptr, u_scale_ptr) if MATRICES == 2 else w_scale_ptr
            pairs = _load(scale_current, pair_row + g, g < groups, EVEN)
        if STEPS > 1:
            xs, sums, new = _load_inputs(
                x_row, gain_ptr, step * (BATCH * K // 2), inputs, KIND, WORDS, NORM, EVEN, M, BATCH, K, PARTS, SPAN,
                UP, ASM,
            )  # fmt: skip
            squares += tl.sum(tl.reshape(new, [M, BATCH * K // 2, 8 if INT4 else 4]), 2)
        new_acc = _multiply(w, pairs, xs, sums, KIND, M, BN, BATCH, PARTS, STEPS == 1, ASM)
        if MATRICES == 2:
            acc, acc_u = acc_u, new_acc
        else:
            acc += new_acc
            if ACT != "":
                u = _load(u_ptr, row + at, at < w_f, EVEN)
                pairs_u = _load(u_scale_ptr, pair_row + g, g < groups, EVEN) if INT4 else u
                acc_u += _multiply(u, pairs_u, xs, sums, KIND, M, BN, BATCH, PARTS, STEPS == 1, ASM)
        if i % (STEPS * MATRICES) == STEPS * MATRICES - 1:
            if STEPS > 1:
                square = tl.sum(squares, 1)[:, None, None]
            y = _reduce(acc, M, BN, BATCH, PARTS)
            up = _reduce(acc_u, M, BN, BATCH, PARTS) if ACT != "" else y
            if STEPS > 1:
                residual = load_residual(residual_ptr, start, rows, outputs, RESIDUAL, M, BN)
            epilogue(
                y, up, square, residual, start, w_scale_ptr, u_scale_ptr, w_bias_ptr, u_bias_ptr, y_ptr, rows, outputs,
                inputs, eps, KIND != "int4", NORM, ACT, BIASED, RESIDUAL, M, BN,
            )  # fmt: skip
            acc, acc_u = tl.zeros([BATCH, BN, N], tl.float32), tl.zeros([BATCH, BN, N], tl.float32)
            squares = tl.zeros([M, BATCH * K // 2], tl.float32)
