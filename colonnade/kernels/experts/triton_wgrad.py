"""Weight and bias gradients of the experts: sums over each expert's own rows.

    dW_e = p_eᵀ q_e = Σ_r p_r ⊗ q_r        r over the rows of e; q may be gathered from the tokens

Each output tile belongs to one program, which loops over all rows of its expert: no atomics, so results are
reproducible bit for bit, and an expert without rows gets its zeros in the same pass. Operations: 2RDF per GEMM;
traffic: the rows of p and q once per tile of columns and of rows (from the cache), and 2EDF bytes written. All tiles of
an expert take the same time, n_e · BM · BN, so experts are processed in order of decreasing load: if the busiest of 128
narrow experts came last, its 48 tiles would leave most of the GPU idle.

The summed dimension is ragged: the last step of an expert has fewer than BK rows. Only that step is masked. All others
load BK rows without a mask, by TMA where the table selects it, and compute only addresses besides the tensor core
instructions. A multiplication takes 1024 tensor core cycles for a step of 128 × 256 × 64, enough for some 500 other
instructions of each of 8 warps: computing each row's token (choice // active, in 64 bits) in every step took as
many, so it is computed once in advance.
"""

from typing import NamedTuple

import triton
from triton import language as tl

from colonnade.kernels.experts.triton_tile_schedule import expert_rows


class Constants(NamedTuple):
    """Compile-time constants of :func:`wgrad_kernel`."""

    BM: int
    BN: int
    BK: int
    GROUP: int
    EVEN: bool
    """Whether F is a multiple of BM and D of BN."""
    TMA: bool
    """Whether p, s and an ungathered q are tensor descriptors."""
    TWO: bool
    GATHER: bool


@triton.jit
def _load_tile(
    x, r0, c0, valid, N, BK: tl.constexpr, BN: tl.constexpr, WHOLE: tl.constexpr, EVEN: tl.constexpr, TMA: tl.constexpr
):
    """BK rows of x from r0 on, BN columns from c0 on; without WHOLE, 0 for rows that are not ``valid``."""
    c = tl.arange(0, BN)
    if TMA:
        tile = x.load([r0, c0])
        if not WHOLE:
            tile = tl.where(valid[:, None], tile, 0.0)
    else:
        at = x + tl.cast(r0, tl.int64) * N + c0 + tl.arange(0, BK)[:, None] * N + c[None, :]
        if not WHOLE:
            tile = tl.load(at, valid[:, None] & (c < N - c0)[None, :], 0.0)
        elif EVEN:
            tile = tl.load(at)
        else:
            tile = tl.load(at, (c < N - c0)[None, :], 0.0)
    return tile


@triton.jit
def _step(acc_p, acc_s, p, s, q, token_ptr, r0, end, f0, d0, F, D, q_stride, WHOLE: tl.constexpr, C: tl.constexpr):
    """(acc_p + pᵀ q, acc_s + sᵀ q) over BK rows from r0 on; with WHOLE, all of them are before ``end``."""
    r = r0 + tl.arange(0, C.BK)
    valid = r < end
    if C.GATHER:
        t = tl.load(token_ptr + r) if WHOLE else tl.load(token_ptr + r, valid, 0)
        c = tl.arange(0, C.BN)
        at = q + d0 + t.to(tl.int64)[:, None] * q_stride + c[None, :]
        if WHOLE:
            q_tile = tl.load(at) if C.EVEN else tl.load(at, (c < D - d0)[None, :], 0.0)
        else:
            q_tile = tl.load(at, valid[:, None] & (c < D - d0)[None, :], 0.0)
    else:
        q_tile = _load_tile(q, r0, d0, valid, D, C.BK, C.BN, WHOLE, C.EVEN, C.TMA)
    p_tile = _load_tile(p, r0, f0, valid, F, C.BK, C.BM, WHOLE, C.EVEN, C.TMA)
    acc_p = tl.dot(tl.trans(p_tile), q_tile, acc_p, input_precision="ieee")
    if C.TWO:
        s_tile = _load_tile(s, r0, f0, valid, F, C.BK, C.BM, WHOLE, C.EVEN, C.TMA)
        acc_s = tl.dot(tl.trans(s_tile), q_tile, acc_s, input_precision="ieee")
    return acc_p, acc_s


@triton.jit
def wgrad_kernel(p, s, q, token_ptr, by_load_ptr, ends_ptr, dp_ptr, ds_ptr, F, D, q_stride, C: tl.constexpr):
    """pᵀ q, with TWO also sᵀ q, (E, F, D); p and s are (R, F), q is (R, D) or, with GATHER, (T, D).

    ``by_load_ptr`` holds the experts, busiest first.
    """
    rows, columns = tl.cdiv(F, C.BM), tl.cdiv(D, C.BN)
    expert = tl.load(by_load_ptr + tl.program_id(0) // (rows * columns)).to(tl.int32)
    local = tl.program_id(0) % (rows * columns)
    first = local // (C.GROUP * columns) * C.GROUP
    size = tl.minimum(rows - first, C.GROUP)
    local = local % (C.GROUP * columns)
    f0, d0 = (first + local % size) * C.BM, local // size * C.BN
    start, end = expert_rows(ends_ptr, expert)
    whole = start + (end - start) // C.BK * C.BK
    acc_p = tl.zeros((C.BM, C.BN), tl.float32)
    acc_s = tl.zeros((C.BM, C.BN), tl.float32)
    for r0 in range(start, whole, C.BK):
        acc_p, acc_s = _step(
            acc_p, acc_s, p, s, q, token_ptr, r0, end, f0, d0, F, D, q_stride, True, C
        )  # fmt: skip
    if whole < end:
        acc_p, acc_s = _step(
            acc_p, acc_s, p, s, q, token_ptr, whole, end, f0, d0, F, D, q_stride, False, C
        )  # fmt: skip
    i, j = tl.arange(0, C.BM), tl.arange(0, C.BN)
    base = (expert.to(tl.int64) * F + f0) * D + d0
    at = i[:, None] * D + j[None, :]
    valid = (i < F - f0)[:, None] & (j < D - d0)[None, :]
    tl.store(dp_ptr + base + at, acc_p.to(dp_ptr.dtype.element_ty), valid)
    if C.TWO:
        tl.store(ds_ptr + base + at, acc_s.to(ds_ptr.dtype.element_ty), valid)


@triton.jit
def bias_grad_kernel(
    p_ptr, order_ptr, ends_ptr, routing_ptr, db_ptr, F, active,
    OF_TOKENS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Σ_r p_r over each expert's rows, (E, F); with OF_TOKENS, p is (T, F) and each row has its routing weight."""
    expert = tl.program_id(0)
    f = tl.program_id(1) * BN + tl.arange(0, BN)
    start, end = expert_rows(ends_ptr, expert)
    total = tl.zeros((BM, BN), tl.float32)
    for r0 in range(start, end, BM):
        r = r0 + tl.arange(0, BM)
        choice = tl.load(order_ptr + r, r < end, 0) if OF_TOKENS else r
        source = choice.to(tl.int64) // active if OF_TOKENS else r.to(tl.int64)
        p = tl.load(p_ptr + source[:, None] * F + f[None, :], (r < end)[:, None] & (f < F)[None, :], 0.0).to(tl.float32)
        if OF_TOKENS:
            p *= tl.load(routing_ptr + choice, r < end, 0.0).to(tl.float32)[:, None]
        total += p
    tl.store(db_ptr + expert * F + f, tl.sum(total, 0).to(db_ptr.dtype.element_ty), f < F)
