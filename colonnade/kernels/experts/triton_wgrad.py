"""Gradients of the experts' weights and biases: sums over each expert's own rows.

    dW_e = p_eᵀ q_e = Σ_r p_r ⊗ q_r        r over the rows of e; the rows of q may be gathered from the tokens

An output tile belongs to one program, which walks over all rows of the expert: no addition is atomic, so the result is
the same bits each time, and an expert without rows gets its zeros in the same pass. Operations: 2RDF a product; bytes:
the rows of p and q once for each tile of columns and of rows (from the cache), 2EDF written. All tiles of an expert
take the same time, n_e · BM · BN, so experts take turns by their loads: were the busiest of 128 narrow ones the last,
its 48 tiles would leave most of the chip idle.

What is summed over is ragged, so the last step of an expert has fewer than BK rows. Only that step asks which rows
there are: all others take BK rows unasked, by the tensor copy engine where the tiles say so, and what they reckon
beside the matrix units is a step's address. A multiplication takes 1024 cycles of the matrix units for a step of
128 × 256 × 64, in which the other units have time for some 500 instructions of each of 8 warps: the token of each row
(choice // active, in 64 bits) found anew in every step took them all.
"""

# pyright: reportCallIssue=false, reportArgumentType=false

import triton
from triton import language as tl

from colonnade.kernels.experts.triton_tile_schedule import expert_rows


@triton.jit
def _columns_of(
    x, r0, c0, here, N, BK: tl.constexpr, BN: tl.constexpr, WHOLE: tl.constexpr, EVEN: tl.constexpr, TMA: tl.constexpr
):
    """BK rows of x from r0 on, BN columns from c0 on; without WHOLE 0 where a row is not ``here``."""
    c = tl.arange(0, BN)
    if TMA:
        tile = x.load([r0, c0])
        if not WHOLE:
            tile = tl.where(here[:, None], tile, 0.0)
    else:
        at = x + tl.cast(r0, tl.int64) * N + c0 + tl.arange(0, BK)[:, None] * N + c[None, :]
        if not WHOLE:
            tile = tl.load(at, here[:, None] & (c < N - c0)[None, :], 0.0)
        elif EVEN:
            tile = tl.load(at)
        else:
            tile = tl.load(at, (c < N - c0)[None, :], 0.0)
    return tile


@triton.jit
def _step(
    one, two, p, s, q, token_ptr, r0, end, f0, d0, F, D, q_stride,
    TWO: tl.constexpr, GATHER: tl.constexpr, WHOLE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """(one + pᵀ q, two + sᵀ q) over the BK rows from r0 on, with WHOLE all before ``end``."""
    r = r0 + tl.arange(0, BK)
    here = r < end
    if GATHER:
        t = tl.load(token_ptr + r) if WHOLE else tl.load(token_ptr + r, here, 0)
        c = tl.arange(0, BN)
        at = q + d0 + t.to(tl.int64)[:, None] * q_stride + c[None, :]
        if WHOLE:
            q_tile = tl.load(at) if EVEN else tl.load(at, (c < D - d0)[None, :], 0.0)
        else:
            q_tile = tl.load(at, here[:, None] & (c < D - d0)[None, :], 0.0)
    else:
        q_tile = _columns_of(q, r0, d0, here, D, BK, BN, WHOLE, EVEN, TMA)
    p_tile = _columns_of(p, r0, f0, here, F, BK, BM, WHOLE, EVEN, TMA)
    one = tl.dot(tl.trans(p_tile), q_tile, one, input_precision="ieee")
    if TWO:
        s_tile = _columns_of(s, r0, f0, here, F, BK, BM, WHOLE, EVEN, TMA)
        two = tl.dot(tl.trans(s_tile), q_tile, two, input_precision="ieee")
    return one, two


@triton.jit
def wgrad_kernel(
    p, s, q, token_ptr, turn_ptr, ends_ptr, dp_ptr, ds_ptr, R, F, D, E, q_stride,
    TWO: tl.constexpr, GATHER: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, EVEN: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """pᵀ q, and with TWO sᵀ q too, (E, F, D), of p and s (R, F) and q (R, D), gathered with GATHER.

    EVEN: F is a multiple of BM and D one of BN; ``turn`` are the experts, the busiest first. With TMA, p and s are
    descriptors, and q is one where not gathered.
    """
    rows, columns = tl.cdiv(F, BM), tl.cdiv(D, BN)
    expert = tl.load(turn_ptr + tl.program_id(0) // (rows * columns)).to(tl.int32)
    local = tl.program_id(0) % (rows * columns)
    first = local // (GROUP * columns) * GROUP
    size = tl.minimum(rows - first, GROUP)
    local = local % (GROUP * columns)
    f0, d0 = (first + local % size) * BM, local // size * BN
    start, end = expert_rows(ends_ptr, expert, E, R)
    whole = start + (end - start) // BK * BK
    one = tl.zeros((BM, BN), tl.float32)
    two = tl.zeros((BM, BN), tl.float32)
    for r0 in range(start, whole, BK):
        one, two = _step(
            one, two, p, s, q, token_ptr, r0, end, f0, d0, F, D, q_stride, TWO, GATHER, True, BM, BN, BK, EVEN, TMA
        )
    if whole < end:
        one, two = _step(
            one, two, p, s, q, token_ptr, whole, end, f0, d0, F, D, q_stride, TWO, GATHER, False, BM, BN, BK, EVEN, TMA
        )
    i, j = tl.arange(0, BM), tl.arange(0, BN)
    base = (expert.to(tl.int64) * F + f0) * D + d0
    to = i[:, None] * D + j[None, :]
    here = (i < F - f0)[:, None] & (j < D - d0)[None, :]
    tl.store(dp_ptr + base + to, one.to(dp_ptr.dtype.element_ty), here)
    if TWO:
        tl.store(ds_ptr + base + to, two.to(ds_ptr.dtype.element_ty), here)


@triton.jit
def bias_grad_kernel(
    p_ptr, order_ptr, ends_ptr, routing_ptr, db_ptr, R, F, E, active,
    GATHER: tl.constexpr, WEIGHTED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Σ_r p_r over each expert's rows, (E, F); with WEIGHTED each row by its routing weight."""
    expert = tl.program_id(0)
    f = tl.program_id(1) * BN + tl.arange(0, BN)
    start, end = expert_rows(ends_ptr, expert, E, R)
    total = tl.zeros((BM, BN), tl.float32)
    for r0 in range(start, end, BM):
        r = r0 + tl.arange(0, BM)
        source = r.to(tl.int64)
        if GATHER:
            source = tl.load(order_ptr + r, r < end, 0).to(tl.int64) // active
        p = tl.load(p_ptr + source[:, None] * F + f[None, :], (r < end)[:, None] & (f < F)[None, :], 0.0).to(tl.float32)
        if WEIGHTED:
            choice = tl.load(order_ptr + r, r < end, 0)
            p *= tl.load(routing_ptr + choice, r < end, 0.0).to(tl.float32)[:, None]
        total += p
    tl.store(db_ptr + expert * F + f, tl.sum(total, 0).to(db_ptr.dtype.element_ty), f < F)
