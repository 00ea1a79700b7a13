"""The experts' products that have a row of the result for a row of the input, as grouped matrix products.

    up            u = x W_upᵀ + b, a = x W_gateᵀ + b; h = act(a) ⊙ u in its epilogue
    down          y = w ⊙ (h W_down + b)
    hidden_back   dh = dy W_downᵀ; in its epilogue w ⊙ h, du, da and each row's h · dh, which is dw (but for the bias)
    rows_back     dx = du W_up + da W_gate in one sum; the same kernel as ``down``

``up`` and ``hidden_back`` take their rows from the tokens, by ``order``, where that is given: the gather costs no pass
of its own. Operands stay in their own type, sums are float32.

R rows of widths D and F take 6RDF operations forward and 12RDF back when gated. In elements, the least that can move is
3EDF + 2RD + 2RF forward; unfused, the gather, the activation and the weighted sum add 4RD + 3RF. A tile does
BM·BN / (BM + BN) operations a byte of level-2 traffic in 2-byte types: 85 at 128 × 256, 32 at 64 × 64. With R / E below
some 200 rows, the weights' 6EDF bytes over the bandwidth are the floor, and tiles only need to be many.

The order of tiles is :mod:`colonnade.kernels.experts.triton_tile_schedule`'s. Rows past the last end are left alone,
but by ``down`` and ``rows_back`` with TAIL, which write 0.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# Constants are plain numbers to a kernel, and its unrolled ranges are nobody else's.

import triton
from triton import language as tl

from colonnade.kernels.experts.triton_activation import activate
from colonnade.kernels.experts.triton_tile_schedule import find_tile, schedule


@triton.jit
def _across(
    x, at, row, w, v, expert, n, N, K,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr, TWO: tl.constexpr,
    TMA: tl.constexpr, LAID: tl.constexpr,
):  # fmt: skip
    """(x wᵀ, x vᵀ) for the rows of x that start at ``at``, with LAID the BM from ``row`` on; w and v are (E, N, K)."""
    k = tl.arange(0, BK)
    c = n * BN + tl.arange(0, BN)
    weight_at = (expert.to(tl.int64) * N + tl.where(c < N, c, 0)) * K
    one = tl.zeros((BM, BN), tl.float32)
    two = tl.zeros((BM, BN), tl.float32)
    for k0 in range(0, K, BK):
        here = k < K - k0
        if LAID:
            x_tile = x.load([row, k0])
        elif EVEN:
            x_tile = tl.load(x + at[:, None] + (k0 + k)[None, :])
        else:
            x_tile = tl.load(x + at[:, None] + (k0 + k)[None, :], here[None, :], 0.0)
        if TMA:
            wt = tl.trans(w.load([expert, n * BN, k0]).reshape(BN, BK))
        elif EVEN:
            wt = tl.load(w + weight_at[None, :] + (k0 + k)[:, None])
        else:
            wt = tl.load(w + weight_at[None, :] + (k0 + k)[:, None], here[:, None], 0.0)
        one = tl.dot(x_tile, wt, one, input_precision="ieee")
        if TWO:
            if TMA:
                vt = tl.trans(v.load([expert, n * BN, k0]).reshape(BN, BK))
            elif EVEN:
                vt = tl.load(v + weight_at[None, :] + (k0 + k)[:, None])
            else:
                vt = tl.load(v + weight_at[None, :] + (k0 + k)[:, None], here[:, None], 0.0)
            two = tl.dot(x_tile, vt, two, input_precision="ieee")
    return one, two


@triton.jit
def _along(
    acc, x, at, row, w, expert, n, N, K, width,
    BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """acc + x w over the first ``width`` of K, for the rows of x as in :func:`_across`; w is (E, K, N)."""
    k = tl.arange(0, BK)
    c = n * BN + tl.arange(0, BN)
    # A mask, not another column in its place: columns stay known as neighbours, and are copied 16 bytes at once.
    column = (c < N)[None, :]
    x_ptrs, w_ptrs = x, w
    if not TMA:
        x_ptrs = x + at[:, None] + k[None, :]
        w_ptrs = w + expert.to(tl.int64) * K * N + k[:, None] * N + c[None, :]
    for k0 in range(0, width, BK):
        here = k < K - k0
        if TMA:
            x_tile = x.load([row, k0])
            wt = w.load([expert, k0, n * BN]).reshape(BK, BN)
        elif EVEN:
            x_tile = tl.load(x_ptrs + k0)
            wt = tl.load(w_ptrs, column, 0.0)
        else:
            x_tile = tl.load(x_ptrs + k0, here[None, :], 0.0)
            wt = tl.load(w_ptrs, here[:, None] & column, 0.0)
        acc = tl.dot(x_tile, wt, acc, input_precision="ieee")
        if not TMA:
            w_ptrs += BK * N
    return acc


@triton.jit
def _step_along(
    acc, x, at, row, w, expert, k0, n, N, K, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr, TMA: tl.constexpr
):
    """acc + x w over BK of K from k0 on, as in :func:`_along`."""
    k = k0 + tl.arange(0, BK)
    c = n * BN + tl.arange(0, BN)
    if TMA:
        x_tile = x.load([row, k0])
        wt = w.load([expert, k0, n * BN]).reshape(BK, BN)
    else:
        x_ptrs = x + at[:, None] + k[None, :]
        w_ptrs = (
            w + expert.to(tl.int64) * K * N + tl.cast(k0, tl.int64) * N + tl.arange(0, BK)[:, None] * N + c[None, :]
        )
        if EVEN:
            x_tile = tl.load(x_ptrs)
            wt = tl.load(w_ptrs, (c < N)[None, :], 0.0)
        else:
            x_tile = tl.load(x_ptrs, (k < K)[None, :], 0.0)
            wt = tl.load(w_ptrs, (k < K)[:, None] & (c < N)[None, :], 0.0)
    return tl.dot(x_tile, wt, acc, input_precision="ieee")


@triton.jit
def _sources(order_ptr, r, here, active, GATHER: tl.constexpr):
    """Rows of the input: the choices' tokens, or the rows themselves; row 0, which exists, where there is none."""
    if GATHER:
        return (tl.load(order_ptr + r, here, 0).to(tl.int32) // active).to(tl.int64)
    return tl.where(here, r, 0).to(tl.int64)


@triton.jit
def _tile(start, end, m, n, N, BM: tl.constexpr, BN: tl.constexpr):
    """(where tile m, n of an expert's rows begins, its elements from there, which of them there are).

    Only the beginning needs 64 bits: for each element they would be registers that the sums need.
    """
    i, c = tl.arange(0, BM), tl.arange(0, BN)
    base = (start + m * BM).to(tl.int64) * N + n * BN
    return base, i[:, None] * N + c[None, :], (i < end - start - m * BM)[:, None] & (c < N - n * BN)[None, :]


@triton.jit
def up_kernel(
    x, order_ptr, ends_ptr, up_w, gate_w, up_b_ptr, gate_b_ptr, h_ptr, a_ptr, u_ptr, R, D, F, E, stride, active,
    GATHER: tl.constexpr, GATED: tl.constexpr, BIASED: tl.constexpr, KEEP: tl.constexpr, ACT: tl.constexpr,
    ALONE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, E_PAD: tl.constexpr,
    EVEN: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """h, and with KEEP what the way back needs: a and u before the activation."""
    columns = tl.cdiv(F, BN)
    count, first_e, tiles_e = schedule(ends_ptr, R, E, columns, BM, E_PAD, False, ALONE)
    for tile in range(tl.program_id(0), count, tl.num_programs(0)):
        expert, m, n, start, end = find_tile(tile, first_e, tiles_e, ends_ptr, R, E, columns, E_PAD, GROUP, ALONE)
        r = start + m * BM + tl.arange(0, BM)
        at = _sources(order_ptr, r, r < end, active, GATHER) * stride
        row = start + m * BM
        u, a = _across(
            x, at, row, up_w, gate_w, expert, n, F, D, BM, BN, BK, EVEN, GATED, TMA, TMA and not GATHER
        )  # fmt: skip
        f = n * BN + tl.arange(0, BN)
        if BIASED:
            u += tl.load(up_b_ptr + expert * F + f, f < F, 0.0).to(tl.float32)[None, :]
            if GATED:
                a += tl.load(gate_b_ptr + expert * F + f, f < F, 0.0).to(tl.float32)[None, :]
        h = activate(a, ACT)[0] * u if GATED else activate(u, ACT)[0]
        base, to, here = _tile(start, end, m, n, F, BM, BN)
        tl.store(h_ptr + base + to, h.to(h_ptr.dtype.element_ty), here)
        if KEEP:
            tl.store(u_ptr + base + to, u.to(u_ptr.dtype.element_ty), here)
            if GATED:
                tl.store(a_ptr + base + to, a.to(a_ptr.dtype.element_ty), here)


@triton.jit
def down_kernel(
    one, two, order_ptr, ends_ptr, one_w, two_w, bias_ptr, routing_ptr, y_ptr, R, F, D, E,
    TWO: tl.constexpr, BIASED: tl.constexpr, WEIGHTED: tl.constexpr, TAIL: tl.constexpr, ALONE: tl.constexpr,
    TOGETHER: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, E_PAD: tl.constexpr,
    EVEN: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """y of h (or dx of du and da); with TAIL 0 for the rows past the last end.

    TOGETHER: one loop takes a step of each of both, where two would wait twice for their first operands.
    """
    columns = tl.cdiv(D, BN)
    count, first_e, tiles_e = schedule(ends_ptr, R, E, columns, BM, E_PAD, TAIL, ALONE)
    for tile in range(tl.program_id(0), count, tl.num_programs(0)):
        expert, m, n, start, end = find_tile(tile, first_e, tiles_e, ends_ptr, R, E, columns, E_PAD, GROUP, ALONE)
        r = start + m * BM + tl.arange(0, BM)
        at = tl.where(r < end, r, start).to(tl.int64) * F
        width = tl.where(expert < E, F, 0) if TAIL else F
        y = tl.zeros((BM, BN), tl.float32)
        row = start + m * BM
        if TOGETHER:
            for k0 in range(0, width, BK):
                y = _step_along(y, one, at, row, one_w, expert, k0, n, D, F, BN, BK, EVEN, TMA)
                y = _step_along(y, two, at, row, two_w, expert, k0, n, D, F, BN, BK, EVEN, TMA)
        else:
            y = _along(y, one, at, row, one_w, expert, n, D, F, width, BN, BK, EVEN, TMA)
            if TWO:
                y = _along(y, two, at, row, two_w, expert, n, D, F, width, BN, BK, EVEN, TMA)
        d = n * BN + tl.arange(0, BN)
        if BIASED:
            y += tl.load(bias_ptr + expert * D + d, d < tl.where(expert < E, D, 0), 0.0).to(tl.float32)[None, :]
        if WEIGHTED:
            choice = tl.load(order_ptr + r, r < end, 0)
            y *= tl.load(routing_ptr + choice, r < end, 0.0).to(tl.float32)[:, None]
        base, to, here = _tile(start, end, m, n, D, BM, BN)
        tl.store(y_ptr + base + to, y.to(y_ptr.dtype.element_ty), here)


@triton.jit
def _slice_back(
    dh, w, start, end, m, n, a_ptr, u_ptr, h_ptr, da_ptr, du_ptr, F,
    GATED: tl.constexpr, ACT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """h · dh of each row over a slice of columns, whose w h, da and du are written."""
    base, to, here = _tile(start, end, m, n, F, BM, BN)
    u = tl.load(u_ptr + base + to, here, 0.0).to(tl.float32)
    weighted = dh * w[:, None]
    if GATED:
        h, slope = activate(tl.load(a_ptr + base + to, here, 0.0).to(tl.float32), ACT)
        tl.store(da_ptr + base + to, (weighted * u * slope).to(da_ptr.dtype.element_ty), here)
        tl.store(du_ptr + base + to, (weighted * h).to(du_ptr.dtype.element_ty), here)
        h *= u
    else:
        h, slope = activate(u, ACT)
        tl.store(du_ptr + base + to, (weighted * slope).to(du_ptr.dtype.element_ty), here)
    tl.store(h_ptr + base + to, (h * w[:, None]).to(h_ptr.dtype.element_ty), here)
    # Columns past F hold a product with column 0's weights: they count only where h is 0, as it is there.
    return tl.sum(tl.where(here, h * dh, 0.0), 1)


@triton.jit
def _halves(x, BM: tl.constexpr, BN: tl.constexpr):
    """The left and the right half of x's columns."""
    return tl.reshape(x, (BM, 2, BN // 2)).permute(0, 2, 1).split()


@triton.jit
def hidden_dgrad_kernel(
    dy, order_ptr, ends_ptr, down_w, routing_ptr, a_ptr, u_ptr, h_ptr, da_ptr, du_ptr, part_ptr, R, D, F, E, stride,
    active,
    GATHER: tl.constexpr, GATED: tl.constexpr, WEIGHTED: tl.constexpr, ACT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, E_PAD: tl.constexpr,
    EVEN: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """w h, da and du; with WEIGHTED also each tile's share of h · dh, (tiles of columns, R)."""
    columns = tl.cdiv(F, BN)
    count, first_e, tiles_e = schedule(ends_ptr, R, E, columns, BM, E_PAD, False, False)
    for tile in range(tl.program_id(0), count, tl.num_programs(0)):
        expert, m, n, start, end = find_tile(tile, first_e, tiles_e, ends_ptr, R, E, columns, E_PAD, GROUP, False)
        r = start + m * BM + tl.arange(0, BM)
        at = _sources(order_ptr, r, r < end, active, GATHER) * stride
        dh, _ = _across(
            dy, at, start + m * BM, down_w, down_w, expert, n, F, D, BM, BN, BK, EVEN, False, TMA, TMA and not GATHER
        )  # fmt: skip
        w = tl.full((BM,), 1.0, tl.float32)
        if WEIGHTED:
            choice = tl.load(order_ptr + r, r < end, 0)
            w = tl.load(routing_ptr + choice, r < end, 0.0).to(tl.float32)
        # In slices of columns: a whole tile of each of a, u, h, da, du beside the sums would not fit the registers.
        halves = _halves(dh, BM, BN)
        dot = tl.zeros((BM,), tl.float32)
        for i in tl.static_range(2):
            quarters = _halves(halves[i], BM, BN // 2)
            for j in tl.static_range(2):
                dot += _slice_back(
                    quarters[j], w, start, end, m, 4 * n + 2 * i + j, a_ptr, u_ptr, h_ptr, da_ptr, du_ptr, F,
                    GATED, ACT, BM, BN // 4,
                )  # fmt: skip
        if WEIGHTED:
            tl.store(part_ptr + n.to(tl.int64) * R + r, dot, r < end)
