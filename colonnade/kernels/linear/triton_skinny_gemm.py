"""Products of a few rows at the speed of memory, with what stands before and after them: one launch for all of it.

    y = act(W x̂) ⊙ (U x̂)   or   y = W x̂ + b,    + r         x̂ = x ⊙ g / √(mean(x²) + ε)   or   x

A weight is read once and multiplied with M rows in registers. What decides is how many bytes are on their way at once:
tiles of BN outputs × BK inputs travel to shared memory STAGES − 1 ahead of the one in use, and a program goes on from
one block of outputs to the next without a pause, since both loops are one. Nothing is cut between programs, sums are
taken in one order: two runs give the same bits, and a row's do not depend on the other rows.

The norm costs no launch and no pass of its own: its factor is one number a row, which comes last, so squares are summed
beside the products. Where STEPS is 1 the whole of x stays in registers.

``thin`` is for weights that are numbers, ``thin4`` for words of eight numbers of four bits (:mod:`quantise`): a nibble
put into bits 16 … 19 of the bits of 128.0 *is* 128 + q, and in bits 12 … 15 of those of 2048.0 it is 2048 + q. So there
are two nibbles a shift, one ``and``-``or`` each; what was added to all comes off once for four words, with the scale.
"""

# pyright: reportArgumentType=false, reportOptionalMemberAccess=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false, reportIndexIssue=false, reportAttributeAccessIssue=false
# pyright: reportPossiblyUnboundVariable=false

import triton
import triton.language as tl

from colonnade.kernels.experts.triton_activation import activate

NIBBLE_BITS = (0xF000, 0x45000000, 0xF0000, 0x43000000)
"""What of a shifted word is a nibble, and the bits of 2048.0 and of 128.0. Arguments of :func:`skinny_int4_kernel`: as constants in
its code the assembler makes two instructions of an ``and`` and an ``or``, which are one where they lie in registers.
"""


@triton.jit
def _some(ptr, at, most, EVEN: tl.constexpr):
    """What stands at these places, of which there are ``most``."""
    if EVEN:
        return tl.load(ptr + at)
    return tl.load(ptr + at, at < most, 0.0)


@triton.jit
def _row(ptr, at, inputs, EVEN: tl.constexpr):
    """Numbers of each input, as float32."""
    return _some(ptr, at, inputs, EVEN).to(tl.float32)


@triton.jit
def _outputs(first, rows, outputs, M: tl.constexpr, BN: tl.constexpr):
    """(places (M, BN) of the outputs from ``first`` on, which of them there are)."""
    m, n = tl.arange(0, M), first + tl.arange(0, BN)
    return m[:, None].to(tl.int64) * outputs + n[None, :], (m < rows)[:, None] & (n < outputs)[None, :]


@triton.jit
def load_residual(more_ptr, first, rows, outputs, ADDED: tl.constexpr, M: tl.constexpr, BN: tl.constexpr):
    """(M, BN) of what is added to the outputs from ``first`` on."""
    more = tl.zeros([M, BN], tl.float32)
    if ADDED:
        place, there = _outputs(first, rows, outputs, M, BN)
        more = tl.load(more_ptr + place, there, 0.0).to(tl.float32)
    return more


@triton.jit
def epilogue(
    acc, acc_u, squares, more, first, w_scale_ptr, u_scale_ptr, b_ptr, c_ptr, y_ptr, rows, outputs, inputs, eps,
    SCALED: tl.constexpr, NORM: tl.constexpr, ACT: tl.constexpr, BIASED: tl.constexpr, ADDED: tl.constexpr,
    M: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Write the outputs from ``first`` on; sums are (M, BN, parts)."""
    n = first + tl.arange(0, BN)
    inside = n < outputs
    y = tl.sum(acc, 2)
    if SCALED:
        y *= tl.load(w_scale_ptr + n, inside, 0.0)[None, :]
    if NORM:
        shrink = tl.rsqrt(tl.sum(squares, 2) / inputs + eps)
        y *= shrink
    if BIASED:
        y += tl.load(b_ptr + n, inside, 0.0).to(tl.float32)[None, :]
    if ACT != "":
        u = tl.sum(acc_u, 2)
        if SCALED:
            u *= tl.load(u_scale_ptr + n, inside, 0.0)[None, :]
        if NORM:
            u *= shrink
        if BIASED:
            u += tl.load(c_ptr + n, inside, 0.0).to(tl.float32)[None, :]
        y = activate(y, ACT)[0] * u
    place, there = _outputs(first, rows, outputs, M, BN)
    if ADDED:
        y += more
    tl.store(y_ptr + place, y.to(y_ptr.dtype.element_ty), there)


@triton.jit
def skinny_kernel(
    x_ptr, gain_ptr, w_ptr, w_scale_ptr, b_ptr, u_ptr, u_scale_ptr, c_ptr, more_ptr, y_ptr,
    rows, outputs, inputs, x_t, w_f, eps,
    SCALED: tl.constexpr, NORM: tl.constexpr, ACT: tl.constexpr, BIASED: tl.constexpr, ADDED: tl.constexpr,
    EVEN: tl.constexpr, STEPS: tl.constexpr, M: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, V: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Each program takes blocks of BN outputs in turn; a thread has V neighbouring inputs, which are STEPS · BK."""
    C: tl.constexpr = BK // V
    k = tl.arange(0, BK)[None, :]
    first, programs = tl.program_id(0), tl.num_programs(0)
    mine = ((outputs + BN - 1) // BN - first + programs - 1) // programs
    x_row = x_ptr + tl.minimum(tl.arange(0, M), rows - 1)[:, None].to(tl.int64) * x_t
    acc, acc_u = tl.zeros([M, BN, C], tl.float32), tl.zeros([M, BN, C], tl.float32)
    squares = tl.zeros([M, 1, C], tl.float32)
    if STEPS == 1:
        x = _row(x_row, k, inputs, EVEN)
        gain = _row(gain_ptr, k, inputs, EVEN) if NORM else 1.0
    for i in tl.range(0, mine * STEPS, num_stages=STAGES):
        at = i % STEPS * BK + k
        n = tl.minimum((first + i // STEPS * programs) * BN + tl.arange(0, BN), outputs - 1)
        row = n[:, None].to(tl.int64) * w_f
        w = _some(w_ptr + row, at, inputs, EVEN)
        if ACT != "":
            u = _some(u_ptr + row, at, inputs, EVEN)
        if STEPS > 1:
            x = _row(x_row, at, inputs, EVEN)
            if NORM:
                gain = _row(gain_ptr, at, inputs, EVEN)
        if NORM:
            squares += tl.sum(tl.reshape(x * x, [M, 1, C, V]), 3)
            scaled = tl.reshape(x * gain, [M, 1, C, V])
        else:
            scaled = tl.reshape(x, [M, 1, C, V])
        acc += tl.sum(tl.reshape(w, [1, BN, C, V]).to(tl.float32) * scaled, 3)
        if ACT != "":
            acc_u += tl.sum(tl.reshape(u, [1, BN, C, V]).to(tl.float32) * scaled, 3)
        if i % STEPS == STEPS - 1:
            start = (first + i // STEPS * programs) * BN
            epilogue(
                acc, acc_u, squares, load_residual(more_ptr, start, rows, outputs, ADDED, M, BN), start, w_scale_ptr,
                u_scale_ptr, b_ptr, c_ptr, y_ptr, rows, outputs, inputs, eps, SCALED, NORM, ACT, BIASED, ADDED, M, BN,
            )  # fmt: skip
            acc, acc_u = tl.zeros([M, BN, C], tl.float32), tl.zeros([M, BN, C], tl.float32)
            squares = tl.zeros([M, 1, C], tl.float32)


@triton.jit
def _nibbles(w, i: tl.constexpr, bits):
    """Nibble ``i`` of words, and 2048 or 128; ``bits`` are :data:`NIBBLE_BITS`."""
    if i % 2 == 0:  # bits 4i … 4i+3 come to bits 12 … 15
        moved = w << (12 - 4 * i) if i < 3 else w >> (4 * i - 12)
        return ((moved & bits[0]) | bits[1]).to(tl.float32, bitcast=True)
    # to bits 16 … 19
    moved = w << (16 - 4 * i) if i < 4 else w >> (4 * i - 16)
    return ((moved & bits[2]) | bits[3]).to(tl.float32, bitcast=True)


@triton.jit
def _inputs(
    x_row, gain_ptr, c, inputs, WORDS: tl.constexpr, NORM: tl.constexpr, EVEN: tl.constexpr, M: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    """(x of the eight nibbles of words c, their sum, the sum of what nibbles are lifted by, squares) of each four."""
    xs = ()
    squares = tl.zeros([M, 1, C, 4], tl.float32)
    sums, lifted = tl.zeros([M, 1, C, 4], tl.float32), tl.zeros([M, 1, C, 4], tl.float32)
    for j in tl.static_range(8):
        at = c // WORDS * (8 * WORDS) + j * WORDS + c % WORDS
        x = _row(x_row, at, inputs, EVEN)
        if NORM:
            squares += tl.reshape(x * x, [M, 1, C, 4])
            x *= _row(gain_ptr, at, inputs, EVEN)
        x = tl.reshape(x, [M, 1, C, 4])
        sums += x
        lifted += x * (2048.0 if j % 2 == 0 else 128.0)
        xs = xs + (x,)  # noqa: RUF005 - what Triton compiles
    return xs, tl.sum(sums, 3), tl.sum(lifted, 3), tl.sum(squares, 3)


@triton.jit
def _product4(w, pairs, xs, sums, lifted, bits, BN: tl.constexpr, C: tl.constexpr):
    """Of BN rows of words with x, (M, BN, C)."""
    w, pairs = tl.reshape(w, [1, BN, C, 4]), tl.reshape(pairs, [1, BN, C])
    part = _nibbles(w, 0, bits) * xs[0]
    for j in tl.static_range(1, 8):
        part += _nibbles(w, j, bits) * xs[j]
    scale, low = (pairs << 16).to(tl.float32, bitcast=True), (pairs & -65536).to(tl.float32, bitcast=True)
    return (tl.sum(part, 3) - lifted) * scale + sums * low


@triton.jit
def skinny_int4_kernel(
    x_ptr, gain_ptr, w_ptr, w_scale_ptr, b_ptr, u_ptr, u_scale_ptr, c_ptr, more_ptr, y_ptr,
    rows, outputs, inputs, x_t, w_f, groups, eps, even, even_lift, odd, odd_lift,
    WORDS: tl.constexpr, NORM: tl.constexpr, ACT: tl.constexpr, BIASED: tl.constexpr, ADDED: tl.constexpr,
    EVEN: tl.constexpr, STEPS: tl.constexpr, M: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """As :func:`skinny_kernel`; BK are words, WORDS those of a group, of which a thread has four neighbours, and w_f those of a
    row. Scales are pairs of s and m, in one int32.
    """
    C: tl.constexpr = BK // 4
    bits = (even, even_lift, odd, odd_lift)
    first, programs = tl.program_id(0), tl.num_programs(0)
    mine = ((outputs + BN - 1) // BN - first + programs - 1) // programs
    x_row = x_ptr + tl.minimum(tl.arange(0, M), rows - 1)[:, None].to(tl.int64) * x_t
    acc, acc_u = tl.zeros([M, BN, C], tl.float32), tl.zeros([M, BN, C], tl.float32)
    squares = tl.zeros([M, 1, C], tl.float32)
    if STEPS == 1:
        xs, sums, lifted, new = _inputs(x_row, gain_ptr, tl.arange(0, BK)[None, :], inputs, WORDS, NORM, EVEN, M, C)
    for i in tl.range(0, mine * STEPS, num_stages=STAGES):
        step = i % STEPS * BK
        n = tl.minimum((first + i // STEPS * programs) * BN + tl.arange(0, BN), outputs - 1)[:, None]
        c = step + tl.arange(0, BK)[None, :]
        group = (step // 4 + tl.arange(0, C)[None, :]) // (WORDS // 4)
        row, pair_row = n.to(tl.int64) * w_f, n.to(tl.int64) * groups
        w, pairs = _some(w_ptr + row, c, w_f, EVEN), _some(w_scale_ptr + pair_row, group, groups, EVEN)
        if STEPS > 1:
            xs, sums, lifted, new = _inputs(x_row, gain_ptr, c, inputs, WORDS, NORM, EVEN, M, C)
        squares += new
        acc += _product4(w, pairs, xs, sums, lifted, bits, BN, C)
        if ACT != "":
            u, pairs_u = _some(u_ptr + row, c, w_f, EVEN), _some(u_scale_ptr + pair_row, group, groups, EVEN)
            acc_u += _product4(u, pairs_u, xs, sums, lifted, bits, BN, C)
        if i % STEPS == STEPS - 1:
            start = (first + i // STEPS * programs) * BN
            epilogue(
                acc, acc_u, squares, load_residual(more_ptr, start, rows, outputs, ADDED, M, BN), start, w_scale_ptr,
                u_scale_ptr, b_ptr, c_ptr, y_ptr, rows, outputs, inputs, eps, False, NORM, ACT, BIASED, ADDED, M, BN,
            )  # fmt: skip
            acc, acc_u = tl.zeros([M, BN, C], tl.float32), tl.zeros([M, BN, C], tl.float32)
            squares = tl.zeros([M, 1, C], tl.float32)


@triton.jit
def gated_activation_kernel(gate_ptr, up_ptr, out_ptr, numbers, ACT: tl.constexpr, BLOCK: tl.constexpr):
    """out = act(gate) · up."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(gate_ptr + i, i < numbers, 0.0).to(tl.float32)
    u = tl.load(up_ptr + i, i < numbers, 0.0).to(tl.float32)
    tl.store(out_ptr + i, (activate(g, ACT)[0] * u).to(out_ptr.dtype.element_ty), i < numbers)
