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
some 200 rows, reading the weights (6EDF bytes) is the limit, and it is enough to have many tiles.

:mod:`colonnade.kernels.experts.triton_tile_schedule` defines the order of tiles. Rows past the last end are not
written.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# Inside a kernel constexpr arguments are plain numbers, and static ranges are unrolled.

import triton
from triton import language as tl

from colonnade.kernels.experts.triton_activation import activate
from colonnade.kernels.experts.triton_tile_schedule import find_tile, schedule


@triton.jit
def _dot_transposed(
    x, x_at, row, w, v, expert, n, N, K,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr, TWO: tl.constexpr,
    TMA: tl.constexpr, X_TMA: tl.constexpr,
):  # fmt: skip
    """(x wᵀ, x vᵀ) for rows of x at offsets ``x_at``, with X_TMA the BM rows from ``row`` on; w and v are (E, N, K)."""
    k = tl.arange(0, BK)
    c = n * BN + tl.arange(0, BN)
    w_at = (expert.to(tl.int64) * N + tl.where(c < N, c, 0)) * K
    acc_w = tl.zeros((BM, BN), tl.float32)
    acc_v = tl.zeros((BM, BN), tl.float32)
    for k0 in range(0, K, BK):
        valid = k < K - k0
        if X_TMA:
            x_tile = x.load([row, k0])
        elif EVEN:
            x_tile = tl.load(x + x_at[:, None] + (k0 + k)[None, :])
        else:
            x_tile = tl.load(x + x_at[:, None] + (k0 + k)[None, :], valid[None, :], 0.0)
        if TMA:
            w_tile = tl.trans(w.load([expert, n * BN, k0]).reshape(BN, BK))
        elif EVEN:
            w_tile = tl.load(w + w_at[None, :] + (k0 + k)[:, None])
        else:
            w_tile = tl.load(w + w_at[None, :] + (k0 + k)[:, None], valid[:, None], 0.0)
        acc_w = tl.dot(x_tile, w_tile, acc_w, input_precision="ieee")
        if TWO:
            if TMA:
                v_tile = tl.trans(v.load([expert, n * BN, k0]).reshape(BN, BK))
            elif EVEN:
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
    GATHER: tl.constexpr, GATED: tl.constexpr, BIASED: tl.constexpr, KEEP: tl.constexpr, ACT: tl.constexpr,
    ONE_TOKEN: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, E_PAD: tl.constexpr,
    EVEN: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """h, and with KEEP the pre-activations a and u for the backward pass."""
    columns = tl.cdiv(F, BN)
    count, first_e, tiles_e = schedule(ends_ptr, E, columns, BM, E_PAD, ONE_TOKEN)
    for tile in range(tl.program_id(0), count, tl.num_programs(0)):
        expert, m, n, start, end = find_tile(tile, first_e, tiles_e, ends_ptr, columns, E_PAD, GROUP, ONE_TOKEN)
        r = start + m * BM + tl.arange(0, BM)
        x_at = _source_rows(order_ptr, r, r < end, active, GATHER) * stride
        u, a = _dot_transposed(
            x, x_at, start + m * BM, up_w, gate_w, expert, n, F, D, BM, BN, BK, EVEN, GATED, TMA, TMA and not GATHER
        )  # fmt: skip
        f = n * BN + tl.arange(0, BN)
        if BIASED:
            u += tl.load(up_b_ptr + expert * F + f, f < F, 0.0).to(tl.float32)[None, :]
            if GATED:
                a += tl.load(gate_b_ptr + expert * F + f, f < F, 0.0).to(tl.float32)[None, :]
        h = activate(a, ACT)[0] * u if GATED else activate(u, ACT)[0]
        base, at, valid = _tile_offsets(start, end, m, n, F, BM, BN)
        tl.store(h_ptr + base + at, h.to(h_ptr.dtype.element_ty), valid)
        if KEEP:
            tl.store(u_ptr + base + at, u.to(u_ptr.dtype.element_ty), valid)
            if GATED:
                tl.store(a_ptr + base + at, a.to(a_ptr.dtype.element_ty), valid)


@triton.jit
def down_kernel(
    x1, x2, order_ptr, ends_ptr, w1, w2, bias_ptr, routing_ptr, y_ptr, F, D, E,
    TWO: tl.constexpr, BIASED: tl.constexpr, WEIGHTED: tl.constexpr, ONE_TOKEN: tl.constexpr, INTERLEAVED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, E_PAD: tl.constexpr,
    EVEN: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """y = h W_down, or with TWO dx = du W_up + da W_gate.

    INTERLEAVED: one loop does a step of each GEMM; two loops would wait twice for their first operands.
    """
    columns = tl.cdiv(D, BN)
    count, first_e, tiles_e = schedule(ends_ptr, E, columns, BM, E_PAD, ONE_TOKEN)
    for tile in range(tl.program_id(0), count, tl.num_programs(0)):
        expert, m, n, start, end = find_tile(tile, first_e, tiles_e, ends_ptr, columns, E_PAD, GROUP, ONE_TOKEN)
        row = start + m * BM
        r = row + tl.arange(0, BM)
        x_at = tl.where(r < end, r, start).to(tl.int64) * F
        y = tl.zeros((BM, BN), tl.float32)
        if INTERLEAVED:
            for k0 in range(0, F, BK):
                y = _dot_step(y, x1, x_at, row, w1, expert, k0, n, D, F, BN, BK, EVEN, TMA)
                y = _dot_step(y, x2, x_at, row, w2, expert, k0, n, D, F, BN, BK, EVEN, TMA)
        else:
            y = _dot(y, x1, x_at, row, w1, expert, n, D, F, BN, BK, EVEN, TMA)
            if TWO:
                y = _dot(y, x2, x_at, row, w2, expert, n, D, F, BN, BK, EVEN, TMA)
        d = n * BN + tl.arange(0, BN)
        if BIASED:
            y += tl.load(bias_ptr + expert * D + d, d < D, 0.0).to(tl.float32)[None, :]
        if WEIGHTED:
            choice = tl.load(order_ptr + r, r < end, 0)
            y *= tl.load(routing_ptr + choice, r < end, 0.0).to(tl.float32)[:, None]
        base, at, valid = _tile_offsets(start, end, m, n, D, BM, BN)
        tl.store(y_ptr + base + at, y.to(y_ptr.dtype.element_ty), valid)


@triton.jit
def _activation_backward(
    dh, w, start, end, m, n, a_ptr, u_ptr, h_ptr, da_ptr, du_ptr, F,
    GATED: tl.constexpr, ACT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Writes w h, da and du of a slice of columns; returns each row's h · dh over it."""
    base, at, valid = _tile_offsets(start, end, m, n, F, BM, BN)
    u = tl.load(u_ptr + base + at, valid, 0.0).to(tl.float32)
    weighted = dh * w[:, None]
    if GATED:
        h, slope = activate(tl.load(a_ptr + base + at, valid, 0.0).to(tl.float32), ACT)
        tl.store(da_ptr + base + at, (weighted * u * slope).to(da_ptr.dtype.element_ty), valid)
        tl.store(du_ptr + base + at, (weighted * h).to(du_ptr.dtype.element_ty), valid)
        h *= u
    else:
        h, slope = activate(u, ACT)
        tl.store(du_ptr + base + at, (weighted * slope).to(du_ptr.dtype.element_ty), valid)
    tl.store(h_ptr + base + at, (h * w[:, None]).to(h_ptr.dtype.element_ty), valid)
    # dh of columns past F was computed with column 0's weights, so it is masked.
    return tl.sum(tl.where(valid, h * dh, 0.0), 1)


@triton.jit
def _split_columns(x, BM: tl.constexpr, BN: tl.constexpr):
    """The left and right halves of x's columns."""
    return tl.reshape(x, (BM, 2, BN // 2)).permute(0, 2, 1).split()


@triton.jit
def hidden_dgrad_kernel(
    dy, order_ptr, ends_ptr, down_w, routing_ptr, a_ptr, u_ptr, h_ptr, da_ptr, du_ptr, dot_ptr, R, D, F, E, stride,
    active,
    GATHER: tl.constexpr, GATED: tl.constexpr, ACT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, E_PAD: tl.constexpr,
    EVEN: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """w h, da and du, and each tile's part of h · dh as (tiles of columns, R)."""
    columns = tl.cdiv(F, BN)
    count, first_e, tiles_e = schedule(ends_ptr, E, columns, BM, E_PAD, False)
    for tile in range(tl.program_id(0), count, tl.num_programs(0)):
        expert, m, n, start, end = find_tile(tile, first_e, tiles_e, ends_ptr, columns, E_PAD, GROUP, False)
        r = start + m * BM + tl.arange(0, BM)
        dy_at = _source_rows(order_ptr, r, r < end, active, GATHER) * stride
        dh, _ = _dot_transposed(
            dy, dy_at, start + m * BM, down_w, down_w, expert, n, F, D, BM, BN, BK, EVEN, False, TMA, TMA and not GATHER
        )  # fmt: skip
        choice = tl.load(order_ptr + r, r < end, 0)
        w = tl.load(routing_ptr + choice, r < end, 0.0).to(tl.float32)
        # In slices of columns: whole tiles of a, u, h, da and du beside the accumulator would not fit the registers.
        halves = _split_columns(dh, BM, BN)
        dot = tl.zeros((BM,), tl.float32)
        for i in tl.static_range(2):
            quarters = _split_columns(halves[i], BM, BN // 2)
            for j in tl.static_range(2):
                dot += _activation_backward(
                    quarters[j], w, start, end, m, 4 * n + 2 * i + j, a_ptr, u_ptr, h_ptr, da_ptr, du_ptr, F,
                    GATED, ACT, BM, BN // 4,
                )  # fmt: skip
        tl.store(dot_ptr + n.to(tl.int64) * R + r, dot, r < end)
