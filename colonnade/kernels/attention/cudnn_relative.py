"""Self-attention with relative position biases through cuDNN, and the gradient of the biases in Triton.

    p_ij = exp(q_i·k_j·H^-½ + b_ij − lse_i)        db_ij = Σ_batch p_ij (do_i·v_j − do_i·o_i)

cuDNN adds a bias to the scores but computes no gradient for it. For a mask that requires a gradient, torch therefore
uses another kernel, which writes a gradient per sequence, or under torch.compile plain products in float32. Here one
kernel recomputes the scores and sums over the batch in registers; it writes neither scores nor gradients per sequence.
"""

import math
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton import language as tl

from colonnade.kernels.attention import cross
from colonnade.kernels.triton_constants import constexprs

LOG2_E = tl.constexpr(1 / math.log(2))
MIN_PROGRAMS = 264
"""With fewer blocks than twice an H100's multiprocessors the batch is split, and the parts are added."""


class _Rows(NamedTuple):
    """A tensor (B, T, N, H) and its strides."""

    ptr: Any
    batch: Any
    token: Any
    head: Any


class _Config(NamedTuple):
    PADDED: bool
    BLOCK_Q: int
    BLOCK_K: int
    BLOCK_H: int


BLOCK_Q, BLOCK_K, WARPS, STAGES = 64, 64, 4, 3
"""The fastest of 13 on an H100: 0.28 ms for 32 sequences of 512 tokens and 16 heads of 64; 0.54 with 128 × 64."""


@triton.jit
def _load_rows(x, b, t, n, T, H, BLOCK_H: tl.constexpr):
    h = tl.arange(0, BLOCK_H)
    at = x.ptr + b.to(tl.int64) * x.batch + n * x.head + t[:, None] * x.token + h[None, :]
    return tl.load(at, (t < T)[:, None] & (h < H)[None, :], 0.0)


@triton.jit
def _relative_attention_bias_grad(
    q, k, v, o, do, lse_ptr, bias_ptr, lengths_ptr, out_ptr, B, T, H, scale, cfg: tl.constexpr
):  # fmt: skip
    """One block of the gradient of one head's biases, summed over every ``num_programs(2)``-th sequence."""
    n, part, N, parts = tl.program_id(1), tl.program_id(2), tl.num_programs(1), tl.num_programs(2)
    columns = tl.cdiv(T, cfg.BLOCK_K)
    i = tl.program_id(0) // columns * cfg.BLOCK_Q + tl.arange(0, cfg.BLOCK_Q)
    j = tl.program_id(0) % columns * cfg.BLOCK_K + tl.arange(0, cfg.BLOCK_K)
    inside, at = (i < T)[:, None] & (j < T)[None, :], (n * T + i[:, None]) * T + j[None, :]
    bias = tl.load(bias_ptr + at, inside, float("-inf")).to(tl.float32) * LOG2_E
    total = tl.zeros((cfg.BLOCK_Q, cfg.BLOCK_K), tl.float32)
    for step in range(tl.cdiv(B - part, parts)):
        b = part + step * parts
        queries, keys = _load_rows(q, b, i, n, T, H, cfg.BLOCK_H), _load_rows(k, b, j, n, T, H, cfg.BLOCK_H)
        s = tl.dot(queries, tl.trans(keys), input_precision="ieee") * (scale * LOG2_E) + bias
        if cfg.PADDED:
            s = tl.where((j < tl.load(lengths_ptr + b))[None, :], s, float("-inf"))
        p = tl.exp2(s - tl.load(lse_ptr + (b * N + n) * T + i, i < T, 0.0)[:, None] * LOG2_E)
        grads = _load_rows(do, b, i, n, T, H, cfg.BLOCK_H)
        delta = tl.sum(grads.to(tl.float32) * _load_rows(o, b, i, n, T, H, cfg.BLOCK_H).to(tl.float32), 1)
        dp = tl.dot(grads, tl.trans(_load_rows(v, b, j, n, T, H, cfg.BLOCK_H)), input_precision="ieee")
        total += p * (dp - delta[:, None])
    tl.store(out_ptr + part * N * T * T + at, total, inside)


def bias_grad(
    do_BTNH: Tensor, q_BTNH: Tensor, k_BTNH: Tensor, v_BTNH: Tensor, o_BTNH: Tensor, lse_BNT: Tensor, bias_NTS: Tensor,
    lengths_B: Tensor | None,
) -> Tensor:  # fmt: skip
    """float32 gradient of the biases; ``lengths_B`` are the lengths of padded sequences."""
    B, T, N, H = q_BTNH.shape
    blocks = triton.cdiv(T, BLOCK_Q) * triton.cdiv(T, BLOCK_K)
    parts = max(1, min(B, MIN_PROGRAMS // (blocks * N)))
    out = torch.empty(parts, N, T, T, dtype=torch.float32, device=q_BTNH.device)
    rows = (_Rows(x, *x.stride()[:3]) for x in (q_BTNH, k_BTNH, v_BTNH, o_BTNH, do_BTNH))
    cfg = _Config(lengths_B is not None, BLOCK_Q, BLOCK_K, max(16, triton.next_power_of_2(H)))
    _relative_attention_bias_grad[blocks, N, parts](
        *rows, lse_BNT, bias_NTS, lengths_B, out, B, T, H, H**-0.5, constexprs(cfg), num_warps=WARPS, num_stages=STAGES
    )
    return out[0] if parts == 1 else out.sum(0)


@torch.library.custom_op("colonnade::relative_attention", mutates_args=())
def _attend(
    q_BTNH: Tensor, k_BTNH: Tensor, v_BTNH: Tensor, bias_NTS: Tensor, lengths_B: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(o_BTNH, lse_BNT)."""
    heads, mask = (x.transpose(1, 2) for x in (q_BTNH, k_BTNH, v_BTNH)), cross.bias_mask(bias_NTS, lengths_B)
    o, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(*heads, mask, True)
    return o.transpose(1, 2).contiguous(), lse.reshape(lse.shape[:3])


@_attend.register_fake
def _(q_BTNH, k_BTNH, v_BTNH, bias_NTS, lengths_B):
    B, T, N, _ = q_BTNH.shape
    return q_BTNH.new_empty(q_BTNH.shape), q_BTNH.new_empty(B, N, T, dtype=torch.float32)


@torch.library.custom_op("colonnade::relative_attention_backward", mutates_args=())
def _attend_backward(
    do_BTNH: Tensor, q_BTNH: Tensor, k_BTNH: Tensor, v_BTNH: Tensor, bias_NTS: Tensor, lengths_B: Tensor | None,
    o_BTNH: Tensor, lse_BNT: Tensor, need_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    do_BTNH, T = do_BTNH.contiguous(), q_BTNH.shape[1]
    do, q, k, v, o = (x.transpose(1, 2) for x in (do_BTNH, q_BTNH, k_BTNH, v_BTNH, o_BTNH))
    unused = torch.zeros((), dtype=torch.int64, device=q.device)  # the generator of dropout
    grads = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        do,
        q,
        k,
        v,
        o,
        lse_BNT[..., None],
        unused,
        unused,
        cross.bias_mask(bias_NTS, lengths_B),
        None,
        None,
        T,
        T,
        0.0,
        False,
    )
    dq, dk, dv = (x.transpose(1, 2).contiguous() for x in grads)
    if not need_bias:
        return dq, dk, dv, bias_NTS.new_empty(0)
    dbias = bias_grad(do_BTNH, q_BTNH, k_BTNH, v_BTNH, o_BTNH, lse_BNT, bias_NTS, lengths_B)
    return dq, dk, dv, dbias.to(bias_NTS.dtype)


@_attend_backward.register_fake
def _(do_BTNH, q_BTNH, k_BTNH, v_BTNH, bias_NTS, lengths_B, o_BTNH, lse_BNT, need_bias):
    grads = (x.new_empty(x.shape) for x in (q_BTNH, k_BTNH, v_BTNH))
    return *grads, bias_NTS.new_empty(bias_NTS.shape if need_bias else 0)


def _save_inputs(ctx, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, *output)


def _attention_grad(ctx, do_BTNH: Tensor, _: Tensor | None):
    # The log-sum-exp is not returned to the user, so it has no gradient.
    need_bias = ctx.needs_input_grad[3]
    dq, dk, dv, dbias = _attend_backward(do_BTNH, *ctx.saved_tensors, need_bias)
    return dq, dk, dv, dbias if need_bias else None, None


_attend.register_autograd(_attention_grad, setup_context=_save_inputs)


def relative(
    q_TNH: Tensor,
    k_TKH: Tensor,
    v_TKH: Tensor,
    cu_seqlens: Tensor,
    near_RN: Tensor,
    *,
    causal: bool,
    longest: int | None = None,
    equal: bool = False,
    bias_NTS: Tensor | None = None,
) -> Tensor:
    """o_TNH (see :func:`cross.relative_sdpa`, which runs what cuDNN does not support)."""
    (T, N, H), K = q_TNH.shape, k_TKH.shape[1]
    if longest is None or longest < 2 or not T or H % 8 or H > 128 or N != K:
        return cross.relative_sdpa(
            q_TNH, k_TKH, v_TKH, cu_seqlens, near_RN, causal=causal, longest=longest, equal=equal, bias_NTS=bias_NTS
        )
    if bias_NTS is None:
        bias_NTS = cross.relative_mask(near_RN, longest, causal=causal)
    return cross.in_batches(_output, q_TNH, k_TKH, v_TKH, cu_seqlens, longest, bias_NTS.to(q_TNH.dtype), equal=equal)


def _output(q_BTNH: Tensor, k_BTNH: Tensor, v_BTNH: Tensor, bias_NTS: Tensor, lengths_B: Tensor | None) -> Tensor:
    return _attend(q_BTNH, k_BTNH, v_BTNH, bias_NTS, lengths_B)[0]
