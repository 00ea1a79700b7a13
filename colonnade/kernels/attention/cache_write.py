"""Writes to the paged KV cache, in plain torch: keys and values, 8-bit MLA latents, fused RoPE.

**float8 keys and values** have no scales:

    k₈ = round(clamp(k, ±448))        e4m3: 3 mantissa bits, from 448 down to 2⁻⁶ and, with fewer bits, to 2⁻⁹

A trained model's keys and values are far below 448, and a scale that was not calibrated would only shift the range.
Larger values are clamped; NaN stays NaN, so that a broken request can be detected.

**8-bit latents** (MLA) have scales, since one vector serves all heads:

    [c; r] ≈ [c₈ s; r₈ z]          s and z: one per token each, float32

The latent c went through a norm and its rotary key r did not: with one scale for both, the larger part would take
precision from the smaller. Scales are per token, like the row scales of weights (:mod:`.linear.quantise` defines the
rounding), so that a token's bits depend on that token only and pages can be written token by token. Queries and
products stay in the model's dtype: only stored values are rounded, once.

**RoPE and KV write**: from a layer's QKV projection to queries, and keys and values in a paged cache.

    q, k, v = split(qkv)        q, k ← norm(q), norm(k)        q, k ← rope(q), rope(k)        cache[slots] ← k, v

Rows of ``qkv_Tz`` are grouped by key/value head: its G query heads, its key, its value.
"""

from typing import Literal

import torch
from torch import Tensor

from colonnade.kernels import norm as norm_reference
from colonnade.kernels.linear.quantise import quantise
from colonnade.kernels.linear.reference import NormWeights
from colonnade.kernels.rotary import Rotation, rotate

E4M3_MAX = torch.finfo(torch.float8_e4m3fn).max
"""The largest e4m3 number."""


def to_cache_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Casts ``x`` to a cache's dtype, with saturation."""
    # The cast does not saturate in every version of torch.
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(dtype) if dtype == torch.float8_e4m3fn else x.to(dtype)


def select_rows(x: Tensor, where: Tensor) -> Tensor:
    """x[where]; 8-bit tensors as bytes, since not every torch can index float8."""
    if x.element_size() > 1:
        return x.index_select(0, where)
    return x.view(torch.uint8).index_select(0, where).view(x.dtype)


def copy_rows(x: Tensor, where: Tensor, new: Tensor) -> None:
    """x[where] = new, of one dtype; 8-bit tensors as bytes."""
    if x.element_size() == 1:
        x, new = x.view(torch.uint8), new.contiguous().view(torch.uint8)
    x.index_copy_(0, where, new)


def write_kv(pool_PpKH: Tensor, slots_T: Tensor, x_TKH: Tensor) -> None:
    """Writes tokens to slots (page · page_tokens + offset) of a cache."""
    copy_rows(pool_PpKH.flatten(0, 1), slots_T, to_cache_dtype(x_TKH, pool_PpKH.dtype))


def read_kv(pool_PpKH: Tensor, slots_S: Tensor, dtype: torch.dtype) -> Tensor:
    """x_SKH: the contents of these slots, in ``dtype``."""
    return select_rows(pool_PpKH.flatten(0, 1), slots_S).to(dtype)


LatentKind = Literal["int8", "float8"]
DTYPES: dict[str, torch.dtype] = {"int8": torch.int8, "float8": torch.float8_e4m3fn}
SCALES_PER_TOKEN = 2
"""One of the latent, one of the rotary key."""


def quantise_latents(k_TH: Tensor, rank: int, kind: LatentKind) -> tuple[Tensor, Tensor]:
    """(values_TH, scales_T2) of vectors whose first ``rank`` elements are the latent.

    Vectors that are not finite get scales that are not finite.
    """
    c, r = (quantise(part, kind) for part in k_TH.split([rank, k_TH.shape[1] - rank], 1))
    return torch.cat((c.values, r.values), 1), torch.cat((c.scales, r.scales), 1)


def write_latents(k_TH: Tensor, slots_T: Tensor, rank: int, k_Pp1H: Tensor, scales_Pp2: Tensor) -> None:
    """Quantises tokens and writes them to slots (page · page_tokens + offset) of a cache."""
    values_TH, scales_T2 = quantise_latents(k_TH, rank, latent_kind(k_Pp1H))
    copy_rows(k_Pp1H.flatten(0, 1), slots_T, values_TH[:, None])
    scales_Pp2.flatten(0, 1).index_copy_(0, slots_T, scales_T2)


def latent_kind(k_Pp1H: Tensor) -> LatentKind:
    """The quantisation of a cache of 8-bit latents."""
    return "int8" if k_Pp1H.dtype == torch.int8 else "float8"


def dequantise_latents(values: Tensor, scales: Tensor, rank: int, dtype: torch.dtype) -> Tensor:
    """Dequantises ``values`` (…, 1, H) with ``scales`` (…, 2) to ``dtype``, through at least float32."""
    compute_dtype = torch.promote_types(dtype, torch.float32)
    c, r = values.to(compute_dtype).split([rank, values.shape[-1] - rank], -1)
    s, z = scales.to(compute_dtype).unsqueeze(-2).split(1, -1)
    return torch.cat((c * s, r * z), -1).to(dtype)


def gather_latents(values: Tensor, scales: Tensor, where: Tensor, rank: int, dtype: torch.dtype) -> Tensor:
    """Dequantises some rows, which are positions of a cache or its pages."""
    return dequantise_latents(select_rows(values, where), scales.index_select(0, where), rank, dtype)


def rope_and_kv_write(
    qkv_Tz: Tensor,
    k_PpKH: Tensor,
    v_PpKH: Tensor,
    slots_T: Tensor,
    *,
    turn: Rotation | None = None,
    norms: tuple[NormWeights, NormWeights] | None = None,
) -> Tensor:
    """q_TnH; writes each row's key and value to its slot (page · page_tokens + offset)."""
    K, H = k_PpKH.shape[2:]
    qkv_TkgH = qkv_Tz.unflatten(-1, (K, -1, H))
    q_TnH = qkv_TkgH[:, :, :-2].flatten(1, 2)
    k_TkH, v_TkH = qkv_TkgH[:, :, -2], qkv_TkgH[:, :, -1]
    if norms is not None:
        q_TnH, k_TkH = (
            norm_reference.norm(x, norm.weight_D, None, norm.eps) for x, norm in zip((q_TnH, k_TkH), norms, strict=True)
        )
    if turn is not None:
        q_TnH, k_TkH = (rotate(x, turn) for x in (q_TnH, k_TkH))
    for pool, new in ((k_PpKH, k_TkH), (v_PpKH, v_TkH)):
        write_kv(pool, slots_T, new)
    return q_TnH
