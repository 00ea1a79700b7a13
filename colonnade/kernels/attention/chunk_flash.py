"""Chunks of attention on a GPU in 16 bits (see :mod:`chunk` for the equations): cuDNN for equal parts of sequences,
FlashAttention-2 over cu_seqlens for ragged ones, both through torch's own operators.

The operators are called below autograd, because only there can the backward be given the final (o, lse) instead of the
chunk's. A window reaches from chunk to chunk by positions, which they do not know: that is the reference's.
"""

import torch
from torch import Tensor

from colonnade.kernels.attention import chunk
from colonnade.kernels.attention.chunk import Gradients, Rows
from colonnade.kernels.softmax_state import State

_aten = torch.ops.aten


def forward(
    q_TNH: Tensor, k_SKH: Tensor, v_SKH: Tensor, queries: Rows, keys: Rows, *, causal: bool, window: int | None = None
) -> State:
    """The state (o_TNH, lse_TN) in float32 of these queries over these keys."""
    if window is not None or not len(q_TNH) or not len(k_SKH):
        return chunk.forward(q_TNH, k_SKH, v_SKH, queries, keys, causal=causal, window=window)
    if queries.sequences:
        q, k, v = _batch(q_TNH, queries), _keys(k_SKH, keys, q_TNH), _keys(v_SKH, keys, q_TNH)
        o_BNTH, lse_BNT1, *_ = _aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, False)
        return State(_rows(o_BNTH).float(), lse_BNT1.flatten(2).transpose(1, 2).flatten(0, 1))
    o_TNH, lse_NT, *_ = _aten._flash_attention_forward(
        q_TNH, k_SKH, v_SKH, queries.cu_seqlens, keys.cu_seqlens, queries.longest, keys.longest, 0.0, causal, False
    )
    # The kernel calls the log-sum-exp of no keys +∞.
    return State(o_TNH.float(), lse_NT.T.masked_fill(lse_NT.T.isposinf(), -torch.inf))


def backward(
    do_TNH: Tensor,
    q_TNH: Tensor,
    k_SKH: Tensor,
    v_SKH: Tensor,
    o_TNH: Tensor,
    lse_TN: Tensor,
    queries: Rows,
    keys: Rows,
    *,
    causal: bool,
    window: int | None = None,
) -> Gradients:
    """This chunk's part of the gradients, given the final ``o_TNH`` and ``lse_TN`` in float32."""
    if window is not None or not len(q_TNH) or not len(k_SKH):
        return chunk.backward(do_TNH, q_TNH, k_SKH, v_SKH, o_TNH, lse_TN, queries, keys, causal=causal, window=window)
    o_TNH = o_TNH.to(q_TNH.dtype)
    if queries.sequences:
        q, k, v = _batch(q_TNH, queries), _keys(k_SKH, keys, q_TNH), _keys(v_SKH, keys, q_TNH)
        do, o = _batch(do_TNH, queries), _batch(o_TNH, queries)
        lse_BNT1 = lse_TN.unflatten(0, (queries.sequences, -1)).transpose(1, 2).contiguous()[..., None]
        none = torch.empty(0, dtype=torch.uint64, device=q.device)
        dq, dk, dv = _aten._scaled_dot_product_cudnn_attention_backward(
            do, q, k, v, o, lse_BNT1, none, none, None, None, None, q.shape[2], k.shape[2], 0.0, causal
        )
        return Gradients(_rows(dq), _summed(_rows(dk), k_SKH), _summed(_rows(dv), v_SKH))
    none = torch.empty(2, dtype=torch.uint64, device=q_TNH.device)
    return Gradients(
        *_aten._flash_attention_backward(
            do_TNH.contiguous(), q_TNH, k_SKH, v_SKH, o_TNH, lse_TN.T.contiguous(), queries.cu_seqlens, keys.cu_seqlens,
            queries.longest, keys.longest, 0.0, causal, none, none,
        )
    )  # fmt: skip


def _batch(x_TNH: Tensor, rows: Rows) -> Tensor:
    """(sequences, heads, rows of each, width)."""
    return x_TNH.unflatten(0, (rows.sequences, -1)).transpose(1, 2)


def _keys(k_SKH: Tensor, rows: Rows, q_TNH: Tensor) -> Tensor:
    """The same for keys and values, one for each query head: cuDNN's operator takes no groups."""
    group = q_TNH.shape[1] // k_SKH.shape[1]
    return _batch(k_SKH if group == 1 else k_SKH.repeat_interleave(group, 1), rows)


def _rows(x_BNTH: Tensor) -> Tensor:
    return x_BNTH.transpose(1, 2).flatten(0, 1)


def _summed(dk_SNH: Tensor, k_SKH: Tensor) -> Tensor:
    """The gradients of all query heads of a group, added up in float32."""
    K = k_SKH.shape[1]
    return dk_SNH if dk_SNH.shape[1] == K else dk_SNH.float().unflatten(1, (K, -1)).sum(2)
