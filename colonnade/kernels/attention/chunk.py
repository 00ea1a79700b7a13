"""Attention of some rows of a stream to some others, with the softmax's state: what a ring is folded from.

    forward    o_i = Σ_j p_ij v_j        lse_i = log Σ_j exp(s_ij)        s_ij = q_i·k_j·H^-½
    backward   p_ij = exp(s_ij − lse_i)    ds_ij = p_ij (do_i·v_j − do_i·o_i)
               dq_i = Σ_j ds_ij k_j H^-½    dk_j = Σ_i ds_ij q_i H^-½    dv_j = Σ_i p_ij do_i

The backward takes the *final* o and lse, those after all chunks were merged, so that each chunk's part is exact by
itself (Liu et al., arXiv 2310.01889, section 3; Dao, arXiv 2307.08691, algorithm 2): a chunk's own log-sum-exp would
carry no gradient and give silently wrong ones. Both passes are written out, in plain torch, without autograd.

Row i sees row j of the same segment, up to itself when causal and not beyond a window behind it. Where the caller knows
that every visible pair is in order it says ``causal=False``.

With dropout of the probabilities, z_ij = 1 / (1 − rate) where kept and else 0: o_i = Σ_j z_ij p_ij v_j, and z_ij stands
before p_ij in dv_j and before do_i·v_j in ds_ij; the log-sum-exp knows nothing of it. ``dropout`` is of the whole
stream, of which the rows' places pick.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from colonnade.kernels.dropout.reference import Pairs
from colonnade.kernels.softmax_state import State


class Rows(NamedTuple):
    """Which rows of a stream some queries or keys are."""

    index_T: Tensor
    """Each row's place in the whole stream."""
    segment_T: Tensor
    """The number of its sequence; rows see their own sequence only."""
    cu_seqlens: Tensor
    """int32: where the part of each sequence begins among these rows, and their number at the end."""
    longest: int
    """No sequence has more rows here."""
    sequences: int
    """How many sequences these rows are equal parts of, one after another; 0 where they are not equal."""


class Gradients(NamedTuple):
    """Of one chunk's attention."""

    dq_TNH: Tensor
    dk_SKH: Tensor
    dv_SKH: Tensor


def forward(
    q_TNH: Tensor,
    k_SKH: Tensor,
    v_SKH: Tensor,
    queries: Rows,
    keys: Rows,
    *,
    causal: bool,
    window: int | None = None,
    dropout: Pairs | None = None,
) -> State:
    """The state (o_TNH, lse_TN) of these queries over these keys, in at least float32."""
    s_KGTS, _, v_SKH = _scores(q_TNH, k_SKH, v_SKH, queries, keys, causal, window)
    lse_KGT = torch.logsumexp(s_KGTS, -1) if len(k_SKH) else s_KGTS.new_full(s_KGTS.shape[:-1], -torch.inf)
    p_KGTS = torch.exp(s_KGTS - torch.where(lse_KGT == -torch.inf, 0.0, lse_KGT)[..., None])
    o_TNH = torch.einsum("kgts,skh->tkgh", _drop(p_KGTS, queries, keys, dropout), v_SKH).flatten(1, 2)
    return State(o_TNH, lse_KGT.flatten(0, 1).T)


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
    dropout: Pairs | None = None,
) -> Gradients:
    """This chunk's part of the gradients, in at least float32, given the final ``o_TNH`` and ``lse_TN``."""
    K, H = k_SKH.shape[1:]
    s_KGTS, q_TKGH, v_SKH = _scores(q_TNH, k_SKH, v_SKH, queries, keys, causal, window)
    lse_KGT = lse_TN.T.unflatten(0, (K, -1))
    do_TKGH = do_TNH.to(s_KGTS.dtype).unflatten(1, (K, -1))
    p_KGTS = torch.exp(s_KGTS - torch.where(lse_KGT == -torch.inf, 0.0, lse_KGT)[..., None])
    delta_KGT = (do_TNH * o_TNH).sum(-1).to(s_KGTS.dtype).T.unflatten(0, (K, -1))
    dp_KGTS = _drop(torch.einsum("tkgh,skh->kgts", do_TKGH, v_SKH), queries, keys, dropout)
    ds_KGTS = p_KGTS * (dp_KGTS - delta_KGT[..., None]) * H**-0.5
    return Gradients(
        torch.einsum("kgts,skh->tkgh", ds_KGTS, k_SKH.to(ds_KGTS.dtype)).flatten(1, 2),
        torch.einsum("kgts,tkgh->skh", ds_KGTS, q_TKGH),
        torch.einsum("kgts,tkgh->skh", _drop(p_KGTS, queries, keys, dropout), do_TKGH),
    )


def _scores(
    q_TNH: Tensor, k_SKH: Tensor, v_SKH: Tensor, queries: Rows, keys: Rows, causal: bool, window: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    """(s_KGTS, −∞ where nothing is seen; q_TKGH; v_SKH), in at least float32."""
    kind = torch.promote_types(q_TNH.dtype, torch.float32)
    q_TKGH = q_TNH.to(kind).unflatten(1, (k_SKH.shape[1], -1))
    s_KGTS = torch.einsum("tkgh,skh->kgts", q_TKGH, k_SKH.to(kind)) * q_TNH.shape[2] ** -0.5
    seen_TS = queries.segment_T[:, None] == keys.segment_T
    behind_TS = queries.index_T[:, None] - keys.index_T
    if causal:
        seen_TS &= behind_TS >= 0
    if window is not None:
        seen_TS &= behind_TS < window
    return s_KGTS.masked_fill(~seen_TS, -torch.inf), q_TKGH, v_SKH.to(kind)


def _drop(x_KGTS: Tensor, queries: Rows, keys: Rows, dropout: Pairs | None) -> Tensor:
    """z x."""
    if dropout is None:
        return x_KGTS
    K, G = x_KGTS.shape[:2]
    kept_KGTS = dropout.cut(queries.index_T, keys.index_T).keeps(K * G).unflatten(0, (K, G))
    return torch.where(kept_KGTS, x_KGTS * (1 / (1 - dropout.rate)), 0.0)
