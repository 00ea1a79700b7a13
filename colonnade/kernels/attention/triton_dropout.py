"""FlashAttention-2 with dropout, in Triton: neither scores nor masks are written to memory.

    o_i = Σ_j z_ij p_ij v_j        p = softmax of the scores        z_ij = 1 / (1 − rate) where kept, else 0

Both passes of FlashAttention-2 (Dao 2023, arXiv 2307.08691, algorithms 1 and 2) over packed sequences. The normaliser
is that of p, before dropout, and so is the log-sum-exp that is saved for the backward. There, with Δ_i = do_i · o_i,

    dv_j = Σ_i z_ij p_ij do_i        ds_ij = p_ij (z_ij do_i · v_j − Δ_i)        dq = H^-½ ds k        dk = H^-½ dsᵀ q

Two things differ: z is a hash of the pair's global indices (:mod:`colonnade.kernels.dropout`) and not of its position
in a tile, so it does not depend on tile sizes or the parallel layout; and a key's gradient is summed by one program
over all query heads of its group, so that no addition is atomic and the result is deterministic.
"""

# pyright: reportCallIssue=false, reportArgumentType=false
# Triton adds launch options to a kernel's signature, and constexpr arguments are plain Python values.

import math

import torch
import triton
from torch import Tensor
from triton import language as tl

from colonnade.kernels.dropout import AttentionDropout, threshold
from colonnade.kernels.triton_dropout import lowbias32

LN_2 = tl.constexpr(math.log(2))
"""Scores are in base 2, since the GPU has an exp2 instruction."""


@triton.jit
def _visible(i, j, length, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Which of the keys j each of the queries i may see; a WINDOW of 0 is none."""
    seen = (i < length)[:, None] & (j < length)[None, :]
    if CAUSAL:
        seen = seen & (j[None, :] <= i[:, None])
    if WINDOW:
        seen = seen & (j[None, :] > i[:, None] - WINDOW)
    return seen


@triton.jit
def _load_rows(ptr, t, stride, H, BLOCK_H: tl.constexpr, mask):
    """(rows, BLOCK_H): rows t of one head."""
    h = tl.arange(0, BLOCK_H)
    return tl.load(ptr + t.to(tl.int64)[:, None] * stride + h[None, :], mask[:, None] & (h < H)[None, :], 0.0)


@triton.jit
def _store_rows(ptr, t, stride, H, BLOCK_H: tl.constexpr, mask, value):
    h = tl.arange(0, BLOCK_H)
    at = ptr + t.to(tl.int64)[:, None] * stride + h[None, :]
    tl.store(at, value.to(ptr.dtype.element_ty), mask[:, None] & (h < H)[None, :])


@triton.jit
def _key_range(first, length, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """The keys that any of the queries first .. first + BLOCK_Q − 1 sees; the lower end is a multiple of BLOCK_K."""
    low, high = 0, length
    if CAUSAL:
        high = tl.minimum(length, first + BLOCK_Q)
    if WINDOW:
        low = tl.maximum(0, first - WINDOW + 1) // BLOCK_K * BLOCK_K
    return low, high


@triton.jit
def _forward(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, row_ptr, column_ptr, cu_ptr,
    q_t, q_n, k_t, k_k, v_t, v_k, T, H, blocks, scale, min_hash, keep_scale,
    N: tl.constexpr, GROUP: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    b, n = tl.program_id(0) // blocks, tl.program_id(1)
    first = tl.program_id(0) % blocks * BLOCK_Q
    start = tl.load(cu_ptr + b)
    length = tl.load(cu_ptr + b + 1) - start
    if first >= length:
        return
    i = first + tl.arange(0, BLOCK_Q)
    q = _load_rows(q_ptr + n * q_n, start + i, q_t, H, BLOCK_H, i < length)
    row = tl.load(row_ptr + n * T + start + i, i < length, 0)
    row_max = tl.full((BLOCK_Q,), float("-inf"), tl.float32)
    row_sum = tl.zeros((BLOCK_Q,), tl.float32)
    o = tl.zeros((BLOCK_Q, BLOCK_H), tl.float32)
    low, high = _key_range(first, length, BLOCK_Q, BLOCK_K, CAUSAL, WINDOW)
    for at in range(low, high, BLOCK_K):
        j = at + tl.arange(0, BLOCK_K)
        k = _load_rows(k_ptr + n // GROUP * k_k, start + j, k_t, H, BLOCK_H, j < length)
        v = _load_rows(v_ptr + n // GROUP * v_k, start + j, v_t, H, BLOCK_H, j < length)
        column = tl.load(column_ptr + start + j, j < length, 0)
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        s = tl.where(_visible(i, j, length, CAUSAL, WINDOW), s, float("-inf"))
        new = tl.maximum(row_max, tl.max(s, 1))
        safe_max = tl.where(new == float("-inf"), 0.0, new)  # a row without visible keys so far
        p = tl.exp2(s - safe_max[:, None])
        rescale = tl.exp2(row_max - safe_max)
        row_sum = row_sum * rescale + tl.sum(p, 1)
        p = tl.where(lowbias32(row[:, None] ^ column[None, :]) >= min_hash, p, 0.0)
        o = o * rescale[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        row_max = new
    row_sum = tl.where(row_sum == 0.0, 1.0, row_sum)
    _store_rows(o_ptr + n * H, start + i, N * H, H, BLOCK_H, i < length, o * (keep_scale / row_sum)[:, None])
    tl.store(lse_ptr + n * T + start + i, row_max + tl.log2(row_sum), i < length)


@triton.jit
def _queries_grad(
    q_ptr, k_ptr, v_ptr, do_ptr, dq_ptr, lse_ptr, delta_ptr, row_ptr, column_ptr, cu_ptr,
    q_t, q_n, k_t, k_k, v_t, v_k, T, H, blocks, scale, min_hash, keep_scale,
    N: tl.constexpr, GROUP: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """dq of a block of queries."""
    b, n = tl.program_id(0) // blocks, tl.program_id(1)
    first = tl.program_id(0) % blocks * BLOCK_Q
    start = tl.load(cu_ptr + b)
    length = tl.load(cu_ptr + b + 1) - start
    if first >= length:
        return
    i = first + tl.arange(0, BLOCK_Q)
    line = n * T + start + i
    q = _load_rows(q_ptr + n * q_n, start + i, q_t, H, BLOCK_H, i < length)
    do = _load_rows(do_ptr + n * H, start + i, N * H, H, BLOCK_H, i < length)
    row = tl.load(row_ptr + line, i < length, 0)
    lse = tl.load(lse_ptr + line, i < length, 0.0)
    delta = tl.load(delta_ptr + line, i < length, 0.0)
    dq = tl.zeros((BLOCK_Q, BLOCK_H), tl.float32)
    low, high = _key_range(first, length, BLOCK_Q, BLOCK_K, CAUSAL, WINDOW)
    for at in range(low, high, BLOCK_K):
        j = at + tl.arange(0, BLOCK_K)
        k = _load_rows(k_ptr + n // GROUP * k_k, start + j, k_t, H, BLOCK_H, j < length)
        v = _load_rows(v_ptr + n // GROUP * v_k, start + j, v_t, H, BLOCK_H, j < length)
        column = tl.load(column_ptr + start + j, j < length, 0)
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        p = tl.exp2(tl.where(_visible(i, j, length, CAUSAL, WINDOW), s, float("-inf")) - lse[:, None])
        keep = lowbias32(row[:, None] ^ column[None, :]) >= min_hash
        dp = tl.where(keep, tl.dot(do, tl.trans(v), input_precision="ieee") * keep_scale, 0.0)
        ds = p * (dp - delta[:, None])
        dq += tl.dot(ds.to(k.dtype), k, input_precision="ieee")
    _store_rows(dq_ptr + n * H, start + i, N * H, H, BLOCK_H, i < length, dq * (scale * LN_2))


@triton.jit
def _keys_values_grad(
    q_ptr, k_ptr, v_ptr, do_ptr, dk_ptr, dv_ptr, lse_ptr, delta_ptr, row_ptr, column_ptr, cu_ptr,
    q_t, q_n, k_t, k_k, v_t, v_k, T, H, blocks, scale, min_hash, keep_scale,
    N: tl.constexpr, GROUP: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """dk and dv of a block of keys, summed over the query heads of the group."""
    b, m = tl.program_id(0) // blocks, tl.program_id(1)
    first = tl.program_id(0) % blocks * BLOCK_K
    start = tl.load(cu_ptr + b)
    length = tl.load(cu_ptr + b + 1) - start
    if first >= length:
        return
    j = first + tl.arange(0, BLOCK_K)
    k = _load_rows(k_ptr + m * k_k, start + j, k_t, H, BLOCK_H, j < length)
    v = _load_rows(v_ptr + m * v_k, start + j, v_t, H, BLOCK_H, j < length)
    column = tl.load(column_ptr + start + j, j < length, 0)
    dk = tl.zeros((BLOCK_K, BLOCK_H), tl.float32)
    dv = tl.zeros((BLOCK_K, BLOCK_H), tl.float32)
    low, high = 0, length
    if CAUSAL:
        low = first // BLOCK_Q * BLOCK_Q
    if WINDOW:
        high = tl.minimum(length, first + BLOCK_K - 1 + WINDOW)
    for n in range(m * GROUP, (m + 1) * GROUP):
        for at in range(low, high, BLOCK_Q):
            i = at + tl.arange(0, BLOCK_Q)
            line = n * T + start + i
            q = _load_rows(q_ptr + n * q_n, start + i, q_t, H, BLOCK_H, i < length)
            do = _load_rows(do_ptr + n * H, start + i, N * H, H, BLOCK_H, i < length)
            row = tl.load(row_ptr + line, i < length, 0)
            lse = tl.load(lse_ptr + line, i < length, 0.0)
            delta = tl.load(delta_ptr + line, i < length, 0.0)
            s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
            p = tl.exp2(tl.where(_visible(i, j, length, CAUSAL, WINDOW), s, float("-inf")) - lse[:, None])
            keep = lowbias32(row[:, None] ^ column[None, :]) >= min_hash
            pz = tl.where(keep, p * keep_scale, 0.0)
            dv += tl.dot(tl.trans(pz).to(do.dtype), do, input_precision="ieee")
            dp = tl.where(keep, tl.dot(do, tl.trans(v), input_precision="ieee") * keep_scale, 0.0)
            ds = p * (dp - delta[:, None])
            dk += tl.dot(tl.trans(ds).to(q.dtype), q, input_precision="ieee")
    K = N // GROUP
    _store_rows(dk_ptr + m * H, start + j, K * H, H, BLOCK_H, j < length, dk * (scale * LN_2))
    _store_rows(dv_ptr + m * H, start + j, K * H, H, BLOCK_H, j < length, dv)


def _launch_sizes(q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, longest: int) -> tuple[dict[str, int], tuple, int]:
    """(tile sizes, arguments common to all kernels, rows of a tile)."""
    T, _, H = q_TNH.shape
    wide_heads = H > 128 or q_TNH.dtype == torch.float32
    block = 32 if wide_heads else 64
    tiles = {"BLOCK_Q": block, "BLOCK_K": block, "BLOCK_H": max(16, triton.next_power_of_2(H))}
    strides = (*q_TNH.stride()[:2], *k_TKH.stride()[:2], *v_TKH.stride()[:2])
    return tiles, (*strides, T, H, triton.cdiv(longest, block), H**-0.5 / LN_2.value), block


@torch.library.custom_op("colonnade::dropout_attention", mutates_args=())
def _attend(
    q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, row_NT: Tensor, column_T: Tensor, cu_seqlens: Tensor,
    longest: int, causal: bool, window: int, rate: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    (T, N, _), K = q_TNH.shape, k_TKH.shape[1]
    o_TNH, lse_NT = q_TNH.new_empty(q_TNH.shape), q_TNH.new_empty(N, T, dtype=torch.float32)
    if T:
        tiles, common, block = _launch_sizes(q_TNH, k_TKH, v_TKH, longest)
        grid = ((len(cu_seqlens) - 1) * triton.cdiv(longest, block), N)
        _forward[grid](
            q_TNH, k_TKH, v_TKH, o_TNH, lse_NT, row_NT, column_T, cu_seqlens, *common, threshold(rate), 1 / (1 - rate),
            N=N, GROUP=N // K, CAUSAL=causal, WINDOW=window, **tiles,
        )  # fmt: skip
    return o_TNH, lse_NT


@torch.library.custom_op("colonnade::dropout_attention_backward", mutates_args=())
def _attend_backward(
    do_TNH: Tensor, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, o_TNH: Tensor, lse_NT: Tensor, row_NT: Tensor,
    column_T: Tensor, cu_seqlens: Tensor, longest: int, causal: bool, window: int, rate: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    (T, N, _), K = q_TNH.shape, k_TKH.shape[1]
    dq_TNH, dk_TKH, dv_TKH = (x.new_empty(x.shape) for x in (q_TNH, k_TKH, v_TKH))
    if T:
        do_TNH = do_TNH.contiguous()
        delta_NT = torch.einsum("tnh,tnh->nt", do_TNH.float(), o_TNH.float()).contiguous()
        tiles, common, block = _launch_sizes(q_TNH, k_TKH, v_TKH, longest)
        common = (lse_NT, delta_NT, row_NT, column_T, cu_seqlens, *common, threshold(rate), 1 / (1 - rate))
        options = {"N": N, "GROUP": N // K, "CAUSAL": causal, "WINDOW": window, **tiles}
        programs = (len(cu_seqlens) - 1) * triton.cdiv(longest, block)
        _queries_grad[programs, N](q_TNH, k_TKH, v_TKH, do_TNH, dq_TNH, *common, **options)
        _keys_values_grad[programs, K](q_TNH, k_TKH, v_TKH, do_TNH, dk_TKH, dv_TKH, *common, **options)
    return dq_TNH, dk_TKH, dv_TKH


@_attend.register_fake
def _(q_TNH, k_TKH, v_TKH, row_NT, column_T, cu_seqlens, longest, causal, window, rate):
    T, N, _ = q_TNH.shape
    return q_TNH.new_empty(q_TNH.shape), q_TNH.new_empty(N, T, dtype=torch.float32)


@_attend_backward.register_fake
def _(do_TNH, q_TNH, k_TKH, v_TKH, o_TNH, lse_NT, row_NT, column_T, cu_seqlens, longest, causal, window, rate):
    return tuple(x.new_empty(x.shape) for x in (q_TNH, k_TKH, v_TKH))


def _save_inputs(ctx, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:3], *output, *inputs[3:6])
    ctx.how = inputs[6:]


def _attention_grad(ctx, do_TNH: Tensor, _: Tensor | None):
    # The log-sum-exp is not returned to the user, so it has no gradient.
    return *_attend_backward(do_TNH, *ctx.saved_tensors, *ctx.how), *[None] * 7


_attend.register_autograd(_attention_grad, setup_context=_save_inputs)


def packed(
    q_TNH: Tensor,
    k_TKH: Tensor,
    v_TKH: Tensor,
    cu_seqlens: Tensor,
    *,
    longest: int,
    equal: bool,
    causal: bool = True,
    window: int | None = None,
    dropout: AttentionDropout,
) -> Tensor:
    """o_TNH of packed sequences (see :func:`reference.packed`); ``longest`` may be an upper bound."""
    N = q_TNH.shape[1]
    q_TNH, k_TKH, v_TKH = (x if x.stride(2) == 1 else x.contiguous() for x in (q_TNH, k_TKH, v_TKH))
    rows_NT, columns_T = dropout.query_hashes(N).contiguous(), dropout.key_hashes()
    o_TNH, _ = _attend(q_TNH, k_TKH, v_TKH, rows_NT, columns_T, cu_seqlens, longest, causal, window or 0, dropout.rate)
    return o_TNH
