"""Dropout in Triton: of a tensor's elements, and of attention probabilities.

**Elements**, for models that are not compiled: one kernel reads x once and writes y once. Under torch.compile the plain
operations are faster, because Inductor fuses them with their neighbours.

**Attention**: FlashAttention-2 with dropout; neither scores nor masks are written to memory.

    o_i = Σ_j z_ij p_ij v_j        p = softmax of the scores        z_ij = 1 / (1 − rate) where kept, else 0

Both passes of FlashAttention-2 (Dao 2023, arXiv 2307.08691, algorithms 1 and 2) over packed sequences. The normaliser
is that of p, before dropout, and so is the log-sum-exp that is saved for the backward. There, with Δ_i = do_i · o_i,

    dv_j = Σ_i z_ij p_ij do_i        ds_ij = p_ij (z_ij do_i · v_j − Δ_i)        dq = H^-½ ds k        dk = H^-½ dsᵀ q

Two things differ: z is a hash of the pair's global indices (:mod:`~colonnade.kernels.dropout`) and not of its position
in a tile, so it does not depend on tile sizes or the parallel layout; and a key's gradient is summed by one program
over all query heads of its group, so that no addition is atomic and the result is deterministic.
"""

import math
from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton import language as tl

from colonnade.kernels import dropout as reference
from colonnade.kernels.attention.triton_args import Queries
from colonnade.kernels.dropout import AttentionDropout, arange_hash, row_hash, threshold
from colonnade.kernels.triton_constants import constexprs

LN_2 = tl.constexpr(math.log(2))
"""Scores are in base 2, since the GPU has an exp2 instruction."""


@triton.jit
def lowbias32(x):
    """Hashes int32 values (see :func:`dropout.lowbias32`)."""
    x = x.to(tl.uint32, bitcast=True)
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    x = x ^ (x >> 16)
    return x.to(tl.int32, bitcast=True)


@triton.jit
def _dropout(
    x_ptr, y_ptr, row_ptr, column_ptr, min_hash, scale, T, D, stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    t = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    d = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = (t < T)[:, None] & (d < D)[None, :]
    row = tl.load(row_ptr + t, t < T, 0)
    column = tl.load(column_ptr + d, d < D, 0)
    keep = lowbias32(row[:, None] ^ column[None, :]) >= min_hash
    x = tl.load(x_ptr + t[:, None] * stride + d[None, :], mask, 0.0)
    y = tl.where(keep, (x.to(tl.float32) * scale).to(x.dtype), 0.0)
    tl.store(y_ptr + t[:, None] * D + d[None, :], y, mask)


def _launch_dropout(x_TD: Tensor, key: Tensor, index_T: Tensor, *, site: int, rate: float, start: int) -> Tensor:
    T, D = x_TD.shape
    x_TD = x_TD if x_TD.stride(1) == 1 else x_TD.contiguous()
    y_TD = torch.empty(T, D, dtype=x_TD.dtype, device=x_TD.device)
    if y_TD.numel():
        row_T = row_hash(key, index_T)
        column_D = arange_hash(site, torch.arange(start, start + D, device=x_TD.device))
        rows, columns = 4, 256
        grid = (triton.cdiv(T, rows), triton.cdiv(D, columns))
        min_hash, scale = threshold(rate), 1 / (1 - rate)
        _dropout[grid](x_TD, y_TD, row_T, column_D, min_hash, scale, T, D, x_TD.stride(0), rows, columns)
    return y_TD


def dropout(x_TD: Tensor, key: Tensor, index_T: Tensor, *, site: int, rate: float, start: int = 0) -> Tensor:
    """y_TD (see :func:`dropout.dropout`)."""
    apply = reference.dropout if torch.compiler.is_compiling() else _launch_dropout
    return reference.RecomputedDropout.apply(x_TD, key, index_T, apply, site, rate, start)


class _Mask(NamedTuple):
    """Hashes of rows and columns, the smallest hash that is kept, and the factor of what is kept."""

    rows: Tensor
    columns: Tensor
    min_hash: int
    keep_scale: float


class _Config(NamedTuple):
    N: int
    GROUP: int
    CAUSAL: bool
    WINDOW: int
    BLOCK_Q: int
    BLOCK_K: int
    BLOCK_H: int


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
def _forward(q_rows, k_rows, v_rows, o_ptr, lse_ptr, cu_ptr, mask, T, H, blocks, scale, cfg: tl.constexpr):
    b, n = tl.program_id(0) // blocks, tl.program_id(1)
    first = tl.program_id(0) % blocks * cfg.BLOCK_Q
    start = tl.load(cu_ptr + b)
    length = tl.load(cu_ptr + b + 1) - start
    if first >= length:
        return
    i = first + tl.arange(0, cfg.BLOCK_Q)
    q = _load_rows(q_rows.ptr + n * q_rows.head, start + i, q_rows.token, H, cfg.BLOCK_H, i < length)
    row = tl.load(mask.rows + n * T + start + i, i < length, 0)
    row_max = tl.full((cfg.BLOCK_Q,), float("-inf"), tl.float32)
    row_sum = tl.zeros((cfg.BLOCK_Q,), tl.float32)
    o = tl.zeros((cfg.BLOCK_Q, cfg.BLOCK_H), tl.float32)
    low, high = _key_range(first, length, cfg.BLOCK_Q, cfg.BLOCK_K, cfg.CAUSAL, cfg.WINDOW)
    for at in range(low, high, cfg.BLOCK_K):
        j = at + tl.arange(0, cfg.BLOCK_K)
        k = _load_rows(k_rows.ptr + n // cfg.GROUP * k_rows.head, start + j, k_rows.token, H, cfg.BLOCK_H, j < length)
        v = _load_rows(v_rows.ptr + n // cfg.GROUP * v_rows.head, start + j, v_rows.token, H, cfg.BLOCK_H, j < length)
        column = tl.load(mask.columns + start + j, j < length, 0)
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        s = tl.where(_visible(i, j, length, cfg.CAUSAL, cfg.WINDOW), s, float("-inf"))
        new = tl.maximum(row_max, tl.max(s, 1))
        safe_max = tl.where(new == float("-inf"), 0.0, new)  # a row without visible keys so far
        p = tl.exp2(s - safe_max[:, None])
        rescale = tl.exp2(row_max - safe_max)
        row_sum = row_sum * rescale + tl.sum(p, 1)
        p = tl.where(lowbias32(row[:, None] ^ column[None, :]) >= mask.min_hash, p, 0.0)
        o = o * rescale[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        row_max = new
    row_sum = tl.where(row_sum == 0.0, 1.0, row_sum)
    _store_rows(
        o_ptr + n * H, start + i, cfg.N * H, H, cfg.BLOCK_H, i < length, o * (mask.keep_scale / row_sum)[:, None]
    )
    tl.store(lse_ptr + n * T + start + i, row_max + tl.log2(row_sum), i < length)


@triton.jit
def _queries_grad(
    q_rows, k_rows, v_rows, do_ptr, dq_ptr, lse_ptr, delta_ptr, cu_ptr, mask, T, H, blocks, scale, cfg: tl.constexpr
):
    """dq of a block of queries."""
    b, n = tl.program_id(0) // blocks, tl.program_id(1)
    first = tl.program_id(0) % blocks * cfg.BLOCK_Q
    start = tl.load(cu_ptr + b)
    length = tl.load(cu_ptr + b + 1) - start
    if first >= length:
        return
    i = first + tl.arange(0, cfg.BLOCK_Q)
    line = n * T + start + i
    q = _load_rows(q_rows.ptr + n * q_rows.head, start + i, q_rows.token, H, cfg.BLOCK_H, i < length)
    do = _load_rows(do_ptr + n * H, start + i, cfg.N * H, H, cfg.BLOCK_H, i < length)
    row = tl.load(mask.rows + line, i < length, 0)
    lse = tl.load(lse_ptr + line, i < length, 0.0)
    delta = tl.load(delta_ptr + line, i < length, 0.0)
    dq = tl.zeros((cfg.BLOCK_Q, cfg.BLOCK_H), tl.float32)
    low, high = _key_range(first, length, cfg.BLOCK_Q, cfg.BLOCK_K, cfg.CAUSAL, cfg.WINDOW)
    for at in range(low, high, cfg.BLOCK_K):
        j = at + tl.arange(0, cfg.BLOCK_K)
        k = _load_rows(k_rows.ptr + n // cfg.GROUP * k_rows.head, start + j, k_rows.token, H, cfg.BLOCK_H, j < length)
        v = _load_rows(v_rows.ptr + n // cfg.GROUP * v_rows.head, start + j, v_rows.token, H, cfg.BLOCK_H, j < length)
        column = tl.load(mask.columns + start + j, j < length, 0)
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        p = tl.exp2(tl.where(_visible(i, j, length, cfg.CAUSAL, cfg.WINDOW), s, float("-inf")) - lse[:, None])
        keep = lowbias32(row[:, None] ^ column[None, :]) >= mask.min_hash
        dp = tl.where(keep, tl.dot(do, tl.trans(v), input_precision="ieee") * mask.keep_scale, 0.0)
        ds = p * (dp - delta[:, None])
        dq += tl.dot(ds.to(k.dtype), k, input_precision="ieee")
    _store_rows(dq_ptr + n * H, start + i, cfg.N * H, H, cfg.BLOCK_H, i < length, dq * (scale * LN_2))


@triton.jit
def _keys_values_grad(
    q_rows, k_rows, v_rows, do_ptr, dk_ptr, dv_ptr, lse_ptr, delta_ptr, cu_ptr, mask, T, H, blocks, scale,
    cfg: tl.constexpr,
):  # fmt: skip
    """dk and dv of a block of keys, summed over the query heads of the group."""
    b, m = tl.program_id(0) // blocks, tl.program_id(1)
    first = tl.program_id(0) % blocks * cfg.BLOCK_K
    start = tl.load(cu_ptr + b)
    length = tl.load(cu_ptr + b + 1) - start
    if first >= length:
        return
    j = first + tl.arange(0, cfg.BLOCK_K)
    k = _load_rows(k_rows.ptr + m * k_rows.head, start + j, k_rows.token, H, cfg.BLOCK_H, j < length)
    v = _load_rows(v_rows.ptr + m * v_rows.head, start + j, v_rows.token, H, cfg.BLOCK_H, j < length)
    column = tl.load(mask.columns + start + j, j < length, 0)
    dk = tl.zeros((cfg.BLOCK_K, cfg.BLOCK_H), tl.float32)
    dv = tl.zeros((cfg.BLOCK_K, cfg.BLOCK_H), tl.float32)
    low, high = 0, length
    if cfg.CAUSAL:
        low = first // cfg.BLOCK_Q * cfg.BLOCK_Q
    if cfg.WINDOW:
        high = tl.minimum(length, first + cfg.BLOCK_K - 1 + cfg.WINDOW)
    for n in range(m * cfg.GROUP, (m + 1) * cfg.GROUP):
        for at in range(low, high, cfg.BLOCK_Q):
            i = at + tl.arange(0, cfg.BLOCK_Q)
            line = n * T + start + i
            q = _load_rows(q_rows.ptr + n * q_rows.head, start + i, q_rows.token, H, cfg.BLOCK_H, i < length)
            do = _load_rows(do_ptr + n * H, start + i, cfg.N * H, H, cfg.BLOCK_H, i < length)
            row = tl.load(mask.rows + line, i < length, 0)
            lse = tl.load(lse_ptr + line, i < length, 0.0)
            delta = tl.load(delta_ptr + line, i < length, 0.0)
            s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
            p = tl.exp2(tl.where(_visible(i, j, length, cfg.CAUSAL, cfg.WINDOW), s, float("-inf")) - lse[:, None])
            keep = lowbias32(row[:, None] ^ column[None, :]) >= mask.min_hash
            pz = tl.where(keep, p * mask.keep_scale, 0.0)
            dv += tl.dot(tl.trans(pz).to(do.dtype), do, input_precision="ieee")
            dp = tl.where(keep, tl.dot(do, tl.trans(v), input_precision="ieee") * mask.keep_scale, 0.0)
            ds = p * (dp - delta[:, None])
            dk += tl.dot(tl.trans(ds).to(q.dtype), q, input_precision="ieee")
    K = cfg.N // cfg.GROUP
    _store_rows(dk_ptr + m * H, start + j, K * H, H, cfg.BLOCK_H, j < length, dk * (scale * LN_2))
    _store_rows(dv_ptr + m * H, start + j, K * H, H, cfg.BLOCK_H, j < length, dv)


def _arguments(
    q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, row_NT: Tensor, column_T: Tensor, cu_seqlens: Tensor,
    longest: int, causal: bool, window: int, rate: float,
) -> tuple[tuple, tuple, int]:  # fmt: skip
    """(first arguments of all kernels, their last ones, programs per head)."""
    T, N, H = q_TNH.shape
    wide_heads = H > 128 or q_TNH.dtype == torch.float32
    block = 32 if wide_heads else 64
    blocks = triton.cdiv(longest, block)
    heads = tuple(Queries(x, *x.stride()[:2]) for x in (q_TNH, k_TKH, v_TKH))
    mask = _Mask(row_NT, column_T, threshold(rate), 1 / (1 - rate))
    config = _Config(N, N // k_TKH.shape[1], causal, window, block, block, max(16, triton.next_power_of_2(H)))
    return (
        heads,
        (cu_seqlens, mask, T, H, blocks, H**-0.5 / LN_2.value, constexprs(config)),
        (len(cu_seqlens) - 1) * blocks,
    )


@torch.library.custom_op("colonnade::dropout_attention", mutates_args=())
def _attend(
    q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, row_NT: Tensor, column_T: Tensor, cu_seqlens: Tensor,
    longest: int, causal: bool, window: int, rate: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    T, N, _ = q_TNH.shape
    o_TNH, lse_NT = q_TNH.new_empty(q_TNH.shape), q_TNH.new_empty(N, T, dtype=torch.float32)
    if T:
        heads, rest, programs = _arguments(
            q_TNH, k_TKH, v_TKH, row_NT, column_T, cu_seqlens, longest, causal, window, rate
        )
        _forward[programs, N](*heads, o_TNH, lse_NT, *rest)
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
        heads, rest, programs = _arguments(
            q_TNH, k_TKH, v_TKH, row_NT, column_T, cu_seqlens, longest, causal, window, rate
        )
        _queries_grad[programs, N](*heads, do_TNH, dq_TNH, lse_NT, delta_NT, *rest)
        _keys_values_grad[programs, K](*heads, do_TNH, dk_TKH, dv_TKH, lse_NT, delta_NT, *rest)
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
