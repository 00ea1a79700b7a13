"""Grids: the values that a quantised matrix can have, chosen before its weights are rounded.

    affine      w ≈ q s + m           q in 0 … 15; s and m bfloat16; the range contains 0
    zero        w ≈ (q − z) s         z in 0 … 15, integer; s bfloat16
    symmetric   w ≈ (q − 8) s         q − 8 in −8 … 7; s bfloat16
    row         w ≈ q s               int8 and float8: one s per row

int4 has a grid per group of G inputs. Given the importance of each input, a group takes the best of :data:`SHRINKS` of
its range by Σ_d h_d (w_d − ŵ_d)²: clipping the largest weights leaves finer steps for the others.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from colonnade.kernels.linear.gptq_columns import Rounding, round_values
from colonnade.kernels.linear.quantise import (
    FLOAT8,
    MIN_RANGE,
    Kind,
    Quantised,
    int4_scales,
    pack_int4,
    power_of_two_scale,
)

GridKind = Literal["affine", "zero", "symmetric"]

SHRINKS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7)
"""Shares of a group's range that are tried."""


class Range(NamedTuple):
    """Scale and low value of each group, float32 (F, groups)."""

    scale: Tensor
    low: Tensor


@dataclass(frozen=True)
class Grid:
    """The grid of a matrix (F, D)."""

    kind: Kind
    group: int
    """Inputs of a group; D without groups."""
    scale_FG: Tensor
    low_FG: Tensor

    def round(self, w_FC: Tensor, groups_C: Tensor) -> Tensor:
        """q of columns that belong to ``groups_C``, as float32."""
        return round_values(w_FC, self.rounding(groups_C))

    def rounding(self, groups_C: Tensor) -> Rounding:
        """The possible values of the weights of columns that belong to ``groups_C``."""
        kind = "int8" if self.kind == "int8_dynamic" else self.kind
        return Rounding(kind, self.scale_FG[:, groups_C], self.low_FG[:, groups_C] if kind == "int4" else None)

    def value(self, q_FC: Tensor, groups_C: Tensor) -> Tensor:
        """The weights that ``q_FC`` represents."""
        return q_FC * self.scale_FG[:, groups_C] + self.low_FG[:, groups_C]

    def pack(self, q_FD: Tensor) -> Quantised:
        """The matrix in the form that kernels read."""
        inputs = q_FD.shape[1]
        if self.kind == "int4":
            words = pack_int4(q_FD.to(torch.int32), self.group)
            return Quantised("int4", words, int4_scales(self.scale_FG, self.low_FG), inputs, self.group)
        values = q_FD.to(FLOAT8 if self.kind == "float8" else torch.int8).contiguous()
        return Quantised(self.kind, values, self.scale_FG, inputs, inputs)

    def groups(self, columns_C: Tensor) -> Tensor:
        """The group of each column."""
        return columns_C // self.group


def choose_grid(w_FD: Tensor, kind: Kind, group: int, grid: GridKind = "affine", importance_D: Tensor | None = None):
    """The :class:`Grid` of ``w_FD``, float32: its whole range, or with ``importance_D`` the best part of it."""
    if kind != "int4":
        highest_F1 = w_FD.abs().amax(1, keepdim=True)
        if kind == "float8":
            scale = power_of_two_scale(highest_F1, FLOAT8).reciprocal()
        else:
            scale = highest_F1.clamp(min=MIN_RANGE) / highest_F1.new_tensor(127.0)
        return Grid(kind, w_FD.shape[1], scale + 0 * highest_F1, torch.zeros_like(scale))
    w = F.pad(w_FD, (0, -w_FD.shape[1] % group)).unflatten(1, (-1, group))
    low, high = w.amin(2).clamp(max=0), w.amax(2).clamp(min=0)
    make = _RANGES[grid]
    best = make(low, high)
    if importance_D is None:
        return Grid(kind, group, *best)
    weight = F.pad(importance_D.float(), (0, -len(importance_D) % group)).view(1, -1, group)

    def error(of: Range) -> Tensor:
        q = ((w - of.low[..., None]) / of.scale[..., None]).round().clamp(0, 15)
        return ((q * of.scale[..., None] + of.low[..., None] - w).square() * weight).sum(2)

    least = error(best)
    for shrink in SHRINKS[1:]:
        tried = make(low * shrink, high * shrink)
        now = error(tried)
        better = now < least
        best = Range(*(torch.where(better, new, old) for new, old in zip(tried, best, strict=True)))
        least = torch.where(better, now, least)
    return Grid(kind, group, *best)


def _affine(low: Tensor, high: Tensor) -> Range:
    scale = ((high - low).clamp(min=MIN_RANGE) / low.new_tensor(15.0)).bfloat16().float()
    return Range(scale, low.bfloat16().float())


def _zero(low: Tensor, high: Tensor) -> Range:
    scale = ((high - low).clamp(min=MIN_RANGE) / low.new_tensor(15.0)).bfloat16().float()
    return Range(scale, -(-low / scale).round().clamp(0, 15) * scale)


def _symmetric(low: Tensor, high: Tensor) -> Range:
    scale = (torch.maximum(-low / 8, high / 7).clamp(min=MIN_RANGE)).bfloat16().float()
    return Range(scale, -8 * scale)


_RANGES: dict[GridKind, Callable[[Tensor, Tensor], Range]] = {
    "affine": _affine,
    "zero": _zero,
    "symmetric": _symmetric,
}
