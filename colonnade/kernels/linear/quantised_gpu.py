"""y = x Wᵀ + b with a quantised W on a GPU (see :mod:`~colonnade.kernels.linear.reference`), by the number of rows.

    1            a multiplication and an addition a weight: reading decides          thin    (triton_quantised.py)
    to 64        on the matrix units, weights widened in registers                   tiles
    more         float8 with x in float8 too, a scale a row: the float8 matrix units (as training's float8)
                 else W is written out once, for a plain product of many rows

So float8's prompts round x to e4m3 and its single tokens do not: what is near a tie may fall otherwise.
"""

# pyright: reportCallIssue=false, reportArgumentType=false
# A kernel is launched with more than its signature says, and its constants are plain numbers.

from typing import NamedTuple

import torch
import triton
from torch import Tensor
from torch.nn import functional as F

from colonnade.kernels.device import multiprocessors
from colonnade.kernels.linear import scaled_mm, triton_quantised
from colonnade.kernels.linear.quantise import NIBBLES, Quantised, upscale

MATRIX = 64
"""The most rows that are read at the speed of memory."""


class Tiles(NamedTuple):
    """How a kernel is cut up."""

    outputs: int
    columns: int
    """Stored ones, a step: words of eight for int4."""
    warps: int
    stages: int


CHOSEN = {
    ("thin", "int4"): Tiles(32, 64, 4, 3),
    ("thin", "int8"): Tiles(32, 256, 4, 3),
    ("thin", "float8"): Tiles(32, 256, 4, 3),
    ("tiles", "int4"): Tiles(64, 16, 4, 4),
    ("tiles", "int8"): Tiles(64, 128, 4, 4),
    ("tiles", "float8"): Tiles(64, 128, 4, 4),
}
"""Reckoned, not measured: ``python benchmarks/quantised_linear.py`` measures them."""
PROGRAMS = 4
"""A multiprocessor, at least, before inputs are cut."""


def linear(x_TD: Tensor, weight: Quantised, bias_F: Tensor | None = None) -> Tensor:
    """y_TF (see :func:`quantised.linear`)."""
    x = x_TD if x_TD.dim() == 2 else x_TD.reshape(-1, weight.inputs)
    if len(x) > MATRIX or not x.numel():
        y = _in_float8(x, weight) if _fits_float8(x, weight) else F.linear(x, written_out(weight, x.dtype))
    else:
        y = few_rows(x, weight)
    y = y if bias_F is None else y + bias_F
    return y if x_TD.dim() == 2 else y.view(*x_TD.shape[:-1], weight.outputs)


def few_rows(x_TD: Tensor, weight: Quantised, how: Tiles | None = None, splits: int | None = None) -> Tensor:
    """y_TF of 1 to :data:`MATRIX` rows, at the speed of reading; ``how`` cuts it up, where that is not chosen here."""
    T, outputs = len(x_TD), weight.outputs
    x_TD = x_TD if x_TD.stride(1) == 1 else x_TD.contiguous()
    name = "thin" if T == 1 else "tiles"
    how = how or CHOSEN[name, weight.kind]
    columns = weight.values.shape[1]
    blocks = triton.cdiv(outputs, how.outputs)
    most = triton.cdiv(columns, 2 * how.columns)
    splits = splits or max(1, min(most, PROGRAMS * multiprocessors(x_TD.device) // blocks))
    step = triton.cdiv(triton.cdiv(columns, splits), how.columns) * how.columns
    splits = triton.cdiv(columns, step)
    out = parts = x_TD.new_empty(T, outputs)
    if splits > 1:
        parts = x_TD.new_empty(splits, T, outputs, dtype=torch.float32)
    four = weight.kind == "int4"
    scales = weight.scales.view(torch.int32) if four else weight.scales
    groups, words = (weight.scales.shape[1], weight.group // NIBBLES) if four else (0, 1)
    sizes = (outputs, weight.inputs, columns, groups)
    kinds = {"KIND": weight.kind, "WORDS": words, "BN": how.outputs, "BK": how.columns}
    launch = {"num_warps": how.warps, "num_stages": how.stages}
    if name == "thin":
        triton_quantised.thin[blocks, splits](x_TD, weight.values, scales, parts, *sizes, step, **kinds, **launch)
    else:
        BM = max(16, triton.next_power_of_2(T))
        triton_quantised.tiles[blocks, splits](
            x_TD, weight.values, scales, parts, T, *sizes, x_TD.stride(0), step, BM=BM, **kinds, **launch
        )
    if splits > 1:
        triton_quantised.add[triton.cdiv(T * outputs, 1024),](parts, out, T * outputs, splits, BLOCK=1024)
    return out


def written_out(weight: Quantised, dtype: torch.dtype) -> Tensor:
    """The matrix that ``weight`` stands for (see :func:`quantise.dequantise`)."""
    out = weight.values.new_empty(weight.outputs, weight.inputs, dtype=dtype)
    columns = weight.values.shape[1]
    four = weight.kind == "int4"
    scales = weight.scales.view(torch.int32) if four else weight.scales
    groups, words = (weight.scales.shape[1], weight.group // NIBBLES) if four else (0, 1)
    BN, BK = (16, 64) if four else (16, 256)
    triton_quantised.widen[triton.cdiv(weight.outputs, BN), triton.cdiv(columns, BK)](
        weight.values, scales, out, weight.outputs, weight.inputs, columns, groups,
        KIND=weight.kind, WORDS=words, BN=BN, BK=BK, num_warps=4,
    )  # fmt: skip
    return out


def _fits_float8(x_TD: Tensor, weight: Quantised) -> bool:
    units = x_TD.is_cuda and torch.cuda.get_device_capability(x_TD.device) >= (9, 0)
    whole = weight.inputs % scaled_mm.MULTIPLE == weight.outputs % scaled_mm.MULTIPLE == 0
    return weight.kind == "float8" and units and whole and x_TD.dtype == torch.bfloat16 and x_TD.numel() > 0


def _in_float8(x_TD: Tensor, weight: Quantised) -> Tensor:
    up_T1 = upscale(x_TD.abs().amax(1, keepdim=True), weight.values.dtype)
    x8_TD = (x_TD * up_T1.to(x_TD.dtype)).to(weight.values.dtype)
    return scaled_mm.product(x8_TD, weight.values, up_T1.reciprocal(), weight.scales, x_TD.dtype)
