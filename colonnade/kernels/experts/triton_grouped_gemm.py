"""Grouped GEMM kernels of the experts whose output has a row for each input row (forward and dgrad).

    up              u = x W_upᵀ + b, a = x W_gateᵀ + b; h = act(a) ⊙ u in the epilogue
    down            y = w ⊙ (h W_down + b)
    hidden_dgrad    dh = dy W_downᵀ; in the epilogue w ⊙ h, du, da and each row's h · dh, which is dw (without the bias)
    input_dgrad     dx = du W_up + da W_gate in one accumulator; uses the kernel of ``down``

``up`` and ``hidden_dgrad`` can read their rows from the tokens through ``order``, so that the gather needs no pass of
its own. Operands keep their dtype; accumulators are float32.

R rows of widths D and F take 6RDF operations forward and 12RDF backward when gated. In elements, the minimum traffic is
3EDF + 2RD + 2RF forward; unfused, the gather, the activation and the weighted sum add 4RD + 3RF. A tile does
BM·BN / (BM + BN) operations per byte of L2 traffic in 2-byte dtypes: 85 at 128 × 256, 32 at 64 × 64. With R / E below
about 200 rows, the bandwidth of reading the weights (6EDF bytes) is the limit, and it is enough to have many tiles.

:mod:`colonnade.kernels.experts.triton_tile_schedule` defines the order of tiles. Rows past the last end are not
written.
"""

from typing import Any, NamedTuple

import triton
from triton import language as tl

from colonnade.kernels.experts.triton_activation import activate
from colonnade.kernels.experts.triton_tile_schedule import find_tile, schedule


class Constants(NamedTuple):
    """Compile-time constants of a kernel; each kernel reads those that concern it."""

    BM: int
    BN: int
    BK: int
    GROUP: int
    E_PAD: int
    EVEN: bool
    """Whether BK divides the summed dimension."""
    TMA: bool
    """Whether weights, and rows that are not gathered, are tensor descriptors."""
    GATHER: bool = False
    GATED: bool = False
    BIASED: bool = False
    KEEP: bool = False
    """Whether the pre-activations are written."""
    ACT: str = ""
    ONE_TOKEN: bool = False
    TWO: bool = False
    """Whether two GEMMs add into one result."""
    WEIGHTED: bool = False
    INTERLEAVED: bool = False


class Activations(NamedTuple):
    """Tensors (R, F) around the activation: saved pre-activations, and what the backward pass writes."""

    a: Any
    u: Any
    h: Any
    da: Any
    du: Any


@triton.jit
def _dot_transposed(x, x_at, row, w, v, expert, n, N, K, TWO: tl.constexpr, C: tl.constexpr):
    """(x wᵀ, x vᵀ) for rows of x at offsets ``x_at``, or by TMA the BM rows from ``row`` on; w and v are (E, N, K)."""
    k = tl.arange(0, C.BK)
    c = n * C.BN + tl.arange(0, C.BN)
    w_at = (expert.to(tl.int64) * N + tl.where(c < N, c, 0)) * K
    acc_w = tl.zeros((C.BM, C.BN), tl.float32)
    acc_v = tl.zeros((C.BM, C.BN), tl.float32)
    for k0 in range(0, K, C.BK):
        valid = k < K - k0
        if C.TMA and not C.GATHER:
            x_tile = x.load([row, k0])
        elif C.EVEN:
            x_tile = tl.load(x + x_at[:, None] + (k0 + k)[None, :])
        else:
            x_tile = tl.load(x + x_at[:, None] + (k0 + k)[None, :], valid[None, :], 0.0)
        if C.TMA:
            w_tile = tl.trans(w.load([expert, n * C.BN, k0]).reshape(C.BN, C.BK))
        elif C.EVEN:
            w_tile = tl.load(w + w_at[None, :] + (k0 + k)[:, None])
        else:
            w_tile = tl.load(w + w_at[None, :] + (k0 + k)[:, None], valid[:, None], 0.0)
        acc_w = tl.dot(x_tile, w_tile, acc_w, input_precision="ieee")
        if TWO:
            if C.TMA:
                v_tile = tl.trans(v.load([expert, n * C.BN, k0]).reshape(C.BN, C.BK))
            elif C.EVEN:
                v_tile = tl.load(v + w_at[None, :] + (k0 + k)[:, None])
            else:
                v_tile = tl.load(v + w_at[None, :] + (k0 + k)[:, None], valid[:, None], 0.0)
            acc_v = tl.dot(x_tile, v_tile, acc_v, input_precision="ieee")
    return acc_w, acc_v


@triton.jit
def _dot(
    acc, x, x_at, row, w, expert, n, N, K, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr, TMA: tl.constexpr
):
    """acc + x w, for rows of x at offsets ``x_at``, with TMA those from ``row`` on; w is (E, K, N)."""
    k = tl.arange(0, BK)
    c = n * BN + tl.arange(0, BN)
    # Masked, not clamped: columns stay known to be contiguous, and are copied 16 bytes at once.
    column = (c < N)[None, :]
    x_ptrs, w_ptrs = x, w
    if not TMA:
        x_ptrs = x + x_at[:, None] + k[None, :]
        w_ptrs = w + expert.to(tl.int64) * K * N + k[:, None] * N + c[None, :]
    for k0 in range(0, K, BK):
        valid = k < K - k0
        if TMA:
            x_tile = x.load([row, k0])
            w_tile = w.load([expert, k0, n * BN]).reshape(BK, BN)
        elif EVEN:
            x_tile = tl.load(x_ptrs + k0)
            w_tile = tl.load(w_ptrs, column, 0.0)
        else:
            x_tile = tl.load(x_ptrs + k0, valid[None, :], 0.0)
            w_tile = tl.load(w_ptrs, valid[:, None] & column, 0.0)
        acc = tl.dot(x_tile, w_tile, acc, input_precision="ieee")
        if not TMA:
            w_ptrs += BK * N
    return acc


@triton.jit
def _dot_step(
    acc, x, x_at, row, w, expert, k0, n, N, K, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr, TMA: tl.constexpr
):
    """One step of :func:`_dot`, over BK elements from k0 on."""
    k = k0 + tl.arange(0, BK)
    c = n * BN + tl.arange(0, BN)
    if TMA:
        x_tile = x.load([row, k0])
        w_tile = w.load([expert, k0, n * BN]).reshape(BK, BN)
    else:
        x_ptrs = x + x_at[:, None] + k[None, :]
        w_ptrs = (
            w + expert.to(tl.int64) * K * N + tl.cast(k0, tl.int64) * N + tl.arange(0, BK)[:, None] * N + c[None, :]
        )
        if EVEN:
            x_tile = tl.load(x_ptrs)
            w_tile = tl.load(w_ptrs, (c < N)[None, :], 0.0)
        else:
            x_tile = tl.load(x_ptrs, (k < K)[None, :], 0.0)
            w_tile = tl.load(w_ptrs, (k < K)[:, None] & (c < N)[None, :], 0.0)
    return tl.dot(x_tile, w_tile, acc, input_precision="ieee")


@triton.jit
def _source_rows(order_ptr, r, valid, active, GATHER: tl.constexpr):
    """Input rows: the choices' tokens, or the rows themselves; row 0 where masked, since it exists."""
    if GATHER:
        return (tl.load(order_ptr + r, valid, 0).to(tl.int32) // active).to(tl.int64)
    return tl.where(valid, r, 0).to(tl.int64)


@triton.jit
def _tile_offsets(start, end, m, n, N, BM: tl.constexpr, BN: tl.constexpr):
    """(offset of tile m, n of an expert's rows, offsets of its elements from there, their mask).

    Only the tile's offset is 64 bits wide: 64 bits per element would take registers that the accumulators need.
    """
    i, c = tl.arange(0, BM), tl.arange(0, BN)
    base = (start + m * BM).to(tl.int64) * N + n * BN
    return base, i[:, None] * N + c[None, :], (i < end - start - m * BM)[:, None] & (c < N - n * BN)[None, :]


@triton.jit
def up_kernel(
    x, order_ptr, ends_ptr, up_w, gate_w, up_b_ptr, gate_b_ptr, h_ptr, a_ptr, u_ptr, D, F, E, stride, active,
    C: tl.constexpr,
):  # fmt: skip
    """h, and with KEEP the pre-activations a and u for the backward pass."""
    columns = tl.cdiv(F, C.BN)
    count, first_e, tiles_e = schedule(ends_ptr, E, columns, C.BM, C.E_PAD, C.ONE_TOKEN)
    for tile in range(tl.program_id(0), count, tl.num_programs(0)):
        expert, m, n, start, end = find_tile(tile, first_e, tiles_e, ends_ptr, columns, C.E_PAD, C.GROUP, C.ONE_TOKEN)
        r = start + m * C.BM + tl.arange(0, C.BM)
        x_at = _source_rows(order_ptr, r, r < end, active, C.GATHER) * stride
        u, a = _dot_transposed(x, x_at, start + m * C.BM, up_w, gate_w, expert, n, F, D, C.GATED, C)
        f = n * C.BN + tl.arange(0, C.BN)
        if C.BIASED:
            u += tl.load(up_b_ptr + expert * F + f, f < F, 0.0).to(tl.float32)[None, :]
            if C.GATED:
                a += tl.load(gate_b_ptr + expert * F + f, f < F, 0.0).to(tl.float32)[None, :]
        h = activate(a, C.ACT)[0] * u if C.GATED else activate(u, C.ACT)[0]
        base, at, valid = _tile_offsets(start, end, m, n, F, C.BM, C.BN)
        tl.store(h_ptr + base + at, h.to(h_ptr.dtype.element_ty), valid)
        if C.KEEP:
            tl.store(u_ptr + base + at, u.to(u_ptr.dtype.element_ty), valid)
            if C.GATED:
                tl.store(a_ptr + base + at, a.to(a_ptr.dtype.element_ty), valid)


@triton.jit
def down_kernel(
    x1, x2, order_ptr, ends_ptr, w1, w2, bias_ptr, routing_ptr, y_ptr, F, D, E,
    C: tl.constexpr,
):  # fmt: skip
    """y = h W_down, or with TWO dx = du W_up + da W_gate.

    INTERLEAVED: one loop does a step of each GEMM; two loops would wait twice for their first operands.
    """
    columns = tl.cdiv(D, C.BN)
    count, first_e, tiles_e = schedule(ends_ptr, E, columns, C.BM, C.E_PAD, C.ONE_TOKEN)
    for tile in range(tl.program_id(0), count, tl.num_programs(0)):
        expert, m, n, start, end = find_tile(tile, first_e, tiles_e, ends_ptr, columns, C.E_PAD, C.GROUP, C.ONE_TOKEN)
        row = start + m * C.BM
        r = row + tl.arange(0, C.BM)
        x_at = tl.where(r < end, r, start).to(tl.int64) * F
        y = tl.zeros((C.BM, C.BN), tl.float32)
        if C.INTERLEAVED:
            for k0 in range(0, F, C.BK):
                y = _dot_step(y, x1, x_at, row, w1, expert, k0, n, D, F, C.BN, C.BK, C.EVEN, C.TMA)
                y = _dot_step(y, x2, x_at, row, w2, expert, k0, n, D, F, C.BN, C.BK, C.EVEN, C.TMA)
        else:
            y = _dot(y, x1, x_at, row, w1, expert, n, D, F, C.BN, C.BK, C.EVEN, C.TMA)
            if C.TWO:
                y = _dot(y, x2, x_at, row, w2, expert, n, D, F, C.BN, C.BK, C.EVEN, C.TMA)
        d = n * C.BN + tl.arange(0, C.BN)
        if C.BIASED:
            y += tl.load(bias_ptr + expert * D + d, d < D, 0.0).to(tl.float32)[None, :]
        if C.WEIGHTED:
            choice = tl.load(order_ptr + r, r < end, 0)
            y *= tl.load(routing_ptr + choice, r < end, 0.0).to(tl.float32)[:, None]
        base, at, valid = _tile_offsets(start, end, m, n, D, C.BM, C.BN)
        tl.store(y_ptr + base + at, y.to(y_ptr.dtype.element_ty), valid)


@triton.jit
def _activation_backward(
    dh, w, start, end, m, n, tensors, F, GATED: tl.constexpr, ACT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr
):
    """Writes w h, da and du of a slice of columns; returns each row's h · dh over it."""
    base, at, valid = _tile_offsets(start, end, m, n, F, BM, BN)
    u = tl.load(tensors.u + base + at, valid, 0.0).to(tl.float32)
    weighted = dh * w[:, None]
    if GATED:
        h, slope = activate(tl.load(tensors.a + base + at, valid, 0.0).to(tl.float32), ACT)
        tl.store(tensors.da + base + at, (weighted * u * slope).to(tensors.da.dtype.element_ty), valid)
        tl.store(tensors.du + base + at, (weighted * h).to(tensors.du.dtype.element_ty), valid)
        h *= u
    else:
        h, slope = activate(u, ACT)
        tl.store(tensors.du + base + at, (weighted * slope).to(tensors.du.dtype.element_ty), valid)
    tl.store(tensors.h + base + at, (h * w[:, None]).to(tensors.h.dtype.element_ty), valid)
    # dh of columns past F was computed with column 0's weights, so it is masked.
    return tl.sum(tl.where(valid, h * dh, 0.0), 1)


@triton.jit
def _split_columns(x, BM: tl.constexpr, BN: tl.constexpr):
    """The left and right halves of x's columns."""
    return tl.reshape(x, (BM, 2, BN // 2)).permute(0, 2, 1).split()


@triton.jit
def hidden_dgrad_kernel(
    dy, order_ptr, ends_ptr, down_w, routing_ptr, tensors, dot_ptr, R, D, F, E, stride, active, C: tl.constexpr
):
    """w h, da and du, and each tile's part of h · dh as (tiles of columns, R)."""
    columns = tl.cdiv(F, C.BN)
    count, first_e, tiles_e = schedule(ends_ptr, E, columns, C.BM, C.E_PAD, False)
    for tile in range(tl.program_id(0), count, tl.num_programs(0)):
        expert, m, n, start, end = find_tile(tile, first_e, tiles_e, ends_ptr, columns, C.E_PAD, C.GROUP, False)
        r = start + m * C.BM + tl.arange(0, C.BM)
        dy_at = _source_rows(order_ptr, r, r < end, active, C.GATHER) * stride
        dh, _ = _dot_transposed(dy, dy_at, start + m * C.BM, down_w, down_w, expert, n, F, D, False, C)
        choice = tl.load(order_ptr + r, r < end, 0)
        w = tl.load(routing_ptr + choice, r < end, 0.0).to(tl.float32)
        # In slices of columns: whole tiles of a, u, h, da and du would not fit the registers together with the
        # accumulator.
        halves = _split_columns(dh, C.BM, C.BN)
        dot = tl.zeros((C.BM,), tl.float32)
        for i in tl.static_range(2):
            quarters = _split_columns(halves[i], C.BM, C.BN // 2)
            for j in tl.static_range(2):
                dot += _activation_backward(
                    quarters[j], w, start, end, m, 4 * n + 2 * i + j, tensors, F,
                    C.GATED, C.ACT, C.BM, C.BN // 4,
                )  # fmt: skip
        tl.store(dot_ptr + n.to(tl.int64) * R + r, dot, r < end)
