"""Attention through torch's fused kernels: scaled_dot_product_attention, and varlen FlashAttention on GPUs.

Sequences of equal length are viewed as (batch, sequence), without a copy. Ragged ones run one after another on a CPU,
where a call costs little compared to its arithmetic; on a GPU in 16 bits all run in one varlen launch whose lengths
stay on the device. Equal sequences are batched there too, since cuDNN is faster. A causal call with T = S needs no
mask; a prompt chunk (T < S) or a window passes one. Requests in a paged cache run in the groups of
:attr:`PageTable.groups`: decodes together, prompts one by one.
"""

import inspect
import itertools
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from colonnade.kernels.attention.cache_write import dequantise_latents
from colonnade.kernels.attention.page_table import Group, PageTable
from colonnade.kernels.attention.reference import visible


def attend(q_BTNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor, *, causal: bool, window: int | None) -> Tensor:
    """o_BTNH of sequences of equal length; queries are the last T of S positions."""
    T, S = q_BTNH.shape[1], k_BSKH.shape[1]
    if window is not None and window >= S:
        window = None
    # Branches, not expressions: under torch.compile sizes may be symbolic, and SDPA accepts no symbolic is_causal.
    mask, is_causal = None, False
    if window is not None or (causal and T != S and T != 1):
        mask = visible(T, S, causal=causal, window=window, device=q_BTNH.device)
    elif causal and T > 1:
        is_causal = True
    return _sdpa(q_BTNH, k_BSKH, v_BSKH, mask, is_causal)


def attend_masked(q_BTNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor, mask_TS: Tensor) -> Tensor:
    """o_BTNH of queries that see the keys in ``mask_TS``."""
    return _sdpa(q_BTNH, k_BSKH, v_BSKH, mask_TS)


def _sdpa(q_BTNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor, mask: Tensor | None, is_causal: bool = False) -> Tensor:
    K = k_BSKH.shape[2]
    if q_BTNH.shape[1] == 1 and q_BTNH.shape[2] > K:
        # Treat a group's query heads as queries of one key head: keys are read once for all of them, and torch's CPU
        # kernel takes 5 to 15 times as long for a single 16-bit query as for a few (docs/log.md, "CPU decode").
        q_BGKH = q_BTNH.squeeze(1).unflatten(1, (K, -1)).transpose(1, 2)
        return _sdpa(q_BGKH, k_BSKH, v_BSKH, mask).transpose(1, 2).flatten(1, 2).unsqueeze(1)
    o_BNTH = scaled_dot_product_attention(
        q_BTNH.transpose(1, 2),
        k_BSKH.transpose(1, 2),
        v_BSKH.transpose(1, 2),
        attn_mask=mask,
        is_causal=is_causal,
        enable_gqa=q_BTNH.shape[2] != k_BSKH.shape[2],
    )
    return o_BNTH.transpose(1, 2)


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
) -> Tensor:
    """o_TNH of packed sequences (see :func:`reference.packed`)."""
    if equal:
        batch = [x.unflatten(0, (-1, longest)) for x in (q_TNH, k_TKH, v_TKH)]
        return attend(*batch, causal=causal, window=window).flatten(0, 1)
    ends = cu_seqlens.tolist()
    parts = [
        attend(*(x[None, a:b] for x in (q_TNH, k_TKH, v_TKH)), causal=causal, window=window)[0]
        for a, b in itertools.pairwise(ends)
        if b > a
    ]
    return torch.cat(parts) if parts else q_TNH.clone()  # no tokens


def paged(
    q_TNH: Tensor,
    k_PpKH: Tensor,
    v_PpKH: Tensor,
    table: PageTable,
    *,
    window: int | None = None,
    values: int | None = None,
    scales_Pp2: Tensor | None = None,
) -> Tensor:
    """o_TNH of requests with a paged KV cache (see :func:`reference.paged`)."""
    # The kernels require values as wide as keys, so unused elements are cut from the output.

    def keys_and_values(group: Group) -> tuple[Tensor, Tensor]:
        k_BSKH = group.gather(k_PpKH)
        if scales_Pp2 is not None:
            assert values is not None, "scales are for latents"
            k_BSKH = dequantise_latents(k_BSKH, group.gather(scales_Pp2), values, q_TNH.dtype)
        k_BSKH = k_BSKH.to(q_TNH.dtype)
        return k_BSKH, k_BSKH if v_PpKH is k_PpKH else group.gather(v_PpKH).to(q_TNH.dtype)

    table.check(len(k_PpKH))
    has_empty = 0 in table.host_lengths[1]
    if len(table.groups) == 1 and not has_empty:
        group = table.groups[0]
        return _attend_group(q_TNH, *keys_and_values(group), group, window)[..., :values]
    out_TNH = torch.zeros_like(q_TNH) if has_empty else torch.empty_like(q_TNH)
    for group in table.groups:
        out_TNH[group.rows] = _attend_group(q_TNH[group.rows], *keys_and_values(group), group, window)
    return out_TNH[..., :values]


def _attend_group(q_TNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor, group: Group, window: int | None) -> Tensor:
    q_BTNH = q_TNH.unflatten(0, (len(group.lengths_B), -1))
    if group.unused is None:
        return attend(q_BTNH, k_BSKH, v_BSKH, causal=True, window=window).flatten(0, 1)
    key_S, lengths_B1 = torch.arange(group.longest, device=q_TNH.device), group.lengths_B[:, None]
    mask_BS = key_S < lengths_B1
    if window is not None:
        mask_BS &= key_S >= lengths_B1 - window
    return _sdpa(q_BTNH, k_BSKH, v_BSKH, mask_BS[:, None, None]).flatten(0, 1)


if torch.backends.cuda.is_built():
    from torch.nn.attention.varlen import varlen_attn
else:  # the import loads torch's compiler, which takes a second, and a CPU build cannot use it
    varlen_attn = None

# Newer torch requires a flag for grouped queries; 2.11 accepts them without.
VARLEN_OPTIONS: dict[str, Any] = {}
if varlen_attn is not None and "enable_gqa" in inspect.signature(varlen_attn).parameters:
    VARLEN_OPTIONS = {"enable_gqa": True}


def packed_varlen(
    q_TNH: Tensor,
    k_TKH: Tensor,
    v_TKH: Tensor,
    cu_seqlens: Tensor,
    *,
    longest: int,
    equal: bool,
    causal: bool = True,
    window: int | None = None,
) -> Tensor:
    """o_TNH of packed sequences (see :func:`reference.packed`); ``longest`` may be an upper bound."""
    # The kernel needs head widths in multiples of 8; scaled_dot_product_attention pads others.
    if equal or not len(q_TNH) or q_TNH.shape[2] % 8:
        return packed(q_TNH, k_TKH, v_TKH, cu_seqlens, longest=longest, equal=equal, causal=causal, window=window)
    window_size = (-1 if window is None else window - 1, 0 if causal else -1)
    return varlen(q_TNH, k_TKH, v_TKH, cu_seqlens, cu_seqlens, longest, longest, window_size=window_size)


def varlen(
    q_TNH: Tensor,
    k_SKH: Tensor,
    v_SKH: Tensor,
    cu_queries: Tensor,
    cu_keys: Tensor,
    longest_query: int,
    longest_key: int,
    *,
    window_size: tuple[int, int],
) -> Tensor:
    """o_TNH of packed queries over packed keys, by torch's FlashAttention for GPUs in 16 bits.

    ``window_size`` is how many keys to the left and to the right are seen, −1 for all.
    """
    assert varlen_attn is not None, "a torch that was built with CUDA"
    o_TNH = varlen_attn(
        q_TNH, k_SKH, v_SKH, cu_queries, cu_keys, longest_query, longest_key, window_size=window_size, **VARLEN_OPTIONS
    )
    assert isinstance(o_TNH, torch.Tensor)
    return o_TNH
