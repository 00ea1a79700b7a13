"""Chunked attention with softmax states: the building block of ring attention.

    forward    o_i = Σ_j p_ij v_j        lse_i = log Σ_j exp(s_ij)        s_ij = q_i·k_j·H^-½
    backward   p_ij = exp(s_ij − lse_i)    ds_ij = p_ij (do_i·v_j − do_i·o_i)
               dq_i = Σ_j ds_ij k_j H^-½    dk_j = Σ_i ds_ij q_i H^-½    dv_j = Σ_i p_ij do_i

The backward takes the *final* o and lse, after all chunks were merged, so that each chunk's part is exact by itself
(Liu et al., arXiv 2310.01889, section 3; Dao, arXiv 2307.08691, algorithm 2): a chunk's own log-sum-exp would carry no
gradient and silently give wrong ones. Both passes are written in plain torch, without autograd.

Row i sees row j of the same sequence, up to itself if causal, and at most a window back. ``causal=False`` is for
callers that guarantee that every visible pair is in order.

With dropout of the probabilities, z_ij = 1 / (1 − rate) if kept, else 0: o_i = Σ_j z_ij p_ij v_j, and z_ij multiplies
p_ij in dv_j and do_i·v_j in ds_ij; the log-sum-exp does not change. ``dropout`` describes the whole stream; the rows'
indices select from it.

On a GPU in 16 bits, torch's operators are used: cuDNN for equal parts of sequences, FlashAttention-2 over cu_seqlens
for ragged ones. They are called below autograd, because only there can the backward be given the final (o, lse). They
have no global positions, so windows fall back to the reference.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from colonnade.kernels.dropout import AttentionDropout
from colonnade.kernels.softmax_state import State


class TokenRows(NamedTuple):
    """Which rows of a stream some queries or keys are."""

    index_T: Tensor
    """Each row's index in the whole stream."""
    segment_T: Tensor
    """Each row's sequence; rows see their own sequence only."""
    cu_seqlens: Tensor
    """int32: where each sequence's part starts among these rows, and their total number."""
    longest: int
    """Upper bound of a sequence's rows here."""
    sequences: int
    """Number of sequences that these rows divide into equal consecutive parts; 0 if the parts differ in length."""


class Gradients(NamedTuple):
    """Gradients of one chunk's attention."""

    dq_TNH: Tensor
    dk_SKH: Tensor
    dv_SKH: Tensor


def forward(
    q_TNH: Tensor,
    k_SKH: Tensor,
    v_SKH: Tensor,
    queries: TokenRows,
    keys: TokenRows,
    *,
    causal: bool,
    window: int | None = None,
    dropout: AttentionDropout | None = None,
) -> State:
    """The state (o_TNH, lse_TN) of these queries over these keys, in at least float32."""
    s_KGTS, _, v_SKH = _scores(q_TNH, k_SKH, v_SKH, queries, keys, causal, window)
    lse_KGT = torch.logsumexp(s_KGTS, -1) if len(k_SKH) else s_KGTS.new_full(s_KGTS.shape[:-1], -torch.inf)
    p_KGTS = torch.exp(s_KGTS - torch.where(lse_KGT == -torch.inf, 0.0, lse_KGT)[..., None])
    o_TNH = torch.einsum("kgts,skh->tkgh", _apply_dropout(p_KGTS, queries, keys, dropout), v_SKH).flatten(1, 2)
    return State(o_TNH, lse_KGT.flatten(0, 1).T)


def backward(
    do_TNH: Tensor,
    q_TNH: Tensor,
    k_SKH: Tensor,
    v_SKH: Tensor,
    o_TNH: Tensor,
    lse_TN: Tensor,
    queries: TokenRows,
    keys: TokenRows,
    *,
    causal: bool,
    window: int | None = None,
    dropout: AttentionDropout | None = None,
) -> Gradients:
    """This chunk's part of the gradients, in at least float32, given the final ``o_TNH`` and ``lse_TN``."""
    K, H = k_SKH.shape[1:]
    s_KGTS, q_TKGH, v_SKH = _scores(q_TNH, k_SKH, v_SKH, queries, keys, causal, window)
    lse_KGT = lse_TN.T.unflatten(0, (K, -1))
    do_TKGH = do_TNH.to(s_KGTS.dtype).unflatten(1, (K, -1))
    p_KGTS = torch.exp(s_KGTS - torch.where(lse_KGT == -torch.inf, 0.0, lse_KGT)[..., None])
    delta_KGT = (do_TNH * o_TNH).sum(-1).to(s_KGTS.dtype).T.unflatten(0, (K, -1))
    dp_KGTS = _apply_dropout(torch.einsum("tkgh,skh->kgts", do_TKGH, v_SKH), queries, keys, dropout)
    ds_KGTS = p_KGTS * (dp_KGTS - delta_KGT[..., None]) * H**-0.5
    return Gradients(
        torch.einsum("kgts,skh->tkgh", ds_KGTS, k_SKH.to(ds_KGTS.dtype)).flatten(1, 2),
        torch.einsum("kgts,tkgh->skh", ds_KGTS, q_TKGH),
        torch.einsum("kgts,tkgh->skh", _apply_dropout(p_KGTS, queries, keys, dropout), do_TKGH),
    )


def _scores(
    q_TNH: Tensor, k_SKH: Tensor, v_SKH: Tensor, queries: TokenRows, keys: TokenRows, causal: bool, window: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    """(s_KGTS, −∞ where masked; q_TKGH; v_SKH), in at least float32."""
    dtype = torch.promote_types(q_TNH.dtype, torch.float32)
    q_TKGH = q_TNH.to(dtype).unflatten(1, (k_SKH.shape[1], -1))
    s_KGTS = torch.einsum("tkgh,skh->kgts", q_TKGH, k_SKH.to(dtype)) * q_TNH.shape[2] ** -0.5
    mask_TS = queries.segment_T[:, None] == keys.segment_T
    distance_TS = queries.index_T[:, None] - keys.index_T
    if causal:
        mask_TS &= distance_TS >= 0
    if window is not None:
        mask_TS &= distance_TS < window
    return s_KGTS.masked_fill(~mask_TS, -torch.inf), q_TKGH, v_SKH.to(dtype)


def _apply_dropout(x_KGTS: Tensor, queries: TokenRows, keys: TokenRows, dropout: AttentionDropout | None) -> Tensor:
    if dropout is None:
        return x_KGTS
    K, G = x_KGTS.shape[:2]
    keep_KGTS = dropout.select(queries.index_T, keys.index_T).keep_mask(K * G).unflatten(0, (K, G))
    return torch.where(keep_KGTS, x_KGTS * (1 / (1 - dropout.rate)), 0.0)


_aten = torch.ops.aten


def flash_forward(
    q_TNH: Tensor,
    k_SKH: Tensor,
    v_SKH: Tensor,
    queries: TokenRows,
    keys: TokenRows,
    *,
    causal: bool,
    window: int | None = None,
) -> State:
    """:func:`forward` through torch's flash kernels; the state is in float32."""
    if window is not None or not len(q_TNH) or not len(k_SKH):
        return forward(q_TNH, k_SKH, v_SKH, queries, keys, causal=causal, window=window)
    if queries.sequences:
        q, k, v = _flash_batch(q_TNH, queries), _flash_keys(k_SKH, keys, q_TNH), _flash_keys(v_SKH, keys, q_TNH)
        o_BNTH, lse_BNT1, *_ = _aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, False)
        return State(_flash_rows(o_BNTH).float(), lse_BNT1.flatten(2).transpose(1, 2).flatten(0, 1))
    o_TNH, lse_NT, *_ = _aten._flash_attention_forward(
        q_TNH, k_SKH, v_SKH, queries.cu_seqlens, keys.cu_seqlens, queries.longest, keys.longest, 0.0, causal, False
    )
    # The kernel returns +∞ as the log-sum-exp of no keys.
    return State(o_TNH.float(), lse_NT.T.masked_fill(lse_NT.T.isposinf(), -torch.inf))


def flash_backward(
    do_TNH: Tensor,
    q_TNH: Tensor,
    k_SKH: Tensor,
    v_SKH: Tensor,
    o_TNH: Tensor,
    lse_TN: Tensor,
    queries: TokenRows,
    keys: TokenRows,
    *,
    causal: bool,
    window: int | None = None,
) -> Gradients:
    """:func:`backward` through torch's flash kernels, given the final ``o_TNH`` and ``lse_TN`` in float32."""
    if window is not None or not len(q_TNH) or not len(k_SKH):
        return backward(do_TNH, q_TNH, k_SKH, v_SKH, o_TNH, lse_TN, queries, keys, causal=causal, window=window)
    o_TNH = o_TNH.to(q_TNH.dtype)
    if queries.sequences:
        q, k, v = _flash_batch(q_TNH, queries), _flash_keys(k_SKH, keys, q_TNH), _flash_keys(v_SKH, keys, q_TNH)
        do, o = _flash_batch(do_TNH, queries), _flash_batch(o_TNH, queries)
        lse_BNT1 = lse_TN.unflatten(0, (queries.sequences, -1)).transpose(1, 2).contiguous()[..., None]
        none = torch.empty(0, dtype=torch.uint64, device=q.device)
        dq, dk, dv = _aten._scaled_dot_product_cudnn_attention_backward(
            do, q, k, v, o, lse_BNT1, none, none, None, None, None, q.shape[2], k.shape[2], 0.0, causal
        )
        return Gradients(_flash_rows(dq), _sum_groups(_flash_rows(dk), k_SKH), _sum_groups(_flash_rows(dv), v_SKH))
    none = torch.empty(2, dtype=torch.uint64, device=q_TNH.device)
    return Gradients(
        *_aten._flash_attention_backward(
            do_TNH.contiguous(), q_TNH, k_SKH, v_SKH, o_TNH, lse_TN.T.contiguous(), queries.cu_seqlens, keys.cu_seqlens,
            queries.longest, keys.longest, 0.0, causal, none, none,
        )
    )  # fmt: skip


def _flash_batch(x_TNH: Tensor, rows: TokenRows) -> Tensor:
    """(sequences, heads, rows of each, width)."""
    return x_TNH.unflatten(0, (rows.sequences, -1)).transpose(1, 2)


def _flash_keys(k_SKH: Tensor, rows: TokenRows, q_TNH: Tensor) -> Tensor:
    """The same for keys or values, repeated for each query head: cuDNN's operator has no grouped queries."""
    group = q_TNH.shape[1] // k_SKH.shape[1]
    return _flash_batch(k_SKH if group == 1 else k_SKH.repeat_interleave(group, 1), rows)


def _flash_rows(x_BNTH: Tensor) -> Tensor:
    return x_BNTH.transpose(1, 2).flatten(0, 1)


def _sum_groups(dk_SNH: Tensor, k_SKH: Tensor) -> Tensor:
    """Sums the gradients of a group's query heads in float32."""
    K = k_SKH.shape[1]
    return dk_SNH if dk_SNH.shape[1] == K else dk_SNH.float().unflatten(1, (K, -1)).sum(2)
