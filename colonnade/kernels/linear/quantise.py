"""Weight-only quantisation to int8, int4 and float8: quantise and dequantise.

    int8     w ≈ q s          q in −127 … 127; one s per row (output), float32
    int4     w ≈ q s + m      q in 0 … 15; s and m per group of 32, 64 or 128 inputs of a row, bfloat16
    int8_dynamic   as int8, with the inputs rounded to 8 bits too (:func:`round_inputs`)
    ternary  w ≈ t s          t in −1, 0, 1; one s per row, bfloat16; G weights in a word of 16 bits (:mod:`ternary`)
    float8   w ≈ q s          q in e4m3; one s per row, a power of two (:mod:`float8` says why)

int4 packs eight values into an int32 word: bits 4i … 4i+3 of word c of a group of G inputs hold its input i·G/8 + c, so
that one shift of consecutive words gives consecutive inputs. The last group of a row is padded with zeros. A group's
range always contains 0, which keeps m within 15 s of it, and q is rounded with s and m as stored: no weight changes by
more than 0.6 s.

A grid with an integer zero point, w ≈ (q − z) s, as other projects store int4, is the same form with m = −z s. With
z = 8 (symmetric) m is a bfloat16 number if s is; in general it is not, and s and m are then stored in float32, where
q s + m is exact (:func:`int4_scales`). Kernels that read bfloat16 pairs leave such weights to the reference.

int8 may also have a scale per group of inputs, as GGUF's Q8_0 has; only the reference multiplies with such weights.

All arithmetic is float32, whatever the weights' dtype. Where a row is sharded over ranks, ``reduce_max`` takes the
maximum over them, so that quantised values do not depend on the layout. (A group belongs to one rank: see
:mod:`colonnade.config.feature_checks`.)
"""

from collections.abc import Callable
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from colonnade.errors import ConfigError
from colonnade.kernels.linear import ternary

Kind = Literal["int8", "int4", "float8", "int8_dynamic", "ternary"]
KINDS = get_args(Kind)
FLOAT8 = torch.float8_e4m3fn
INT4_PER_WORD = 8
"""int4 values in an int32 word."""
BLOCK = 16
"""Outputs of a block (:func:`to_blocks`)."""
MIN_RANGE = 2.0**-100
"""Lower bound of a maximum: keeps the scale of a row of zeros finite, and products of two scales within float32."""
EXPONENT = 0x7F800000
"""Exponent bits of a float32; masking a positive value with them rounds it down to a power of two."""


class Quantised(NamedTuple):
    """A matrix of F outputs and D inputs, or a stack of E of them, with E as the first dimension of its tensors."""

    kind: Kind
    values: Tensor
    """int8 or float8 (F, D); for int4, words (F, groups · G / 8); for ternary, words (F, groups)."""
    scales: Tensor
    """(F, 1) float32, for ternary bfloat16, for int8 in groups (F, groups); for int4, s and m as (F, groups, 2)
    bfloat16, or float32 where bfloat16 would round them."""
    inputs: int
    """D."""
    group: int
    """G, for ternary the weights in a word; D without groups."""
    blocked: bool = False
    """Whether outputs are stored in blocks (:func:`to_blocks`), not in rows."""

    @property
    def outputs(self) -> int:
        """F."""
        return self.values.shape[-2]

    def matrix(self, e: int) -> "Quantised":
        """Matrix ``e`` of a stack."""
        return self._replace(values=self.values[e], scales=self.scales[e])

    @property
    def has_wide_scales(self) -> bool:
        """Whether int4 scales are float32, which only the reference multiplies with."""
        return self.kind == "int4" and self.scales.dtype == torch.float32

    @property
    def has_int8_groups(self) -> bool:
        """Whether it is int8 with a scale per group of inputs."""
        return self.kind == "int8" and self.scales.shape[-1] > 1

    @property
    def needs_reference(self) -> bool:
        """Whether only the reference multiplies with it."""
        return self.has_wide_scales or self.has_int8_groups or self.kind == "ternary"

    @property
    def nbytes(self) -> int:
        """Memory in bytes."""
        return self.values.nbytes + self.scales.nbytes


def quantise(
    weight_FD: Tensor, kind: Kind, group: int = 64, reduce_max: Callable[[Tensor], Tensor] = lambda highest: highest
) -> Quantised:
    """``weight_FD`` quantised to ``kind``; values that are not finite give scales that are not finite.

    Raises :class:`ConfigError` for an unknown ``kind``.
    """
    if kind not in KINDS:
        raise ConfigError(f"unknown weight format {kind!r}; use {', '.join(KINDS[:-1])} or {KINDS[-1]}")
    w_FD = weight_FD.float()
    if kind == "int4":
        return _quantise_int4(w_FD, group)
    if kind == "ternary":
        return pack_ternary(w_FD.sign(), *ternary.choose_mask(w_FD, group), group)
    highest_F1 = reduce_max(w_FD.abs().amax(1, keepdim=True))
    if kind in ("int8", "int8_dynamic"):
        # Divide by a tensor: dividing by a number, a GPU multiplies by the reciprocal, which changes the last bit.
        scale_F1 = highest_F1.clamp(min=MIN_RANGE) / highest_F1.new_tensor(127.0)
        values_FD = (w_FD / scale_F1).round().clamp(-127, 127).to(torch.int8).contiguous()
        return Quantised(kind, values_FD, scale_F1, w_FD.shape[1], w_FD.shape[1])
    inverse_F1 = power_of_two_scale(highest_F1, FLOAT8)
    values_FD = (w_FD * inverse_F1).to(FLOAT8).contiguous()
    scale_F1 = inverse_F1.reciprocal() + 0 * highest_F1  # not finite for a row that is not finite
    return Quantised(kind, values_FD, scale_F1, w_FD.shape[1], w_FD.shape[1])


def stored_bytes(outputs: int, inputs: int, kind: Kind, group: int, scale_bytes: int = 2) -> int:
    """Bytes of a matrix quantised to ``kind``; ``scale_bytes``: of one number of an int4 group."""
    if kind == "int4":
        return outputs * -(-inputs // group) * (group // 2 + 2 * scale_bytes)
    if kind == "ternary":
        return outputs * (-(-inputs // group) * 2 + 2)
    return outputs * (inputs + 4)


def power_of_two_scale(highest: Tensor, kind: torch.dtype) -> Tensor:
    """The largest power of two that scales ``highest`` into the range of the format ``kind``."""
    ratio = torch.finfo(kind).max / highest.float().clamp(min=MIN_RANGE)
    return (ratio.view(torch.int32) & EXPONENT).view(torch.float32)


def _quantise_int4(w_FD: Tensor, group: int) -> Quantised:
    inputs = w_FD.shape[1]
    w = F.pad(w_FD, (0, -inputs % group)).unflatten(1, (-1, group))
    low, high = w.amin(2, keepdim=True).clamp(max=0), w.amax(2, keepdim=True).clamp(min=0)
    scale = ((high - low).clamp(min=MIN_RANGE) / w_FD.new_tensor(15.0)).bfloat16()
    low = low.bfloat16()
    q = ((w - low.float()) / scale.float()).round().clamp(0, 15).nan_to_num().to(torch.int32)
    return Quantised("int4", pack_int4(q.flatten(1), group), torch.cat((scale, low), 2), inputs, group)


def pack_ternary(trits_FD: Tensor, allowed_FD: Tensor, scale_F1: Tensor, group: int) -> Quantised:
    """The matrix of ``trits_FD``, 0 where they are not allowed, times ``scale_F1``."""
    words = ternary.encode(torch.where(allowed_FD, trits_FD.nan_to_num(), 0), group)
    return Quantised("ternary", words, scale_F1.bfloat16(), trits_FD.shape[1], group)


def pack_int4(q_FD: Tensor, group: int) -> Tensor:
    """Words of int4 values 0 … 15, int32 (…, D), whose last group is padded with zeros."""
    q = F.pad(q_FD, (0, -q_FD.shape[-1] % group)).unflatten(-1, (-1, group))
    words = group // INT4_PER_WORD
    packed = q.new_zeros(*q.shape[:-1], words)
    for i, part in enumerate(q.split(words, -1)):
        packed |= part << 4 * i
    return packed.flatten(-2)


def unpack_int4(weight: Quantised) -> Tensor:
    """The int4 values 0 … 15 of ``weight``, int32 (…, D)."""
    weight = to_rows(weight)
    words = weight.values.unflatten(-1, (-1, weight.group // INT4_PER_WORD))
    q = torch.stack([words >> 4 * i & 15 for i in range(INT4_PER_WORD)], -2)
    return q.flatten(-3)[..., : weight.inputs]


def int4_scales(scale: Tensor, low: Tensor) -> Tensor:
    """s and m of int4 groups, float32 (…, groups) each, as a :class:`Quantised` stores them: without rounding."""
    wide = torch.stack((scale, low), -1).float()
    narrow = wide.bfloat16()
    return narrow if torch.equal(narrow.float(), wide) else wide


def dequantise(weight: Quantised, dtype: torch.dtype, rows: slice = slice(None)) -> Tensor:
    """Dequantises some rows of ``weight``, rounded to ``dtype``; computed in float32 or float64."""
    weight = to_rows(weight)
    values, scales = weight.values[rows], weight.scales[rows]
    wide = torch.promote_types(dtype, torch.float32)
    if weight.kind == "ternary":
        return ternary.decode(values, weight.group, weight.inputs, wide).mul_(scales.to(wide)).to(dtype)
    if weight.has_int8_groups:
        scales = scales.repeat_interleave(weight.group, 1)[:, : weight.inputs]
    if weight.kind != "int4":
        return to_float(values, wide).mul_(scales.to(wide)).to(dtype)
    words = values.unflatten(1, (-1, weight.group // INT4_PER_WORD))
    q = torch.empty(*words.shape[:2], INT4_PER_WORD, words.shape[2], dtype=wide, device=words.device)
    for i in range(INT4_PER_WORD):
        q[:, :, i] = (words >> 4 * i).bitwise_and_(15)
    # q s is exact (4 bits times 8, 11 or 12 bits), so only the sum is rounded, here as in a fused multiply-add.
    w = q.flatten(2).mul_(scales[..., :1].to(wide)).add_(scales[..., 1:].to(wide))
    return w.flatten(1)[:, : weight.inputs].to(dtype)


# -- blocks of outputs -------------------------------------------------------------------------------------------------


def can_block(weight: Quantised) -> bool:
    """Whether :func:`to_blocks` can store ``weight``."""
    if weight.kind == "int4":
        fits = weight.group in (32, 64, 128) and not weight.has_wide_scales
    else:
        fits = weight.kind in ("int8", "int8_dynamic") and weight.inputs % 4 == 0 and not weight.has_int8_groups
    return fits and weight.outputs % BLOCK == 0


def to_blocks(weight: Quantised) -> Quantised:
    """``weight``, or a stack, with the same inputs of 16 outputs adjacent, in new tensors of the same shapes.

        int8   values [F/16][D/4][16][4]          scales as before
        int4   bytes [F/16][D/8][16][4]: input 8 k + c in the low nibble, 8 k + 4 + c in the high one
               scales [F/16][groups][16][2]

    Each vector lane of ``kernels/cpu/skinny_gemm_blocked.h`` is one output: its sums need no sum across lanes.
    """
    assert not weight.blocked
    values, scales = weight.values, weight.scales
    if weight.kind != "int4":
        quads = values.unflatten(-1, (-1, 4)).unflatten(-3, (-1, BLOCK))  # (…, F/16, 16, D/4, 4)
        return weight._replace(values=quads.transpose(-2, -3).reshape(values.shape), blocked=True)
    # Byte b of word c of a group of G inputs has input 2 b G/8 + c in its low nibble, (2 b + 1) G/8 + c in the high.
    words = weight.group // INT4_PER_WORD
    rows = values.view(torch.uint8).unflatten(-1, (-1, words, 4))
    inputs = torch.stack((rows & 15, rows >> 4), -1).movedim(-3, -1).flatten(-4)  # (…, F, D)
    pairs = inputs.unflatten(-1, (-1, 2, 4))
    packed = (pairs[..., 0, :] | pairs[..., 1, :] << 4).unflatten(-3, (-1, BLOCK)).transpose(-2, -3).contiguous()
    blocks = scales.unflatten(-3, (-1, BLOCK)).transpose(-2, -3).reshape(scales.shape)
    return weight._replace(values=packed.flatten().view(torch.int32).view(values.shape), scales=blocks, blocked=True)


def to_rows(weight: Quantised) -> Quantised:
    """The inverse of :func:`to_blocks`; ``weight`` itself if it is stored in rows."""
    if not weight.blocked:
        return weight
    values, scales = weight.values, weight.scales
    if weight.kind != "int4":
        quads = values.reshape(*values.shape[:-2], weight.outputs // BLOCK, -1, BLOCK, 4)
        return weight._replace(values=quads.transpose(-2, -3).reshape(values.shape), blocked=False)
    words = weight.group // INT4_PER_WORD
    packed = values.view(torch.uint8).reshape(*values.shape[:-2], weight.outputs // BLOCK, -1, BLOCK, 4)
    rows = packed.transpose(-2, -3).flatten(-4, -3)  # (…, F, D/8, 4)
    inputs = torch.stack((rows & 15, rows >> 4), -2).flatten(-3).unflatten(-1, (-1, 4, 2, words))
    stored = (inputs[..., 0, :] | inputs[..., 1, :] << 4).transpose(-1, -2).contiguous()
    pairs = scales.reshape(*scales.shape[:-3], weight.outputs // BLOCK, -1, BLOCK, 2)
    return weight._replace(
        values=stored.flatten().view(torch.int32).view(values.shape),
        scales=pairs.transpose(-2, -3).reshape(scales.shape),
        blocked=False,
    )


# -- inputs ------------------------------------------------------------------------------------------------------------

X_GROUP = 32
"""Inputs that share a scale when a row of x is rounded for int8 weights."""


def round_inputs(x: Tensor, group: int = X_GROUP) -> Tensor:
    """``x`` (…, D) rounded to int8 with a scale for each ``group`` inputs of a row, dequantised."""
    wide = torch.promote_types(x.dtype, torch.float32)
    padded = F.pad(x.to(wide), (0, -x.shape[-1] % group)).unflatten(-1, (-1, group))
    most = padded.abs().amax(-1, keepdim=True)
    inverse = torch.where(most < 1e-30, 0.0, 127 / most)
    rounded = (padded * inverse).round() * (most / 127)
    return rounded.flatten(-2)[..., : x.shape[-1]].to(x.dtype)


def to_float(values: Tensor, wide: torch.dtype) -> Tensor:
    """int8 or float8 ``values`` converted to float32 or float64, as a new tensor."""
    if values.dtype != FLOAT8 or values.device.type != "cpu":
        return values.to(wide)
    # torch's own conversion on a CPU takes 3.1 ns per value, this 0.3. The bits of an e4m3 value in the corresponding
    # places of a float16 are that value times 2^-8, since exponent biases are 7 and 15; subnormal values too.
    bits = values.view(torch.int8).to(torch.int16).bitwise_left_shift_(7).bitwise_and_(-0x4080)
    return bits.view(torch.float16).to(wide).mul_(256)
