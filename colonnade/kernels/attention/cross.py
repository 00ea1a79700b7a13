"""Cross attention over packed sequences, and self-attention with relative position biases.

    cross       o_i = Σ_j softmax_j(q_i·k_j·H^-½) v_j                        over all keys j of the query's source
    relative    scores plus near[clamp(j − i, −d, d) + d]                    2d + 1 rows, one value per head

Each has a plain reference and a version through torch's fused kernels, which take biases as an additive mask. Sequence
b of a cross attention has queries ``cu_queries[b]:cu_queries[b + 1]`` and keys ``cu_keys[b]:cu_keys[b + 1]``; without
keys its output is 0.
"""

import itertools
from collections.abc import Callable

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
    longest: tuple[int, int] | None = None,
    equal: bool = False,
    dropout: AttentionDropout | None = None,
) -> Tensor:
    """o_TNH; ``longest`` (queries, keys) and ``equal`` (all of these lengths) are for other implementations."""
    parts: list[Tensor] = []
    for (a, b), (c, d) in _ranges(cu_queries, cu_keys):
        pairs = None if dropout is None else dropout.select(slice(a, b), slice(c, d))
        parts.append(reference.attend(q_TNH[a:b], k_SKH[c:d], v_SKH[c:d], causal=False, dropout=pairs).o)
    return torch.cat(parts) if parts else torch.zeros_like(q_TNH)


def cross_sdpa(
    q_TNH: Tensor,
    k_SKH: Tensor,
    v_SKH: Tensor,
    cu_queries: Tensor,
    cu_keys: Tensor,
    *,
    longest: tuple[int, int] | None = None,
    equal: bool = False,
) -> Tensor:
    """The same through scaled_dot_product_attention: one call for sequences of equal lengths, otherwise one for
    each.
    """
    if equal and longest is not None and min(longest):
        T, S = longest
        batch = q_TNH.unflatten(0, (-1, T)), *(x.unflatten(0, (-1, S)) for x in (k_SKH, v_SKH))
        return sdpa.attend(*batch, causal=False, window=None).flatten(0, 1)
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


def cross_varlen(
    q_TNH: Tensor,
    k_SKH: Tensor,
    v_SKH: Tensor,
    cu_queries: Tensor,
    cu_keys: Tensor,
    *,
    longest: tuple[int, int] | None = None,
    equal: bool = False,
) -> Tensor:
    """The same on a GPU: sequences of unequal lengths in one launch, without waiting for the device."""
    if equal or longest is None or not min(longest) or q_TNH.shape[2] % 8:
        return cross_sdpa(q_TNH, k_SKH, v_SKH, cu_queries, cu_keys, longest=longest, equal=equal)
    return sdpa.varlen(q_TNH, k_SKH, v_SKH, cu_queries, cu_keys, *longest, window_size=(-1, -1))


def relative_reference(
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
    """The same through scaled_dot_product_attention, with :func:`relative_mask`, which may be given.

    Sequences of equal length are one call; others are padded to one on a GPU, and are one call each on a CPU.
    """
    if not len(q_TNH):
        return q_TNH.clone()
    if longest is None:
        longest = int(cu_seqlens.diff().max())
    if bias_NTS is None:
        bias_NTS = relative_mask(near_RN, longest, causal=causal)
    bias_NTS = bias_NTS.to(q_TNH.dtype)
    if equal or q_TNH.is_cuda:
        return in_batches(_biased_of_lengths, q_TNH, k_TKH, v_TKH, cu_seqlens, longest, bias_NTS, equal=equal)
    parts: list[Tensor] = []
    for a, b in itertools.pairwise(cu_seqlens.tolist()):
        if a < b:
            q, k, v = (x[None, a:b] for x in (q_TNH, k_TKH, v_TKH))
            parts.append(_biased(q, k, v, bias_NTS[:, : b - a, : b - a])[0])
    return torch.cat(parts)


def in_batches(
    attend: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None], Tensor],
    q_TNH: Tensor,
    k_TKH: Tensor,
    v_TKH: Tensor,
    cu_seqlens: Tensor,
    longest: int,
    bias_NTS: Tensor,
    *,
    equal: bool,
) -> Tensor:
    """o_TNH of one call ``attend(q_BTNH, k_BTKH, v_BTKH, bias_NTS, lengths_B)``, without waiting for the device.

    Sequences of unequal length are padded to ``longest``; ``lengths_B`` (None if all are equal) is the number of keys
    that each sees. An empty sequence sees its first padding, so that no row is NaN.
    """
    if equal:
        q, k, v = (x.unflatten(0, (-1, longest)) for x in (q_TNH, k_TKH, v_TKH))
        return attend(q, k, v, bias_NTS, None).flatten(0, 1)
    token_T, lengths_B = torch.arange(len(q_TNH), device=q_TNH.device), cu_seqlens.diff().clamp(min=1)
    sequence_T = torch.searchsorted(cu_seqlens[1:], token_T, right=True)
    row_T, B = sequence_T * longest + token_T - cu_seqlens[sequence_T], len(lengths_B)
    q, k, v = (
        x.new_zeros(B * longest, *x.shape[1:]).index_copy(0, row_T, x).unflatten(0, (B, longest))
        for x in (q_TNH, k_TKH, v_TKH)
    )
    return attend(q, k, v, bias_NTS, lengths_B).flatten(0, 1).index_select(0, row_T)


def bias_mask(bias_NTS: Tensor, lengths_B: Tensor | None) -> Tensor:
    """(1 or B, N, T, S): the biases, −∞ for the keys behind a sequence."""
    if lengths_B is None:
        return bias_NTS[None]
    hidden_BS = torch.arange(bias_NTS.shape[2], device=bias_NTS.device) >= lengths_B[:, None]
    return bias_NTS.masked_fill(hidden_BS[:, None, None], -torch.inf)


def _biased_of_lengths(
    q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor, bias_NTS: Tensor, lengths_B: Tensor | None
) -> Tensor:
    return _biased(q_BTNH, k_BTKH, v_BTKH, bias_mask(bias_NTS, lengths_B))


def relative_mask(near_RN: Tensor, longest: int, *, causal: bool) -> Tensor:
    """bias_NTS of one sequence, near[clamp(j − i)], with −∞ where a causal query may not look.

    It depends on j − i only, so that its rows are windows of one: its gradient is a sum along diagonals, not a
    scattered one.
    """
    limit = len(near_RN) // 2
    distance = torch.arange(1 - longest, longest, device=near_RN.device)
    # At least float32: a gradient is a sum of thousands of pairs.
    wide_RN = near_RN.to(torch.promote_types(near_RN.dtype, torch.float32))
    row_RN = wide_RN.index_select(0, distance.clamp(-limit, limit) + limit)
    if causal:
        row_RN = row_RN.masked_fill((distance > 0)[:, None], -torch.inf)
    # The windows are strided by heads first, and fused kernels need adjacent keys.
    return row_RN.T.unfold(1, longest, 1).flip(1).to(near_RN.dtype).contiguous()


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


def _biased(q_BTNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor, bias: Tensor) -> Tensor:
    # Fused kernels take masks of four dimensions; with three, torch computes the scores in float32.
    mask_BNTS = bias if bias.dim() == 4 else bias[None]
    o_BNTH = torch.nn.functional.scaled_dot_product_attention(
        q_BTNH.transpose(1, 2),
        k_BSKH.transpose(1, 2),
        v_BSKH.transpose(1, 2),
        attn_mask=mask_BNTS,
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
