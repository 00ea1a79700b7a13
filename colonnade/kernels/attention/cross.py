"""Cross attention over packed sequences, and self-attention with relative position biases.

    cross       o_i = Σ_j softmax_j(q_i·k_j·H^-½) v_j                        over all keys j of the query's source
    relative    scores plus near[clamp(j − i, −d, d) + d]                    2d + 1 rows, one value a head

Each has a plain reference and a version through torch's fused kernels, which take biases as an additive mask. Sequence
b of a cross attention has queries ``cu_queries[b]:cu_queries[b + 1]`` and keys ``cu_keys[b]:cu_keys[b + 1]``; without
keys its output is 0.
"""

import itertools

import torch
from torch import Tensor

from colonnade.kernels.attention import reference, sdpa
from colonnade.kernels.attention.page_table import PageTable
from colonnade.kernels.dropout import AttentionDropout


def cross_reference(
    q_TNH: Tensor,
    k_SKH: Tensor,
    v_SKH: Tensor,
    cu_queries: Tensor,
    cu_keys: Tensor,
    *,
    dropout: AttentionDropout | None = None,
) -> Tensor:
    """o_TNH."""
    parts: list[Tensor] = []
    for (a, b), (c, d) in _ranges(cu_queries, cu_keys):
        pairs = None if dropout is None else dropout.select(slice(a, b), slice(c, d))
        parts.append(reference.attend(q_TNH[a:b], k_SKH[c:d], v_SKH[c:d], causal=False, dropout=pairs).o)
    return torch.cat(parts) if parts else torch.zeros_like(q_TNH)


def cross_sdpa(q_TNH: Tensor, k_SKH: Tensor, v_SKH: Tensor, cu_queries: Tensor, cu_keys: Tensor) -> Tensor:
    """The same through scaled_dot_product_attention, a call for each sequence."""
    parts: list[Tensor] = []
    for (a, b), (c, d) in _ranges(cu_queries, cu_keys):
        if a == b:
            continue
        if c == d:
            parts.append(torch.zeros_like(q_TNH[a:b]))
            continue
        keys, values = k_SKH[None, c:d], v_SKH[None, c:d]
        parts.append(sdpa.attend(q_TNH[None, a:b], keys, values, causal=False, window=None)[0])
    return torch.cat(parts) if parts else torch.zeros_like(q_TNH)


def relative_reference(
    q_TNH: Tensor,
    k_TKH: Tensor,
    v_TKH: Tensor,
    cu_seqlens: Tensor,
    near_RN: Tensor,
    *,
    causal: bool,
    dropout: AttentionDropout | None = None,
) -> Tensor:
    """o_TNH of packed sequences with relative position biases."""
    parts: list[Tensor] = []
    for a, b in itertools.pairwise(cu_seqlens.tolist()):
        pairs = None if dropout is None else dropout.select(slice(a, b), slice(a, b))
        q, k, v = q_TNH[a:b], k_TKH[a:b], v_TKH[a:b]
        parts.append(reference.attend(q, k, v, causal=causal, near_RN=near_RN, dropout=pairs).o)
    return torch.cat(parts) if parts else q_TNH.clone()


def relative_sdpa(
    q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, cu_seqlens: Tensor, near_RN: Tensor, *, causal: bool
) -> Tensor:
    """The same through scaled_dot_product_attention; biases are expanded once for the longest sequence."""
    lengths = [b - a for a, b in itertools.pairwise(cu_seqlens.tolist())]
    longest = max(lengths, default=0)
    bias_NTS = _bias(near_RN, longest, longest, q_TNH.dtype, causal=causal)
    parts: list[Tensor] = []
    start = 0
    for n in lengths:
        if n:
            q, k, v = (x[None, start : start + n] for x in (q_TNH, k_TKH, v_TKH))
            parts.append(_biased(q, k, v, bias_NTS[:, :n, :n])[0])
        start += n
    return torch.cat(parts) if parts else q_TNH.clone()


def relative_paged_reference(
    q_TNH: Tensor, k_PpKH: Tensor, v_PpKH: Tensor, table: PageTable, near_RN: Tensor
) -> Tensor:
    """o_TNH of requests whose keys are in pages, with relative position biases."""
    return _paged(q_TNH, k_PpKH, v_PpKH, table, near_RN, fused=False)


def relative_paged_sdpa(q_TNH: Tensor, k_PpKH: Tensor, v_PpKH: Tensor, table: PageTable, near_RN: Tensor) -> Tensor:
    """The same through scaled_dot_product_attention, a call for each request."""
    return _paged(q_TNH, k_PpKH, v_PpKH, table, near_RN, fused=True)


def _paged(q_TNH: Tensor, k_PpKH: Tensor, v_PpKH: Tensor, table: PageTable, near_RN: Tensor, *, fused: bool) -> Tensor:
    table.check(len(k_PpKH))
    (new_R, lengths), out_TNH, start = table.host_lengths, torch.zeros_like(q_TNH), 0
    for r, (new, length) in enumerate(zip(new_R, lengths, strict=True)):
        rows = slice(start, start + new)
        start += new
        if not new or not length:
            continue
        used = table.pages_RP[r, : -(-length // table.page_tokens)]
        k_SKH, v_SKH = reference.keys_and_values(k_PpKH, v_PpKH, used, length, None, None, q_TNH.dtype)
        if fused:
            bias_NTS = _bias(near_RN, new, length, q_TNH.dtype, causal=True)
            out_TNH[rows] = _biased(q_TNH[None, rows], k_SKH[None], v_SKH[None], bias_NTS)[0]
        else:
            out_TNH[rows] = reference.attend(q_TNH[rows], k_SKH, v_SKH, near_RN=near_RN).o
    return out_TNH


def _biased(q_BTNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor, bias_NTS: Tensor) -> Tensor:
    o_BNTH = torch.nn.functional.scaled_dot_product_attention(
        q_BTNH.transpose(1, 2),
        k_BSKH.transpose(1, 2),
        v_BSKH.transpose(1, 2),
        attn_mask=bias_NTS,
        enable_gqa=q_BTNH.shape[2] != k_BSKH.shape[2],
    )
    return o_BNTH.transpose(1, 2)


def _bias(near_RN: Tensor, T: int, S: int, dtype: torch.dtype, *, causal: bool) -> Tensor:
    """bias_NTS of the last T of S positions, with −∞ where a causal query may not look."""
    bias_NTS = reference.relative_bias(near_RN, T, S).to(dtype)
    if not causal:
        return bias_NTS
    mask_TS = reference.visible(T, S, causal=True, window=None, device=near_RN.device)
    return bias_NTS.masked_fill(~mask_TS, -torch.inf)


def _ranges(cu_queries: Tensor, cu_keys: Tensor) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    queries, keys = itertools.pairwise(cu_queries.tolist()), itertools.pairwise(cu_keys.tolist())
    return list(zip(queries, keys, strict=True))
