"""Skinny GEMM (few rows) at memory bandwidth on CUDA cores, fused with norm, gate and residual in one launch.

    y = act(W x̂) ⊙ (U x̂)   or   y = W x̂ + b,    + r         x̂ = x ⊙ g / √(mean(x²) + ε)   or   x

Each weight is read once and multiplied with M rows in registers. Bandwidth depends on the bytes in flight: tiles of BN
outputs × BK inputs are loaded to shared memory STAGES − 1 ahead of the one in use, and a persistent program continues
with the next block of outputs without draining this pipeline, since one loop covers all blocks. Nothing is split
between programs, and sums are in a fixed order, so results are reproducible bit for bit, and a row's result does not
depend on the other rows.

The norm needs no separate launch or pass: its factor is one value per row, applied last, so squares are summed together
with the products. If STEPS is 1, all of x stays in registers.

``skinny_kernel`` is for weights of 8, 16 or 32 bits, ``skinny_int4_kernel`` for words of eight int4 values
(:mod:`quantise`). A nibble q as bits 16 … 19 of the bit pattern of 128.0 makes 128 + q, and as bits 12 … 15 of that of
2048.0 it makes 2048 + q. So there are two nibbles per shift, and one ``and``-``or`` each; the sum of what was added
(the lift) is subtracted once for four words, with the scale.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from colonnade.kernels.experts.triton_activation import activate

NIBBLE_BITS = (0xF000, 0x45000000, 0xF0000, 0x43000000)
"""Masks of a nibble in a shifted word, and the bit patterns of 2048.0 and 128.0.

An argument of :func:`skinny_int4_kernel`: for constants in its code the assembler makes two instructions of an ``and``
and an ``or``, for values in registers one.
"""


class Weight(NamedTuple):
    """Pointers of a projection: stored values, scales, bias."""

    stored: Any
    scales: Any
    bias: Any


class Constants(NamedTuple):
    """Compile-time constants of :func:`skinny_kernel` and :func:`skinny_int4_kernel`."""

    SCALED: bool
    """Whether each output has a scale."""
    NORM: bool
    ACT: str
    """The gate's activation; empty without a gate."""
    BIASED: bool
    RESIDUAL: bool
    EVEN: bool
    """Whether the steps cover a row exactly, so that no load is masked."""
    STEPS: int
    M: int
    BN: int
    BK: int
    STAGES: int
    V: int = 1
    """Neighbouring inputs per thread; not for int4."""
    WORDS: int = 1
    """Words per int4 group."""


@triton.jit
def _load(ptr, at, size, EVEN: tl.constexpr):
    """Elements ``at``, masked by ``size`` unless EVEN."""
    if EVEN:
        return tl.load(ptr + at)
    return tl.load(ptr + at, at < size, 0.0)


@triton.jit
def _load_float32(ptr, at, inputs, EVEN: tl.constexpr):
    """Elements of a row of inputs, as float32."""
    return _load(ptr, at, inputs, EVEN).to(tl.float32)


@triton.jit
def _output_offsets(first, rows, outputs, M: tl.constexpr, BN: tl.constexpr):
    """(offsets (M, BN) of the outputs from ``first`` on, their mask)."""
    m, n = tl.arange(0, M), first + tl.arange(0, BN)
    return m[:, None].to(tl.int64) * outputs + n[None, :], (m < rows)[:, None] & (n < outputs)[None, :]


@triton.jit
def load_residual(residual_ptr, first, rows, outputs, C: tl.constexpr):
    """The residual (M, BN) of the outputs from ``first`` on."""
    residual = tl.zeros([C.M, C.BN], tl.float32)
    if C.RESIDUAL:
        at, valid = _output_offsets(first, rows, outputs, C.M, C.BN)
        residual = tl.load(residual_ptr + at, valid, 0.0).to(tl.float32)
    return residual


@triton.jit
def epilogue(acc, acc_u, squares, residual, first, weight, up, y_ptr, rows, outputs, inputs, eps, C: tl.constexpr):
    """Writes the outputs from ``first`` on; ``acc``, ``acc_u`` and ``squares`` are (M, BN or 1, parts).

    ``C`` is :class:`Constants`, or the tensor core kernel's.
    """
    n = first + tl.arange(0, C.BN)
    valid_n = n < outputs
    y = tl.sum(acc, 2)
    if C.SCALED:
        y *= tl.load(weight.scales + n, valid_n, 0.0)[None, :]
    if C.NORM:
        inverse_rms = tl.rsqrt(tl.sum(squares, 2) / inputs + eps)
        y *= inverse_rms
    if C.BIASED:
        y += tl.load(weight.bias + n, valid_n, 0.0).to(tl.float32)[None, :]
    if C.ACT != "":
        u = tl.sum(acc_u, 2)
        if C.SCALED:
            u *= tl.load(up.scales + n, valid_n, 0.0)[None, :]
        if C.NORM:
            u *= inverse_rms
        if C.BIASED:
            u += tl.load(up.bias + n, valid_n, 0.0).to(tl.float32)[None, :]
        y = activate(y, C.ACT)[0] * u
    at, valid = _output_offsets(first, rows, outputs, C.M, C.BN)
    if C.RESIDUAL:
        y += residual
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), valid)


@triton.jit
def skinny_kernel(
    x_ptr, gain_ptr, weight, up, residual_ptr, y_ptr, rows, outputs, inputs, x_t, w_f, eps, C: tl.constexpr
):
    """Persistent over blocks of BN outputs; inputs ≤ STEPS · BK, and a thread holds V neighbouring inputs.

    ``up`` is read with a gate only: ``weight`` is the gate's then.
    """
    PARTS: tl.constexpr = C.BK // C.V
    k = tl.arange(0, C.BK)[None, :]
    first, programs = tl.program_id(0), tl.num_programs(0)
    blocks = ((outputs + C.BN - 1) // C.BN - first + programs - 1) // programs
    x_row = x_ptr + tl.minimum(tl.arange(0, C.M), rows - 1)[:, None].to(tl.int64) * x_t
    acc, acc_u = tl.zeros([C.M, C.BN, PARTS], tl.float32), tl.zeros([C.M, C.BN, PARTS], tl.float32)
    squares = tl.zeros([C.M, 1, PARTS], tl.float32)
    if C.STEPS == 1:
        x = _load_float32(x_row, k, inputs, C.EVEN)
        gain = _load_float32(gain_ptr, k, inputs, C.EVEN) if C.NORM else 1.0
    for i in tl.range(0, blocks * C.STEPS, num_stages=C.STAGES):
        at = i % C.STEPS * C.BK + k
        n = tl.minimum((first + i // C.STEPS * programs) * C.BN + tl.arange(0, C.BN), outputs - 1)
        row = n[:, None].to(tl.int64) * w_f
        w = _load(weight.stored + row, at, inputs, C.EVEN)
        if C.ACT != "":
            u = _load(up.stored + row, at, inputs, C.EVEN)
        if C.STEPS > 1:
            x = _load_float32(x_row, at, inputs, C.EVEN)
            if C.NORM:
                gain = _load_float32(gain_ptr, at, inputs, C.EVEN)
        if C.NORM:
            squares += tl.sum(tl.reshape(x * x, [C.M, 1, PARTS, C.V]), 3)
            scaled = tl.reshape(x * gain, [C.M, 1, PARTS, C.V])
        else:
            scaled = tl.reshape(x, [C.M, 1, PARTS, C.V])
        acc += tl.sum(tl.reshape(w, [1, C.BN, PARTS, C.V]).to(tl.float32) * scaled, 3)
        if C.ACT != "":
            acc_u += tl.sum(tl.reshape(u, [1, C.BN, PARTS, C.V]).to(tl.float32) * scaled, 3)
        if i % C.STEPS == C.STEPS - 1:
            start = (first + i // C.STEPS * programs) * C.BN
            residual = load_residual(residual_ptr, start, rows, outputs, C)
            epilogue(acc, acc_u, squares, residual, start, weight, up, y_ptr, rows, outputs, inputs, eps, C)
            acc, acc_u = tl.zeros([C.M, C.BN, PARTS], tl.float32), tl.zeros([C.M, C.BN, PARTS], tl.float32)
            squares = tl.zeros([C.M, 1, PARTS], tl.float32)


@triton.jit
def _lifted_nibbles(w, i: tl.constexpr, bits):
    """Nibble ``i`` of each word, plus 2048 or 128; ``bits`` are :data:`NIBBLE_BITS`."""
    if i % 2 == 0:  # bits 4i … 4i+3 move to bits 12 … 15
        shifted = w << (12 - 4 * i) if i < 3 else w >> (4 * i - 12)
        return ((shifted & bits[0]) | bits[1]).to(tl.float32, bitcast=True)
    # move to bits 16 … 19
    shifted = w << (16 - 4 * i) if i < 4 else w >> (4 * i - 16)
    return ((shifted & bits[2]) | bits[3]).to(tl.float32, bitcast=True)


@triton.jit
def _load_inputs(x_row, gain_ptr, c, inputs, C: tl.constexpr):
    """(x for each of the eight nibbles of words c; sums over four words of x, of x times its lift, and of squares)."""
    PARTS: tl.constexpr = C.BK // 4
    xs = ()
    squares = tl.zeros([C.M, 1, PARTS, 4], tl.float32)
    sums, lift = tl.zeros([C.M, 1, PARTS, 4], tl.float32), tl.zeros([C.M, 1, PARTS, 4], tl.float32)
    for j in tl.static_range(8):
        at = c // C.WORDS * (8 * C.WORDS) + j * C.WORDS + c % C.WORDS
        x = _load_float32(x_row, at, inputs, C.EVEN)
        if C.NORM:
            squares += tl.reshape(x * x, [C.M, 1, PARTS, 4])
            x *= _load_float32(gain_ptr, at, inputs, C.EVEN)
        x = tl.reshape(x, [C.M, 1, PARTS, 4])
        sums += x
        lift += x * (2048.0 if j % 2 == 0 else 128.0)
        xs = xs + (x,)  # noqa: RUF005 - what Triton compiles
    return xs, tl.sum(sums, 3), tl.sum(lift, 3), tl.sum(squares, 3)


@triton.jit
def _dot_int4(w, pairs, xs, sums, lift, bits, BN: tl.constexpr, PARTS: tl.constexpr):
    """Products (M, BN, PARTS) of BN rows of words with x."""
    w, pairs = tl.reshape(w, [1, BN, PARTS, 4]), tl.reshape(pairs, [1, BN, PARTS])
    part = _lifted_nibbles(w, 0, bits) * xs[0]
    for j in tl.static_range(1, 8):
        part += _lifted_nibbles(w, j, bits) * xs[j]
    scale, low = (pairs << 16).to(tl.float32, bitcast=True), (pairs & -65536).to(tl.float32, bitcast=True)
    return (tl.sum(part, 3) - lift) * scale + sums * low


@triton.jit
def skinny_int4_kernel(
    x_ptr, gain_ptr, weight, up, residual_ptr, y_ptr, rows, outputs, inputs, x_t, w_f, groups, eps, bits,
    C: tl.constexpr,
):  # fmt: skip
    """As :func:`skinny_kernel` for int4; BK, WORDS and w_f count words of a step, of a group and of a row.

    A thread holds four neighbouring words. Scales are pairs of s and m, in one int32. ``bits`` are
    :data:`NIBBLE_BITS`.
    """
    PARTS: tl.constexpr = C.BK // 4
    first, programs = tl.program_id(0), tl.num_programs(0)
    blocks = ((outputs + C.BN - 1) // C.BN - first + programs - 1) // programs
    x_row = x_ptr + tl.minimum(tl.arange(0, C.M), rows - 1)[:, None].to(tl.int64) * x_t
    acc, acc_u = tl.zeros([C.M, C.BN, PARTS], tl.float32), tl.zeros([C.M, C.BN, PARTS], tl.float32)
    squares = tl.zeros([C.M, 1, PARTS], tl.float32)
    if C.STEPS == 1:
        xs, sums, lift, new = _load_inputs(x_row, gain_ptr, tl.arange(0, C.BK)[None, :], inputs, C)
    for i in tl.range(0, blocks * C.STEPS, num_stages=C.STAGES):
        step = i % C.STEPS * C.BK
        n = tl.minimum((first + i // C.STEPS * programs) * C.BN + tl.arange(0, C.BN), outputs - 1)[:, None]
        c = step + tl.arange(0, C.BK)[None, :]
        group = (step // 4 + tl.arange(0, PARTS)[None, :]) // (C.WORDS // 4)
        row, pair_row = n.to(tl.int64) * w_f, n.to(tl.int64) * groups
        w, pairs = _load(weight.stored + row, c, w_f, C.EVEN), _load(weight.scales + pair_row, group, groups, C.EVEN)
        if C.STEPS > 1:
            xs, sums, lift, new = _load_inputs(x_row, gain_ptr, c, inputs, C)
        squares += new
        acc += _dot_int4(w, pairs, xs, sums, lift, bits, C.BN, PARTS)
        if C.ACT != "":
            u, pairs_u = _load(up.stored + row, c, w_f, C.EVEN), _load(up.scales + pair_row, group, groups, C.EVEN)
            acc_u += _dot_int4(u, pairs_u, xs, sums, lift, bits, C.BN, PARTS)
        if i % C.STEPS == C.STEPS - 1:
            start = (first + i // C.STEPS * programs) * C.BN
            residual = load_residual(residual_ptr, start, rows, outputs, C)
            epilogue(acc, acc_u, squares, residual, start, weight, up, y_ptr, rows, outputs, inputs, eps, C)
            acc, acc_u = tl.zeros([C.M, C.BN, PARTS], tl.float32), tl.zeros([C.M, C.BN, PARTS], tl.float32)
            squares = tl.zeros([C.M, 1, PARTS], tl.float32)


@triton.jit
def gated_activation_kernel(gate_ptr, up_ptr, out_ptr, size, ACT: tl.constexpr, BLOCK: tl.constexpr):
    """out = act(gate) · up."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(gate_ptr + i, i < size, 0.0).to(tl.float32)
    u = tl.load(up_ptr + i, i < size, 0.0).to(tl.float32)
    tl.store(out_ptr + i, (activate(g, ACT)[0] * u).to(out_ptr.dtype.element_ty), i < size)
