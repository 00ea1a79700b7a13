"""Weights of 8 or 4 bits: how they are made, what they mean.

    int8     w ≈ q s          q in −127 … 127; one s a row (an output), float32
    int4     w ≈ q s + m      q in 0 … 15; s and m for each group of 32, 64 or 128 inputs of a row, bfloat16
    float8   w ≈ q s          q in e4m3; one s a row, a power of two (:mod:`float8` says why)

Four bits go eight to a word of int32: bits 4i … 4i+3 of word c of a group of G are its input i·G/8 + c, so that one
shift of a run of words gives a run of neighbouring inputs. The last group of a row is filled up with zeros. A group's
range always contains 0, which keeps m within 15 s of it, and q is rounded against s and m as they are stored: no weight
moves by more than 0.6 s.

All arithmetic is float32's whatever the weights' type. Where a row is cut over ranks, ``over`` takes the largest number
among them: then a weight's bits do not depend on the layout. (Groups belong to one rank each: see
:mod:`colonnade.config.feature_checks`.)
"""

from collections.abc import Callable
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from colonnade.errors import ConfigError

Kind = Literal["int8", "int4", "float8"]
KINDS = get_args(Kind)
FLOAT8 = torch.float8_e4m3fn
INT4_PER_WORD = 8
"""Weights in a word."""
SMALLEST = 2.0**-100
"""Of a maximum: keeps the scale of a row of zeros finite, and products of two scales within float32."""
EXPONENT = 0x7F800000
"""The exponent's bits of a float32: what is left of a positive number when it is rounded down to a power of two."""


class Quantised(NamedTuple):
    """A matrix of F outputs and D inputs; or a stack of E of them, whose tensors have E in front."""

    kind: Kind
    values: Tensor
    """int8 or float8 (F, D); int4's words (F, groups · G / 8)."""
    scales: Tensor
    """(F, 1) float32; of int4 (F, groups, 2) bfloat16: s and m."""
    inputs: int
    """D."""
    group: int
    """G; D where there are no groups."""

    @property
    def outputs(self) -> int:
        """F."""
        return self.values.shape[-2]

    def of(self, e: int) -> "Quantised":
        """One matrix of a stack."""
        return self._replace(values=self.values[e], scales=self.scales[e])

    @property
    def nbytes(self) -> int:
        """Memory that it takes [bytes]."""
        return self.values.nbytes + self.scales.nbytes


def _itself(x: Tensor) -> Tensor:
    return x


def quantise(weight_FD: Tensor, kind: Kind, group: int = 64, over: Callable[[Tensor], Tensor] = _itself) -> Quantised:
    """``weight_FD`` in ``kind``; numbers that are not finite give scales that are not.

    Raises :class:`ConfigError` for a ``kind`` that there is not.
    """
    if kind not in KINDS:
        raise ConfigError(f"there are no weights in {kind!r}; use {', '.join(KINDS[:-1])} or {KINDS[-1]}")
    w_FD = weight_FD.float()
    if kind == "int4":
        return _in_groups(w_FD, group)
    highest_F1 = over(w_FD.abs().amax(1, keepdim=True))
    if kind == "int8":
        # Divided by a tensor: by a number a GPU multiplies with its reciprocal, and the last bit is another.
        scale_F1 = highest_F1.clamp(min=SMALLEST) / highest_F1.new_tensor(127.0)
        values_FD = (w_FD / scale_F1).round().clamp(-127, 127).to(torch.int8)
        return Quantised(kind, values_FD, scale_F1, w_FD.shape[1], w_FD.shape[1])
    up_F1 = power_of_two_scale(highest_F1, FLOAT8)
    values_FD = (w_FD * up_F1).to(FLOAT8)
    scale_F1 = up_F1.reciprocal() + 0 * highest_F1  # no finite scale for a row that is not finite
    return Quantised(kind, values_FD, scale_F1, w_FD.shape[1], w_FD.shape[1])


def stored_bytes(outputs: int, inputs: int, kind: Kind, group: int) -> int:
    """Memory of such a matrix in ``kind`` [bytes]."""
    if kind == "int4":
        return outputs * -(-inputs // group) * (group // 2 + 4)
    return outputs * (inputs + 4)


def power_of_two_scale(highest: Tensor, kind: torch.dtype) -> Tensor:
    """The power of two that brings ``highest`` just within what the format ``kind`` holds."""
    room = torch.finfo(kind).max / highest.float().clamp(min=SMALLEST)
    return (room.view(torch.int32) & EXPONENT).view(torch.float32)


def _in_groups(w_FD: Tensor, group: int) -> Quantised:
    inputs, words = w_FD.shape[1], group // INT4_PER_WORD
    w = F.pad(w_FD, (0, -inputs % group)).unflatten(1, (-1, group))
    low, high = w.amin(2, keepdim=True).clamp(max=0), w.amax(2, keepdim=True).clamp(min=0)
    scale = ((high - low).clamp(min=SMALLEST) / w_FD.new_tensor(15.0)).bfloat16()
    low = low.bfloat16()
    q = ((w - low.float()) / scale.float()).round().clamp(0, 15).nan_to_num().to(torch.int32)
    packed = q.new_zeros(*q.shape[:2], words)
    for i, part in enumerate(q.split(words, 2)):
        packed |= part << 4 * i
    return Quantised("int4", packed.flatten(1), torch.cat((scale, low), 2), inputs, group)


def dequantise(weight: Quantised, dtype: torch.dtype, rows: slice = slice(None)) -> Tensor:
    """Some rows of the matrix that ``weight`` stands for, rounded to ``dtype``; reckoned in float32 at least."""
    values, scales = weight.values[rows], weight.scales[rows]
    fine = torch.promote_types(dtype, torch.float32)
    if weight.kind != "int4":
        return to_float(values, fine).mul_(scales.to(fine)).to(dtype)
    words = values.unflatten(1, (-1, weight.group // INT4_PER_WORD))
    q = torch.empty(*words.shape[:2], INT4_PER_WORD, words.shape[2], dtype=fine, device=words.device)
    for i in range(INT4_PER_WORD):
        q[:, :, i] = (words >> 4 * i).bitwise_and_(15)
    # q s is exact, 4 bits times 8: so that what is rounded is the sum alone, here as where both are one instruction.
    w = q.flatten(2).mul_(scales[..., :1].to(fine)).add_(scales[..., 1:].to(fine))
    return w.flatten(1)[:, : weight.inputs].to(dtype)


def to_float(values: Tensor, fine: torch.dtype) -> Tensor:
    """int8 or float8 ``values`` as they are, in float32 or float64: a new tensor."""
    if values.dtype != FLOAT8 or values.device.type != "cpu":
        return values.to(fine)
    # torch's own conversion on a CPU takes 3.1 ns a number, this 0.3. Its bits, put where those of a float16 are, make
    # the number times 2^-8, since exponents are counted from 7 here and from 15 there; small numbers without one too.
    bits = values.view(torch.int8).to(torch.int16).bitwise_left_shift_(7).bitwise_and_(-0x4080)
    return bits.view(torch.float16).to(fine).mul_(256)
