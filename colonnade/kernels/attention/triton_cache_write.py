"""Fused cache writes in Triton: RoPE and KV write, and 8-bit MLA latents (see
:mod:`~colonnade.kernels.attention.cache_write`).

**RoPE and KV write** replaces nine torch launches between the QKV projection and attention. Each program handles one
key/value head of one token: its query heads, key and value, which are adjacent in memory. The rotary partner, half a
head away, is read a second time, from L1. Slots outside the cache are not written.

**8-bit latents** take one launch instead of about twenty. Each program handles one token: maxima, scales and all
elements stay in registers. The result is bitwise that of plain torch: divisions are exact, and rounding is to even
(adding 1.5 · 2²³ removes the fraction).
"""

from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton import language as tl

from colonnade.kernels.attention.cache_write import DTYPES, latent_kind
from colonnade.kernels.attention.triton_args import Cache
from colonnade.kernels.linear import quantise
from colonnade.kernels.linear.reference import NormWeights
from colonnade.kernels.rotary import Rotation
from colonnade.kernels.triton_constants import constexprs


class _Norm(NamedTuple):
    gain: Tensor
    eps: float


class _Config(NamedTuple):
    K: int
    GROUP: int
    H: int
    TURN: bool
    NORM: bool
    BLOCK_G: int
    BLOCK_H: int


@triton.jit
def _rope_and_kv_write(
    qkv_ptr,
    rotation,
    q_norm,
    k_norm,
    slots_ptr,
    q_ptr,
    keys,
    values,
    qkv_t,
    page_tokens,
    slots_total,
    cfg: tl.constexpr,
):
    t, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    g, h = tl.arange(0, cfg.BLOCK_G)[:, None], tl.arange(0, cfg.BLOCK_H)[None, :]
    mask = (g < cfg.GROUP + 2) & (h < cfg.H)
    at = qkv_ptr + t * qkv_t + (head * (cfg.GROUP + 2) + g) * cfg.H
    x = tl.load(at + h, mask, 0.0).to(tl.float32)
    value = g == cfg.GROUP + 1
    partner_index = (h + cfg.H // 2) % cfg.H
    rms_scale = tl.full((cfg.BLOCK_G, 1), 1.0, tl.float32)
    if cfg.NORM:
        eps = tl.where(g == cfg.GROUP, k_norm.eps, q_norm.eps)
        rms_scale = tl.where(value, 1.0, tl.rsqrt(tl.sum(x * x, 1)[:, None] / cfg.H + eps))
        gain = tl.load(q_norm.gain + h, h < cfg.H, 0.0).to(tl.float32)
        key_gain = tl.load(k_norm.gain + h, h < cfg.H, 0.0).to(tl.float32)
        gain = tl.where(value, 1.0, tl.where(g == cfg.GROUP, key_gain, gain))
        y = x * rms_scale * gain
    else:
        y = x
    if cfg.TURN:
        partner = tl.load(at + partner_index, mask, 0.0).to(tl.float32)
        if cfg.NORM:
            far_gain = tl.load(q_norm.gain + partner_index, h < cfg.H, 0.0).to(tl.float32)
            far_key_gain = tl.load(k_norm.gain + partner_index, h < cfg.H, 0.0).to(tl.float32)
            partner *= rms_scale * tl.where(g == cfg.GROUP, far_key_gain, far_gain)
        own = tl.load(rotation.own + t * cfg.H + h, h < cfg.H, 0.0).to(tl.float32)
        other = tl.load(rotation.other + t * cfg.H + h, h < cfg.H, 0.0).to(tl.float32)
        y = tl.where(value, x, y * own + partner * other)
    q_at = q_ptr + t * (cfg.K * cfg.GROUP * cfg.H) + (head * cfg.GROUP + g) * cfg.H + h
    tl.store(q_at, y.to(q_ptr.dtype.element_ty), mask & (g < cfg.GROUP))
    slot = tl.load(slots_ptr + t)
    slot_mask = mask & (h < tl.where((slot >= 0) & (slot < slots_total), cfg.H, 0))
    page, offset = slot // page_tokens, slot % page_tokens
    k_at = keys.ptr + page * keys.page + offset * keys.token + head * keys.head + h + g * 0
    tl.store(k_at, y.to(keys.ptr.dtype.element_ty), slot_mask & (g == cfg.GROUP))
    v_at = values.ptr + page * values.page + offset * values.token + head * values.head + h + g * 0
    tl.store(v_at, y.to(values.ptr.dtype.element_ty), slot_mask & value)


def rope_and_kv_write(
    qkv_Tz: Tensor,
    k_PpKH: Tensor,
    v_PpKH: Tensor,
    slots_T: Tensor,
    *,
    turn: Rotation | None = None,
    norms: tuple[NormWeights, NormWeights] | None = None,
) -> Tensor:
    """q_TnH (see :func:`cache_write.rope_and_kv_write`)."""
    (T, z), (P, page_tokens, K, H) = qkv_Tz.shape, k_PpKH.shape
    group = z // (K * H) - 2
    q_TnH = qkv_Tz.new_empty(T, K * group, H)
    if not T:
        return q_TnH
    qkv_Tz = qkv_Tz if qkv_Tz.stride(1) == 1 else qkv_Tz.contiguous()
    none = q_TnH  # placeholder for tensors that are not read
    rotation = Rotation(none, none) if turn is None else Rotation(*(x.contiguous() for x in turn))
    q_norm, k_norm = (_Norm(norm.weight_D, norm.eps) for norm in norms or (NormWeights(none, 0.0),) * 2)
    block_g, block_h = triton.next_power_of_2(group + 2), triton.next_power_of_2(H)
    config = _Config(K, group, H, turn is not None, norms is not None, block_g, block_h)
    keys, values = (Cache(x, *x.stride()[:3]) for x in (k_PpKH, v_PpKH))
    _rope_and_kv_write[T, K](
        qkv_Tz, rotation, q_norm, k_norm, slots_T, q_TnH, keys, values, qkv_Tz.stride(0), page_tokens, P * page_tokens,
        constexprs(config), num_warps=max(1, min(8, block_g * block_h // 256)),
    )  # fmt: skip
    return q_TnH


MIN_RANGE = tl.constexpr(quantise.MIN_RANGE)
EXPONENT = tl.constexpr(quantise.EXPONENT)
HIGHEST = tl.constexpr(torch.finfo(DTYPES["float8"]).max)
ROUND_TO_INTEGER = tl.constexpr(1.5 * 2.0**23)


@triton.jit
def _quantise_part(from_ptr, to_ptr, scale_ptr, i, mask, KIND: tl.constexpr):
    """Quantises one of the two parts of a token."""
    x = tl.load(from_ptr + i, mask, 0.0).to(tl.float32)
    highest = tl.maximum(tl.max(tl.abs(x), 0), MIN_RANGE)
    if KIND == "int8":
        scale = tl.div_rn(highest, 127.0)
        q = tl.div_rn(x, scale) + ROUND_TO_INTEGER - ROUND_TO_INTEGER
        q = tl.minimum(tl.maximum(q, -127.0), 127.0).to(tl.int8)
    else:
        scale_bits = tl.div_rn(HIGHEST, highest).to(tl.int32, bitcast=True) & EXPONENT
        inverse_scale = scale_bits.to(tl.float32, bitcast=True)
        scale = tl.div_rn(1.0, inverse_scale)
        q = (x * inverse_scale).to(tl.float8e4nv)
    tl.store(to_ptr + i, q, mask)
    tl.store(scale_ptr, scale + tl.sum(x * 0.0, 0))  # not finite if any element is not


@triton.jit
def _write_latents(
    k_ptr, slots_ptr, values_ptr, scales_ptr, k_t,
    RANK: tl.constexpr, ROPE: tl.constexpr, KIND: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + t).to(tl.int64)
    i, x = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_R)
    of, to = k_ptr + t * k_t, values_ptr + slot * (RANK + ROPE)
    _quantise_part(of, to, scales_ptr + 2 * slot, i, i < RANK, KIND)
    _quantise_part(of + RANK, to + RANK, scales_ptr + 2 * slot + 1, x, x < ROPE, KIND)


def write_latents(k_TH: Tensor, slots_T: Tensor, rank: int, k_Pp1H: Tensor, scales_Pp2: Tensor) -> None:
    """Writes tokens to slots of a contiguous cache (see :func:`cache_write.write_latents`)."""
    T, H = k_TH.shape
    k_TH = k_TH if k_TH.stride(1) == 1 else k_TH.contiguous()
    if T:
        blocks = {"BLOCK_C": triton.next_power_of_2(rank), "BLOCK_R": triton.next_power_of_2(H - rank)}
        _write_latents[T,](
            k_TH,
            slots_T,
            k_Pp1H,
            scales_Pp2,
            k_TH.stride(0),
            RANK=rank,
            ROPE=H - rank,
            KIND=latent_kind(k_Pp1H),
            **blocks,
        )
