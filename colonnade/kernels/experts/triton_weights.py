"""Gradients of the experts' weights and biases: sums over each expert's own rows.

    dW_e = p_eᵀ q_e = Σ_r p_r ⊗ q_r        r over the rows of e; the rows of p or of q may be gathered from the tokens

An output tile belongs to one program, which walks over all rows of the expert: no addition is atomic, so the result is
the same bits each time, and an expert without rows gets its zeros in the same pass. Operations: 2RDF a product; bytes:
the rows of p and q once for each tile of columns and of rows (from the cache), 2EDF written. All tiles of an expert
take the same time, n_e · BM · BN; with a load so skewed that one expert has nearly all rows, what is lost is the last
wave of its ceil(F/BM) · ceil(D/BN) tiles.
"""

# pyright: reportCallIssue=false, reportArgumentType=false

import triton
from triton import language as tl

from colonnade.kernels.experts.triton_schedule import rows_of


@triton.jit
def weights_back(
    p_ptr, s_ptr, q_ptr, order_ptr, ends_ptr, dp_ptr, ds_ptr, R, F, D, E, q_stride, active,
    TWO: tl.constexpr, GATHER: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """pᵀ q, and with TWO sᵀ q too, (E, F, D), of p and s (R, F) and q (R, D), gathered with GATHER."""
    rows, columns = tl.cdiv(F, BM), tl.cdiv(D, BN)
    expert = tl.program_id(0) // (rows * columns)
    local = tl.program_id(0) % (rows * columns)
    first = local // (GROUP * columns) * GROUP
    size = tl.minimum(rows - first, GROUP)
    local = local % (GROUP * columns)
    f = (first + local % size) * BM + tl.arange(0, BM)
    d = local // size * BN + tl.arange(0, BN)
    start, end = rows_of(ends_ptr, expert, E, R)
    k = tl.arange(0, BK)
    one = tl.zeros((BM, BN), tl.float32)
    two = tl.zeros((BM, BN), tl.float32)
    for r0 in range(start, end, BK):
        r = r0 + k
        q_r = tl.load(order_ptr + r, r < end, 0).to(tl.int64) // active if GATHER else r.to(tl.int64)
        q = tl.load(q_ptr + q_r[:, None] * q_stride + d[None, :], (r < end)[:, None] & (d < D)[None, :], 0.0)
        at = r.to(tl.int64)[:, None] * F + f[None, :]
        here = (r < end)[:, None] & (f < F)[None, :]
        one = tl.dot(tl.trans(tl.load(p_ptr + at, here, 0.0)), q, one, input_precision="ieee")
        if TWO:
            two = tl.dot(tl.trans(tl.load(s_ptr + at, here, 0.0)), q, two, input_precision="ieee")
    to = (expert.to(tl.int64) * F + f)[:, None] * D + d[None, :]
    here = (f < F)[:, None] & (d < D)[None, :]
    tl.store(dp_ptr + to, one.to(dp_ptr.dtype.element_ty), here)
    if TWO:
        tl.store(ds_ptr + to, two.to(ds_ptr.dtype.element_ty), here)


@triton.jit
def biases_back(
    p_ptr, order_ptr, ends_ptr, routing_ptr, db_ptr, R, F, E, active,
    GATHER: tl.constexpr, WEIGHTED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Σ_r p_r over each expert's rows, (E, F); with WEIGHTED each row by its routing weight."""
    expert = tl.program_id(0)
    f = tl.program_id(1) * BN + tl.arange(0, BN)
    start, end = rows_of(ends_ptr, expert, E, R)
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
