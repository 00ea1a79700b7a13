"""Products of 1 to 16 rows with quantised weights on the matrix units, with what stands before and after them.

    y = act(W x̂) ⊙ (U x̂)   or   y = W x̂ + b,    + r         (see :mod:`~colonnade.kernels.linear.triton_skinny_gemm`)

There a weight is four to six instructions, here one and a half (int4) to two and a half (float8), of which about one
widens it. Stored weights are read as halves of 16 bits, and a tile of halves goes from shared memory into registers as
a tile of bfloat16 would (``ldmatrix``): a register holds two halves, and one ``and``-``or`` makes a number of the type
of x of each of them:

    int4      q in the last bits of 128.0 is 128 + q               four to a half, a shift each
    int8      128 + (q and 127) less 128 + (q and 128)             two to a half; the difference is taken of the sums
    float8    sign, exponent and mantissa where bfloat16's are     two to a half, all 2^−120 times as large

(1024.0 and 2^−8 in float16.) What stands at one place of all halves is a matrix of its own, and each is multiplied
with its own inputs, in whatever order the packing puts them.

Eight columns is the least that a matrix unit has. Where there are fewer rows, int4 uses the others for groups: the
inputs of a group stand in columns of their own, with zeros beside them, so that sums of several groups come out apart
and a group's s and m are applied once, to a sum. What nibbles are lifted by comes off there too, by the sum of a
group's inputs, which is a product with ones.

A warp takes a part of the inputs (the batch of a product of three dimensions), not of the outputs: so 16 outputs are
work for a whole multiprocessor, and a warp's inputs stay in its registers from one block of outputs to the next
where STEPS is 1. Nothing is cut between programs; sums are taken in one order; a row's bits do not depend on the
others.
"""

# pyright: reportArgumentType=false, reportOptionalMemberAccess=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false, reportIndexIssue=false, reportAttributeAccessIssue=false
# pyright: reportPossiblyUnboundVariable=false, reportCallIssue=false, reportAssignmentType=false

import triton
import triton.language as tl

from colonnade.kernels.linear.triton_skinny_gemm import epilogue, load_residual

FLOAT8_SCALE = tl.constexpr(2.0**40)
"""What x is multiplied with where weights are 2^−120 times as large, lest products leave float32."""


@triton.constexpr_function
def unpack_assembly(what: str, j: int, brain: bool) -> str:
    """What makes numbers of two halves at once (see :func:`_numbers`); ``brain``: bfloat16, else float16.

    As text, for constants in code become an ``and`` and an ``or`` of their own; as operands of a kernel they would
    keep the compiler from reading halves straight into a matrix unit's registers.
    """
    if what == "float8":
        up, bits, mask = f"shl.b32 w, $1, {8 - 8 * j};", 4 if brain else 1, "0x07F007F0" if brain else "0x3F803F80"
        sign = "and.b32 w, w, 0x80008000;"
        return f"{{ .reg .b32 t, w; {up} shr.b32 t, w, {bits}; {sign} lop3.b32 $0, t, {mask}, w, 0xEA; }}"
    mask, each = {"nibble": ("0x000F000F", 4), "seven": ("0x007F007F", 8), "eighth": ("0x00800080", 8)}[what]
    lift = "0x43004300" if brain else "0x64006400"
    return f"{{ .reg .b32 t; shr.b32 t, $1, {each * j}; lop3.b32 $0, t, {mask}, {lift}, 0xEA; }}"


@triton.jit
def _numbers(w, j: tl.constexpr, WHAT: tl.constexpr, T: tl.constexpr, ASM: tl.constexpr):
    """Of each half, as T: 128 (or 1024) + nibble j; 128 + the last seven bits of byte j; 128 + 128 where that byte is
    negative (256 is 128 with one more in its exponent); 2^−120 (or 2^−8) times the float8 in byte j.
    """
    B: tl.constexpr = T.is_bf16()
    if ASM:
        CODE: tl.constexpr = unpack_assembly(WHAT, j, B)
        bits = tl.inline_asm_elementwise(CODE, "=r,r", [w], tl.int16, is_pure=True, pack=2)
    elif WHAT == "float8":
        up = w << (8 - 8 * j)
        bits = (up & -32768) | ((up >> 4) & 0x07F0 if B else (up >> 1) & 0x3F80)
    else:
        moved = w >> (4 * j if WHAT == "nibble" else 8 * j)
        bits = (moved & (15 if WHAT == "nibble" else 127 if WHAT == "seven" else 128)) | (0x4300 if B else 0x6400)
    return bits.to(tl.int16).to(T, bitcast=True)


@triton.jit
def _dot(a, b, acc, ASM: tl.constexpr):
    """acc + a b; the interpreter has no product of bfloat16."""
    if ASM:
        return tl.dot(a, b, acc)
    return tl.dot(a.to(tl.float32), b.to(tl.float32), acc)


@triton.jit
def _right(low, high, BATCH: tl.constexpr, K: tl.constexpr, M: tl.constexpr, PARTS: tl.constexpr, SPAN: tl.constexpr):
    """(BATCH, K, PARTS · M) of inputs (M, words) of words' low and high halves: SPAN halves of each K are a part's.

    Two inputs travel as one number of 32 bits: half as many are chosen, and stored.
    """
    T: tl.constexpr = low.dtype
    pair = (low.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF) | (high.to(tl.int16, bitcast=True).to(tl.int32) << 16)
    pair = tl.permute(tl.reshape(pair, [M, BATCH, K // 2]), (1, 0, 2))[:, None, :, :]
    part = (tl.arange(0, K // 2) // (SPAN // 2))[None, None, None, :] == tl.arange(0, PARTS)[None, :, None, None]
    pair = tl.reshape(tl.where(part, pair, 0), [BATCH, PARTS * M, K // 2])
    x = tl.join(pair.to(tl.int16), (pair >> 16).to(tl.int16))
    return tl.permute(tl.reshape(x, [BATCH, PARTS * M, K]).to(T, bitcast=True), (0, 2, 1))


@triton.jit
def _some(ptr, at, there, EVEN: tl.constexpr):
    """What stands at these places, where they are there."""
    if EVEN:
        return tl.load(ptr + at)
    return tl.load(ptr + at, there, 0.0)


@triton.jit
def _inputs(
    x_row, gain_ptr, word, inputs, KIND: tl.constexpr, WORDS: tl.constexpr, NORM: tl.constexpr, EVEN: tl.constexpr,
    M: tl.constexpr, BATCH: tl.constexpr, K: tl.constexpr, PARTS: tl.constexpr, SPAN: tl.constexpr, UP: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """(x of each place of a half, the sum of a part (BATCH, 1, PARTS · M), squares); ``word`` is the first."""
    T: tl.constexpr = x_row.dtype.element_ty
    BW: tl.constexpr = BATCH * K // 2
    EACH: tl.constexpr = 8 if KIND == "int4" else 4
    at = EACH * word + tl.arange(0, EACH * BW)[None, :]
    x = _some(x_row, at, at < inputs, EVEN)
    wide = x.to(tl.float32)
    if NORM:
        x = (wide * _some(gain_ptr, at, at < inputs, EVEN).to(tl.float32) * UP).to(T)
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
            b = _right(low, high, BATCH, K, M, PARTS, SPAN)
            sums = _dot(tl.full([BATCH, 16, K], 1.0, T), b, sums, ASM)
            xs = xs + (b,)  # noqa: RUF005 - what Triton compiles
    else:
        first, second = tl.split(tl.reshape(x, [M, BW, 2, 2]))
        halves = (first, second)
        for j in tl.static_range(2):
            low, high = tl.split(halves[j])
            xs = xs + (_right(low, high, BATCH, K, M, PARTS, SPAN),)  # noqa: RUF005
    # All sixteen are the same.
    return xs, tl.sum(sums, 1)[:, None, :] * 0.0625, wide * wide


@triton.jit
def _product(
    w, pairs, xs, sums, KIND: tl.constexpr, M: tl.constexpr, BN: tl.constexpr, BATCH: tl.constexpr,
    PARTS: tl.constexpr, APART: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Of BN rows of halves with x, (BATCH, BN, PARTS · M).

    A product waits for the one whose sum it goes on with; APART makes two such chains of them.
    """
    T: tl.constexpr = xs[0].dtype
    N: tl.constexpr = PARTS * M
    y = tl.zeros([BATCH, BN, N], tl.float32)
    if KIND == "int4":
        odd = tl.zeros([BATCH, BN, N], tl.float32)
        for j in tl.static_range(4):
            if APART and j % 2 == 1:
                odd = _dot(_numbers(w, j, "nibble", T, ASM), xs[j], odd, ASM)
            else:
                y = _dot(_numbers(w, j, "nibble", T, ASM), xs[j], y, ASM)
        if APART:
            y += odd
        of_all = tl.broadcast_to(pairs[:, :, :, None], [BATCH, BN, PARTS, M])
        of_all = tl.reshape(of_all, [BATCH, BN, N])
        scale, low = (of_all << 16).to(tl.float32, bitcast=True), (of_all & -65536).to(tl.float32, bitcast=True)
        return y * scale + (low - (128.0 if T.is_bf16() else 1024.0) * scale) * sums
    if KIND == "int8":
        less = tl.zeros([BATCH, BN, N], tl.float32)
        for j in tl.static_range(2):
            y = _dot(_numbers(w, j, "seven", T, ASM), xs[j], y, ASM)
            less = _dot(_numbers(w, j, "eighth", T, ASM), xs[j], less, ASM)
        return y - less
    for j in tl.static_range(2):
        y = _dot(_numbers(w, j, "float8", T, ASM), xs[j], y, ASM)
    return y * ((2.0**80) if T.is_bf16() else 256.0)


@triton.jit
def _summed(acc, M: tl.constexpr, BN: tl.constexpr, BATCH: tl.constexpr, PARTS: tl.constexpr):
    """(M, BN, 1) of sums of all warps and parts."""
    y = tl.sum(tl.sum(tl.reshape(acc, [BATCH, BN, PARTS, M]), 2), 0)
    return tl.permute(y, (1, 0))[:, :, None]


@triton.jit
def tensor_core_kernel(
    x_ptr, gain_ptr, w_ptr, w_scale_ptr, b_ptr, u_ptr, u_scale_ptr, c_ptr, more_ptr, y_ptr,
    rows, outputs, inputs, x_t, w_f, groups, eps,
    KIND: tl.constexpr, WORDS: tl.constexpr, NORM: tl.constexpr, ACT: tl.constexpr, BIASED: tl.constexpr,
    ADDED: tl.constexpr, EVEN: tl.constexpr, STEPS: tl.constexpr, M: tl.constexpr, BN: tl.constexpr,
    BATCH: tl.constexpr, K: tl.constexpr, PARTS: tl.constexpr, SPAN: tl.constexpr, STAGES: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """Each program takes blocks of BN outputs in turn, in steps of BATCH · K halves, of which w_f are a row's.

    WORDS are those of a group of int4, whose scales are pairs of s and m in one int32.
    """
    FOUR: tl.constexpr = KIND == "int4"
    UP: tl.constexpr = FLOAT8_SCALE if KIND == "float8" and x_ptr.dtype.element_ty.is_bf16() else 1.0
    N: tl.constexpr = PARTS * M
    first, programs = tl.program_id(0), tl.num_programs(0)
    mine = ((outputs + BN - 1) // BN - first + programs - 1) // programs
    x_row = x_ptr + tl.minimum(tl.arange(0, M), rows - 1)[:, None].to(tl.int64) * x_t
    acc, acc_u = tl.zeros([BATCH, BN, N], tl.float32), tl.zeros([BATCH, BN, N], tl.float32)
    squares = tl.zeros([M, BATCH * K // 2], tl.float32)
    if STEPS == 1:
        xs, sums, new = _inputs(
            x_row, gain_ptr, 0, inputs, KIND, WORDS, NORM, EVEN, M, BATCH, K, PARTS, SPAN, UP, ASM
        )  # fmt: skip
        square = tl.sum(new, 1)[:, None, None]
    half = tl.arange(0, BATCH)[:, None, None] * K + tl.arange(0, K)[None, None, :]
    group = tl.arange(0, BATCH)[:, None, None] * PARTS + tl.arange(0, PARTS)[None, None, :]
    # A gate's two matrices take turns, so that a step's weights are those of one, where x need not be made ready anew.
    TURNS: tl.constexpr = 2 if ACT != "" and STEPS == 1 else 1
    for i in tl.range(0, mine * STEPS * TURNS, num_stages=STAGES):
        step, turn = i // TURNS % STEPS, i % TURNS
        start = (first + i // (STEPS * TURNS) * programs) * BN
        n = tl.minimum(start + tl.arange(0, BN), outputs - 1)[None, :, None]
        row, pair_row = n.to(tl.int64) * w_f, n.to(tl.int64) * groups
        at, g = step * (BATCH * K) + half, step * (BATCH * PARTS) + group
        w_here = tl.where(turn == 0, w_ptr, u_ptr) if TURNS == 2 else w_ptr
        w = _some(w_here, row + at, at < w_f, EVEN)
        pairs = w
        if STEPS == 1:  # asked for before the product, lest its end waits for it
            more = load_residual(more_ptr, start, rows, outputs, ADDED, M, BN)
        if FOUR:
            scale_here = tl.where(turn == 0, w_scale_ptr, u_scale_ptr) if TURNS == 2 else w_scale_ptr
            pairs = _some(scale_here, pair_row + g, g < groups, EVEN)
        if STEPS > 1:
            xs, sums, new = _inputs(
                x_row, gain_ptr, step * (BATCH * K // 2), inputs, KIND, WORDS, NORM, EVEN, M, BATCH, K, PARTS, SPAN,
                UP, ASM,
            )  # fmt: skip
            squares += tl.sum(tl.reshape(new, [M, BATCH * K // 2, 8 if FOUR else 4]), 2)
        new_acc = _product(w, pairs, xs, sums, KIND, M, BN, BATCH, PARTS, STEPS == 1, ASM)
        if TURNS == 2:
            acc, acc_u = acc_u, new_acc
        else:
            acc += new_acc
            if ACT != "":
                u = _some(u_ptr, row + at, at < w_f, EVEN)
                pairs_u = _some(u_scale_ptr, pair_row + g, g < groups, EVEN) if FOUR else u
                acc_u += _product(u, pairs_u, xs, sums, KIND, M, BN, BATCH, PARTS, STEPS == 1, ASM)
        if i % (STEPS * TURNS) == STEPS * TURNS - 1:
            if STEPS > 1:
                square = tl.sum(squares, 1)[:, None, None]
            y = _summed(acc, M, BN, BATCH, PARTS)
            up = _summed(acc_u, M, BN, BATCH, PARTS) if ACT != "" else y
            if STEPS > 1:
                more = load_residual(more_ptr, start, rows, outputs, ADDED, M, BN)
            epilogue(
                y, up, square, more, start, w_scale_ptr, u_scale_ptr, b_ptr, c_ptr, y_ptr, rows, outputs, inputs, eps,
                KIND != "int4", NORM, ACT, BIASED, ADDED, M, BN,
            )  # fmt: skip
            acc, acc_u = tl.zeros([BATCH, BN, N], tl.float32), tl.zeros([BATCH, BN, N], tl.float32)
            squares = tl.zeros([M, BATCH * K // 2], tl.float32)
