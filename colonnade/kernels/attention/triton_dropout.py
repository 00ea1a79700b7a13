"""Attention with dropout of its probabilities, in tiles: no score ever leaves the chip, and neither does a mask.

    o_i = Σ_j z_ij p_ij v_j        p = softmax of the scores        z_ij = 1 / (1 − rate) where kept, else 0

FlashAttention-2's two passes (Dao 2023, arXiv 2307.08691, algorithms 1 and 2) over sequences laid end to end. The
normaliser is that of p, before dropout, and so is the log-sum-exp that is kept for the way back. There, with
Δ_i = do_i · o_i,

    dv_j = Σ_i z_ij p_ij do_i        ds_ij = p_ij (z_ij do_i · v_j − Δ_i)        dq = H^-½ ds k        dk = H^-½ dsᵀ q

What we do differently: z is a hash of the pair's global indices (:mod:`colonnade.kernels.dropout`), not of
its place in a tile, so it does not depend on tile sizes or on the layout; and a key's gradient is summed by one program
over all query heads of its group, so that no addition is atomic and the result is the same bits each time.
"""

# pyright: reportCallIssue=false, reportArgumentType=false
# A kernel is launched with more than its signature says, and its constants are plain numbers.

import math

import torch
import triton
from torch import Tensor
from triton import language as tl

from colonnade.kernels.dropout import AttentionDropout, threshold
from colonnade.kernels.triton_dropout import lowbias32

LN_2 = tl.constexpr(math.log(2))
"""Scores are kept in powers of 2, for which there is an instruction."""


@triton.jit
def _visible(i, j, length, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Which of the keys j each of the queries i may see; a WINDOW of 0 is none."""
    sees = (i < length)[:, None] & (j < length)[None, :]
    if CAUSAL:
        sees = sees & (j[None, :] <= i[:, None])
    if WINDOW:
        sees = sees & (j[None, :] > i[:, None] - WINDOW)
    return sees


@triton.jit
def _load_rows(ptr, t, stride, H, BLOCK_H: tl.constexpr, here):
    """(rows, BLOCK_H): the rows t of one head."""
    h = tl.arange(0, BLOCK_H)
    return tl.load(ptr + t.to(tl.int64)[:, None] * stride + h[None, :], here[:, None] & (h < H)[None, :], 0.0)


@triton.jit
def _store_rows(ptr, t, stride, H, BLOCK_H: tl.constexpr, here, value):
    h = tl.arange(0, BLOCK_H)
    at = ptr + t.to(tl.int64)[:, None] * stride + h[None, :]
    tl.store(at, value.to(ptr.dtype.element_ty), here[:, None] & (h < H)[None, :])


@triton.jit
def _key_range(first, length, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """The keys that any of the queries first .. first + BLOCK_Q − 1 sees; the low end is a multiple of BLOCK_K."""
    low, high = 0, length
    if CAUSAL:
        high = tl.minimum(length, first + BLOCK_Q)
    if WINDOW:
        low = tl.maximum(0, first - WINDOW + 1) // BLOCK_K * BLOCK_K
    return low, high


@triton.jit
def _forward(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, row_ptr, column_ptr, cu_ptr,
    q_t, q_n, k_t, k_k, v_t, v_k, T, H, blocks, scale, least, keep_scale,
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
    top = tl.full((BLOCK_Q,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_Q,), tl.float32)
    o = tl.zeros((BLOCK_Q, BLOCK_H), tl.float32)
    low, high = _key_range(first, length, BLOCK_Q, BLOCK_K, CAUSAL, WINDOW)
    for at in range(low, high, BLOCK_K):
        j = at + tl.arange(0, BLOCK_K)
        k = _load_rows(k_ptr + n // GROUP * k_k, start + j, k_t, H, BLOCK_H, j < length)
        v = _load_rows(v_ptr + n // GROUP * v_k, start + j, v_t, H, BLOCK_H, j < length)
        column = tl.load(column_ptr + start + j, j < length, 0)
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        s = tl.where(_visible(i, j, length, CAUSAL, WINDOW), s, float("-inf"))
        new = tl.maximum(top, tl.max(s, 1))
        base = tl.where(new == float("-inf"), 0.0, new)  # a row that has seen nothing yet
        p = tl.exp2(s - base[:, None])
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.sum(p, 1)
        p = tl.where(lowbias32(row[:, None] ^ column[None, :]) >= least, p, 0.0)
        o = o * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        top = new
    total = tl.where(total == 0.0, 1.0, total)
    _store_rows(o_ptr + n * H, start + i, N * H, H, BLOCK_H, i < length, o * (keep_scale / total)[:, None])
    tl.store(lse_ptr + n * T + start + i, top + tl.log2(total), i < length)


@triton.jit
def _queries_grad(
    q_ptr, k_ptr, v_ptr, do_ptr, dq_ptr, lse_ptr, delta_ptr, row_ptr, column_ptr, cu_ptr,
    q_t, q_n, k_t, k_k, v_t, v_k, T, H, blocks, scale, least, keep_scale,
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
        kept = lowbias32(row[:, None] ^ column[None, :]) >= least
        dp = tl.where(kept, tl.dot(do, tl.trans(v), input_precision="ieee") * keep_scale, 0.0)
        ds = p * (dp - delta[:, None])
        dq += tl.dot(ds.to(k.dtype), k, input_precision="ieee")
    _store_rows(dq_ptr + n * H, start + i, N * H, H, BLOCK_H, i < length, dq * (scale * LN_2))


@triton.jit
def _keys_values_grad(
    q_ptr, k_ptr, v_ptr, do_ptr, dk_ptr, dv_ptr, lse_ptr, delta_ptr, row_ptr, column_ptr, cu_ptr,
    q_t, q_n, k_t, k_k, v_t, v_k, T, H, blocks, scale, least, keep_scale,
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
            kept = lowbias32(row[:, None] ^ column[None, :]) >= least
            pz = tl.where(kept, p * keep_scale, 0.0)
            dv += tl.dot(tl.trans(pz).to(do.dtype), do, input_precision="ieee")
            dp = tl.where(kept, tl.dot(do, tl.trans(v), input_precision="ieee") * keep_scale, 0.0)
            ds = p * (dp - delta[:, None])
            dk += tl.dot(tl.trans(ds).to(q.dtype), q, input_precision="ieee")
    K = N // GROUP
    _store_rows(dk_ptr + m * H, start + j, K * H, H, BLOCK_H, j < length, dk * (scale * LN_2))
    _store_rows(dv_ptr + m * H, start + j, K * H, H, BLOCK_H, j < length, dv)


def _launch_sizes(q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, longest: int) -> tuple[dict[str, int], tuple, int]:
    """(the tiles, the arguments that are the same in all kernels, rows of a tile) for these tensors."""
    T, _, H = q_TNH.shape
    wide = H > 128 or q_TNH.dtype == torch.float32
    block = 32 if wide else 64
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
        how = {"N": N, "GROUP": N // K, "CAUSAL": causal, "WINDOW": window, **tiles}
        programs = (len(cu_seqlens) - 1) * triton.cdiv(longest, block)
        _queries_grad[programs, N](q_TNH, k_TKH, v_TKH, do_TNH, dq_TNH, *common, **how)
        _keys_values_grad[programs, K](q_TNH, k_TKH, v_TKH, do_TNH, dk_TKH, dv_TKH, *common, **how)
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
    # The log-sum-exp is handed to nobody, so it has no gradient.
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
    """o_TNH of sequences laid end to end (see :func:`reference.packed`); ``longest`` may be a bound."""
    N = q_TNH.shape[1]
    q_TNH, k_TKH, v_TKH = (x if x.stride(2) == 1 else x.contiguous() for x in (q_TNH, k_TKH, v_TKH))
    rows_NT, columns_T = dropout.query_hashes(N).contiguous(), dropout.key_hashes()
    o_TNH, _ = _attend(q_TNH, k_TKH, v_TKH, rows_NT, columns_T, cu_seqlens, longest, causal, window or 0, dropout.rate)
    return o_TNH
