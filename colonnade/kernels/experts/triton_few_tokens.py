"""Experts for a few tokens at memory bandwidth: two kernel launches, and no sort.

    h_r = act(W_gate x_t) ⊙ W_up x_t        persistent programs, each a block of hidden units of one choice r = (t, j)
    y_t = Σ_j w_tj (W_down h_tj + b)        a program per block of outputs of a token, over all its choices, j in order

A decode step of one request is bound by the bandwidth of reading its experts, and by launches. Sorting the choices,
gathering their rows and summing over them would take three launches, and tiles of one row would be mostly empty. Here
each choice looks up its expert itself, and a token's choices are summed where they are computed. Tokens with the same
expert each read it; if it is large, from memory. As in :mod:`..linear.triton_skinny_gemm`, STAGES − 1 tiles of weights
are prefetched ahead of the one in use, across block boundaries; with PDL (programmatic dependent launch) the second
kernel is already resident when the first ends.

A choice without an expert adds nothing. Results are reproducible bit for bit.
"""

from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton import language as tl

from colonnade.kernels.device import multiprocessors, shared_memory_bytes
from colonnade.kernels.experts.reference import Weights
from colonnade.kernels.experts.triton_activation import activate
from colonnade.kernels.triton_constants import constexprs
from colonnade.kernels.triton_permute import row_contiguous

UP_TILES = {"BN": 4, "BK": 1024, "V": 8, "STAGES": 3, "num_warps": 4}
DOWN_TILES = {"BF": 512, "STAGES": 4, "num_warps": 4}
PROGRAMS_PER_SM = 2
"""Persistent programs of the first kernel per SM."""
MIN_OUTPUTS, MAX_OUTPUTS = 16, 64
"""Outputs per program of the second kernel, within which each SM gets about one program."""
MAX_SHARED_BYTES, SCRATCH_BYTES = 2**17, 1024
"""Shared memory for the tiles of the second kernel, and what the compiler needs in addition."""


class UpConstants(NamedTuple):
    """Constants of :func:`few_tokens_up_kernel`; D ≤ STEPS · BK, and a thread holds V neighbouring inputs."""

    A: int
    GATED: bool
    BIASED: bool
    ACT: str
    STEPS: int
    R_PAD: int
    BN: int
    BK: int
    V: int
    STAGES: int
    PDL: bool


class DownConstants(NamedTuple):
    """Constants of :func:`few_tokens_down_kernel`; F ≤ STEPS · BF."""

    A: int
    BIASED: bool
    STEPS: int
    R_PAD: int
    BF: int
    BD: int
    STAGES: int
    PDL: bool


@triton.jit
def _expert_of(ids, r, E, R_PAD: tl.constexpr):
    """(the expert of choice ``r`` or 0, whether it has one); ``ids`` are in registers, so this waits for no load."""
    e = tl.sum(tl.where(tl.arange(0, R_PAD) == r, ids, 0), 0)
    valid = (e >= 0) & (e < E)
    return tl.where(valid, e, 0).to(tl.int64), valid


@triton.jit
def few_tokens_up_kernel(
    x_ptr, ids_ptr, gate_ptr, up_ptr, gate_b_ptr, up_b_ptr, h_ptr, R, E, F, D, x_t, C: tl.constexpr
):
    """h in float32."""
    PARTS: tl.constexpr = C.BK // C.V
    k, n = tl.arange(0, C.BK)[None, :], tl.arange(0, C.BN)
    rows = tl.arange(0, C.R_PAD)
    ids = tl.load(ids_ptr + rows, rows < R, E).to(tl.int32)
    first, programs, blocks = tl.program_id(0), tl.num_programs(0), (F + C.BN - 1) // C.BN
    if C.PDL:
        # The second kernel may be scheduled now; it waits for the end of this one before it reads h.
        tl.extra.cuda.gdc_launch_dependents()
    items = (R * blocks - first + programs - 1) // programs
    acc, acc_u = tl.zeros([C.BN, PARTS], tl.float32), tl.zeros([C.BN, PARTS], tl.float32)
    for i in tl.range(0, items * C.STEPS, num_stages=C.STAGES):
        item = first + i // C.STEPS * programs
        r, f = item // blocks, tl.minimum(item % blocks * C.BN + n, F - 1)
        e, valid = _expert_of(ids, r, E, C.R_PAD)
        d = i % C.STEPS * C.BK + k
        d_valid = d < tl.where(valid, D, 0)
        w_at = (e * F + f)[:, None] * D + d
        x = tl.load(x_ptr + (r // C.A).to(tl.int64) * x_t + d, d_valid, 0.0)
        x = tl.reshape(x.to(tl.float32), [1, PARTS, C.V])
        w = tl.load(up_ptr + w_at, d_valid, 0.0)
        acc_u += tl.sum(tl.reshape(w, [C.BN, PARTS, C.V]).to(tl.float32) * x, 2)
        if C.GATED:
            w = tl.load(gate_ptr + w_at, d_valid, 0.0)
            acc += tl.sum(tl.reshape(w, [C.BN, PARTS, C.V]).to(tl.float32) * x, 2)
        if i % C.STEPS == C.STEPS - 1:
            f_valid = item % blocks * C.BN + n < tl.where(valid, F, 0)
            u = tl.sum(acc_u, 1)
            if C.BIASED:
                u += tl.load(up_b_ptr + e * F + f, f_valid, 0.0).to(tl.float32)
            if C.GATED:
                a = tl.sum(acc, 1)
                if C.BIASED:
                    a += tl.load(gate_b_ptr + e * F + f, f_valid, 0.0).to(tl.float32)
                h = activate(a, C.ACT)[0] * u
            else:
                h = activate(u, C.ACT)[0]
            tl.store(h_ptr + r * F + item % blocks * C.BN + n, h, f_valid)
            acc, acc_u = tl.zeros([C.BN, PARTS], tl.float32), tl.zeros([C.BN, PARTS], tl.float32)


@triton.jit
def few_tokens_down_kernel(h_ptr, ids_ptr, routing_ptr, down_ptr, down_b_ptr, y_ptr, R, E, F, D, C: tl.constexpr):
    """BD outputs of one token."""
    t, d = tl.program_id(0), tl.program_id(1) * C.BD + tl.arange(0, C.BD)
    f, rows = tl.arange(0, C.BF), tl.arange(0, C.R_PAD)
    ids = tl.load(ids_ptr + rows, rows < R, E).to(tl.int32)
    acc = tl.zeros([C.BF, C.BD], tl.float32)
    if C.PDL:
        tl.extra.cuda.gdc_wait()
    for i in tl.range(0, C.A * C.STEPS, num_stages=C.STAGES):
        r = t * C.A + i // C.STEPS
        e, valid = _expert_of(ids, r, E, C.R_PAD)
        at = i % C.STEPS * C.BF + f
        f_valid = at < tl.where(valid, F, 0)
        h = tl.load(h_ptr + r * F + at, f_valid, 0.0) * tl.load(routing_ptr + r).to(tl.float32)
        w = tl.load(down_ptr + (e * F + at)[:, None] * D + d[None, :], f_valid[:, None] & (d < D)[None, :], 0.0)
        acc += h[:, None] * w.to(tl.float32)
    y = tl.sum(acc, 0)
    if C.BIASED:
        for j in range(C.A):
            e, valid = _expert_of(ids, t * C.A + j, E, C.R_PAD)
            weight = tl.load(routing_ptr + t * C.A + j).to(tl.float32)
            y += weight * tl.load(down_b_ptr + e * D + d, d < tl.where(valid, D, 0), 0.0).to(tl.float32)
    tl.store(y_ptr + t.to(tl.int64) * D + d, y.to(y_ptr.dtype.element_ty), d < D)


def tile_hidden_units(outputs: int, element_bytes: int, shared: float) -> int:
    """Hidden units per tile of the second kernel, so that STAGES − 1 tiles with their h fit ``shared`` bytes."""
    fits = int(min(MAX_SHARED_BYTES, shared - SCRATCH_BYTES)) // (
        (DOWN_TILES["STAGES"] - 1) * (outputs * element_bytes + 4)
    )
    return min(DOWN_TILES["BF"], 1 << fits.bit_length() - 1)


@torch.library.custom_op("colonnade::few_experts", mutates_args=())
def _routed_unsorted(
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
    h_RF, sms = x_TD.new_empty(R, F, dtype=torch.float32), multiprocessors(x_TD.device)
    R_PAD = max(2, triton.next_power_of_2(R))
    BK = min(UP_TILES["BK"], max(16, triton.next_power_of_2(D)))
    blocks = R * triton.cdiv(F, UP_TILES["BN"])
    pdl = x_TD.is_cuda and torch.cuda.get_device_capability(x_TD.device) >= (9, 0)
    few_tokens_up_kernel[min(blocks, PROGRAMS_PER_SM * sms),](
        x_TD, ids_R, gate_EFD, up_EFD, gate_b, up_b, h_RF, R, E, F, D, x_TD.stride(0),
        constexprs(UpConstants(
            A, gate_EFD is not None, up_b is not None, activation, triton.cdiv(D, BK), R_PAD, UP_TILES["BN"], BK,
            UP_TILES["V"], UP_TILES["STAGES"], pdl,
        )),
        num_warps=UP_TILES["num_warps"],
    )  # fmt: skip
    BD = min(MAX_OUTPUTS, max(MIN_OUTPUTS, triton.next_power_of_2(T * D // sms)))
    BF = tile_hidden_units(BD, x_TD.itemsize, shared_memory_bytes(x_TD.device))
    few_tokens_down_kernel[T, triton.cdiv(D, BD)](
        h_RF, ids_R, weights_R, down_EFD, down_b, y_TD, R, E, F, D,
        constexprs(
            DownConstants(A, down_b is not None, triton.cdiv(F, BF), R_PAD, BF, BD, DOWN_TILES["STAGES"], pdl)
        ),
        num_warps=DOWN_TILES["num_warps"], **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip
    return y_TD


@_routed_unsorted.register_fake
def _(x_TD, ids_TA, weights_TA, up_EFD, down_EFD, gate_EFD, up_b, gate_b, down_b, activation):
    return x_TD.new_empty(x_TD.shape)


def routed_unsorted(x_TD: Tensor, ids_TA: Tensor, weights_TA: Tensor, weights: Weights, activation: str) -> Tensor:
    """y_TD (see :func:`reference.routed_unsorted`); no gradient."""
    return _routed_unsorted(x_TD, ids_TA, weights_TA, *weights.map(Tensor.contiguous), activation)
