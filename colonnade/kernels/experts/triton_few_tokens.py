"""Experts of a few rows at the speed of memory: two launches, and no sort.

    h_r = act(W_gate x_t) ⊙ W_up x_t        a program a few hidden units of a choice r = (t, j) after another
    y_t = Σ_j w_tj (W_down h_tj + b)        a program a few outputs of a token, over all its choices; j in order

What a decode step of one request takes is reading its experts once, and then every launch counts: sorting its choices,
laying them out for the matrix units, and summing over them are three, and the tiles of one row mostly empty. Here a
choice finds its expert's weights by itself, and the choices of a token are summed where they are made. Of tokens that
chose the same expert each reads it again, from memory where it is large. As in :mod:`..linear.triton_thin` tiles of
weights are on their way STAGES − 1 ahead of the one in use, through all that a program does; and with EARLY the second
launch stands ready when the first ends.

A choice of no expert has no part in the sum. The bits are the same each time.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportOptionalMemberAccess=false, reportIndexIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
# pyright: reportPossiblyUnboundVariable=false
# A kernel is launched with more than its signature says; its constants are plain numbers, and say what is bound.

import torch
import triton
from torch import Tensor
from triton import language as tl

from colonnade.kernels.device import multiprocessors, shared_memory_bytes
from colonnade.kernels.experts.reference import Weights
from colonnade.kernels.experts.triton_activation import activate
from colonnade.kernels.triton_permute import row_contiguous

UP = {"BN": 4, "BK": 1024, "V": 8, "STAGES": 3, "num_warps": 4}
DOWN = {"BF": 512, "STAGES": 4, "num_warps": 4}
A_PROCESSOR = 2
"""Programs of the first product that stay, a multiprocessor."""
LEAST, WIDEST = 16, 64
"""Outputs of a program of the second product: about as many as leave every multiprocessor one."""
ROOM, SCRATCH = 2**17, 1024
"""Bytes of shared memory for the tiles of the second product, and for what the compiler needs beside them."""


@triton.jit
def _expert_of(ids, r, E, R_PAD: tl.constexpr):
    """(an expert to read, whether choice ``r`` is one), of ``ids`` that are in registers: nothing waits for a load."""
    e = tl.sum(tl.where(tl.arange(0, R_PAD) == r, ids, 0), 0)
    there = (e >= 0) & (e < E)
    return tl.where(there, e, 0).to(tl.int64), there


@triton.jit
def few_up(
    x_ptr, ids_ptr, gate_ptr, up_ptr, gate_b_ptr, up_b_ptr, h_ptr, R, E, F, D, x_t,
    A: tl.constexpr, GATED: tl.constexpr, BIASED: tl.constexpr, ACT: tl.constexpr,
    STEPS: tl.constexpr, R_PAD: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, V: tl.constexpr,
    STAGES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """h, in float32; a thread has V neighbouring inputs, which are STEPS · BK."""
    C: tl.constexpr = BK // V
    k, n = tl.arange(0, BK)[None, :], tl.arange(0, BN)
    rows = tl.arange(0, R_PAD)
    ids = tl.load(ids_ptr + rows, rows < R, E).to(tl.int32)
    first, programs, blocks = tl.program_id(0), tl.num_programs(0), (F + BN - 1) // BN
    if EARLY:
        # The second product may take its places now; it waits for the end of this before it reads h.
        tl.extra.cuda.gdc_launch_dependents()
    mine = (R * blocks - first + programs - 1) // programs
    acc, acc_u = tl.zeros([BN, C], tl.float32), tl.zeros([BN, C], tl.float32)
    for i in tl.range(0, mine * STEPS, num_stages=STAGES):
        item = first + i // STEPS * programs
        r, f = item // blocks, tl.minimum(item % blocks * BN + n, F - 1)
        e, there = _expert_of(ids, r, E, R_PAD)
        at = i % STEPS * BK + k
        inside = at < tl.where(there, D, 0)
        w_at = (e * F + f)[:, None] * D + at
        x = tl.load(x_ptr + (r // A).to(tl.int64) * x_t + at, inside, 0.0)
        x = tl.reshape(x.to(tl.float32), [1, C, V])
        w = tl.load(up_ptr + w_at, inside, 0.0)
        acc_u += tl.sum(tl.reshape(w, [BN, C, V]).to(tl.float32) * x, 2)
        if GATED:
            w = tl.load(gate_ptr + w_at, inside, 0.0)
            acc += tl.sum(tl.reshape(w, [BN, C, V]).to(tl.float32) * x, 2)
        if i % STEPS == STEPS - 1:
            kept = item % blocks * BN + n < tl.where(there, F, 0)
            u = tl.sum(acc_u, 1)
            if BIASED:
                u += tl.load(up_b_ptr + e * F + f, kept, 0.0).to(tl.float32)
            if GATED:
                a = tl.sum(acc, 1)
                if BIASED:
                    a += tl.load(gate_b_ptr + e * F + f, kept, 0.0).to(tl.float32)
                h = activate(a, ACT)[0] * u
            else:
                h = activate(u, ACT)[0]
            tl.store(h_ptr + r * F + item % blocks * BN + n, h, kept)
            acc, acc_u = tl.zeros([BN, C], tl.float32), tl.zeros([BN, C], tl.float32)


@triton.jit
def few_down(
    h_ptr, ids_ptr, weights_ptr, down_ptr, down_b_ptr, y_ptr, R, E, F, D,
    A: tl.constexpr, BIASED: tl.constexpr, STEPS: tl.constexpr, R_PAD: tl.constexpr, BF: tl.constexpr,
    BD: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """y of BD outputs of one token; its hidden units are STEPS · BF."""
    t, d = tl.program_id(0), tl.program_id(1) * BD + tl.arange(0, BD)
    f, rows = tl.arange(0, BF), tl.arange(0, R_PAD)
    ids = tl.load(ids_ptr + rows, rows < R, E).to(tl.int32)
    acc = tl.zeros([BF, BD], tl.float32)
    if EARLY:
        tl.extra.cuda.gdc_wait()
    for i in tl.range(0, A * STEPS, num_stages=STAGES):
        r = t * A + i // STEPS
        e, there = _expert_of(ids, r, E, R_PAD)
        at = i % STEPS * BF + f
        most = tl.where(there, F, 0)
        h = tl.load(h_ptr + r * F + at, at < most, 0.0) * tl.load(weights_ptr + r).to(tl.float32)
        w = tl.load(down_ptr + (e * F + at)[:, None] * D + d[None, :], (at < most)[:, None] & (d < D)[None, :], 0.0)
        acc += h[:, None] * w.to(tl.float32)
    y = tl.sum(acc, 0)
    if BIASED:
        for j in range(A):
            e, there = _expert_of(ids, t * A + j, E, R_PAD)
            weight = tl.load(weights_ptr + t * A + j).to(tl.float32)
            y += weight * tl.load(down_b_ptr + e * D + d, d < tl.where(there, D, 0), 0.0).to(tl.float32)
    tl.store(y_ptr + t.to(tl.int64) * D + d, y.to(y_ptr.dtype.element_ty), d < D)


def tile_rows(outputs: int, element_bytes: int, room: float) -> int:
    """Hidden units of a tile of the second product, of which STAGES − 1 with their h are on their way in ``room``."""
    fits = int(min(ROOM, room - SCRATCH)) // ((DOWN["STAGES"] - 1) * (outputs * element_bytes + 4))
    return min(DOWN["BF"], 1 << fits.bit_length() - 1)


@torch.library.custom_op("colonnade::few_experts", mutates_args=())
def _few(
    x_TD: Tensor, ids_TA: Tensor, weights_TA: Tensor, up_EFD: Tensor, down_EFD: Tensor, gate_EFD: Tensor | None,
    up_b: Tensor | None, gate_b: Tensor | None, down_b: Tensor | None, activation: str,
) -> Tensor:  # fmt: skip
    x_TD, (T, A), (E, F, D) = row_contiguous(x_TD), ids_TA.shape, up_EFD.shape
    R, y_TD = T * A, x_TD.new_empty(x_TD.shape)
    if not y_TD.numel():
        return y_TD
    if not (R and F):
        return y_TD.zero_()
    ids_R, weights_R = ids_TA.contiguous(), weights_TA.contiguous()
    h_RF, chip = x_TD.new_empty(R, F, dtype=torch.float32), multiprocessors(x_TD.device)
    how = {"R_PAD": max(2, triton.next_power_of_2(R))}
    block = min(UP["BK"], max(16, triton.next_power_of_2(D)))
    blocks = R * triton.cdiv(F, UP["BN"])
    early = x_TD.is_cuda and torch.cuda.get_device_capability(x_TD.device) >= (9, 0)
    few_up[min(blocks, A_PROCESSOR * chip),](
        x_TD, ids_R, gate_EFD, up_EFD, gate_b, up_b, h_RF, R, E, F, D, x_TD.stride(0), A, gate_EFD is not None,
        up_b is not None, activation, triton.cdiv(D, block), **how, **{**UP, "BK": block}, EARLY=early,
    )  # fmt: skip
    wide = min(WIDEST, max(LEAST, triton.next_power_of_2(T * D // chip)))
    high = tile_rows(wide, x_TD.itemsize, shared_memory_bytes(x_TD.device))
    few_down[T, triton.cdiv(D, wide)](
        h_RF, ids_R, weights_R, down_EFD, down_b, y_TD, R, E, F, D, A, down_b is not None, triton.cdiv(F, high), **how,
        BD=wide, **{**DOWN, "BF": high}, EARLY=early, **({"launch_pdl": True} if early else {}),
    )  # fmt: skip
    return y_TD


@_few.register_fake
def _(x_TD, ids_TA, weights_TA, up_EFD, down_EFD, gate_EFD, up_b, gate_b, down_b, activation):
    return x_TD.new_empty(x_TD.shape)


def few(x_TD: Tensor, ids_TA: Tensor, weights_TA: Tensor, weights: Weights, activation: str) -> Tensor:
    """y_TD (see :func:`reference.few`); no gradient."""
    return _few(x_TD, ids_TA, weights_TA, *weights.each(Tensor.contiguous), activation)
