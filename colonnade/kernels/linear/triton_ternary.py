"""Products of a few rows with ternary weights in Triton, for single matrices and for the experts of a decode step.

    y_r = s ⊙ Σ_words Σ_(j < k) ± x[n · word + place_j]            k of n weights of a word are not 0

A table has the positions and signs of each word's nonzero weights, a byte each (:func:`position_table`), so a word
takes k loads of x and k additions instead of n of each. The lanes of a warp read the same word of 32 outputs: all their
positions are then within the n inputs of this word, 36 to 64 bytes, which one access of the level-1 cache reads. Each
row of x has its own program: rows share nothing but the caches, and their results do not depend on each other.

On a Hopper GPU most products take the kernel in CUDA C++ (:mod:`~colonnade.kernels.linear.cuda_ternary`), with its
tables in shared memory.

``TWO_LEVELS``: three tables of 88 KB replace one of 256 KB. Words ascend as numbers, so words with the same last
position and sign are consecutive; within such a block they are ordered by the positions before it. The first table has
the block of each word, the second where each block begins, the third the other positions by the word's number in its
block.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton import language as tl

from colonnade.kernels.experts.triton_activation import activate
from colonnade.kernels.linear import cuda_ternary, ternary
from colonnade.kernels.linear.quantise import Quantised
from colonnade.kernels.triton_constants import constexprs

MAX_ROWS = 64
"""Rows up to which these kernels are used."""
BN, FEW_BLOCKS = 32, 256
"""Outputs of a program, a warp's lanes; blocks of outputs below which inputs are split more."""
TWO_LEVEL_WORDS = 1 << 22
"""Words of a matrix from which the tables of two levels are faster: they fill the level-1 caches sooner, with 88 KB."""
PRESENT, NEGATIVE = 32, 128
"""Bits of a byte of :func:`position_table`; the lower five are the position."""


class Matrix(NamedTuple):
    """Pointers to one or more ternary matrices: units of words, scales, bias."""

    units: Any
    scales: Any
    bias: Any


class Tables(NamedTuple):
    """Pointers to lookup tables."""

    places: Any
    """:func:`position_table`, or the last table of :func:`two_level_tables`."""
    blocks: Any
    starts: Any


class Tiles(NamedTuple):
    """How a program computes: BN outputs in S splits of the inputs, UNROLL units at a time."""

    BN: int
    S: int
    UNROLL: int
    warps: int
    two_levels: bool = False


class Constants(NamedTuple):
    """Compile-time constants of :func:`ternary_kernel`."""

    BN: int
    S: int
    UNROLL: int
    PER: int
    """Words in a unit: 4 (int64), 2 (int32) or 1 (int16)."""
    TRITS: int
    COUNT: int
    """k."""
    TWO_LEVELS: bool
    E_PAD: int = 0
    """A power of two of at least E; 0 for a single matrix."""
    TOKENS: bool = False
    """Whether rows of x are tokens, looked up through ``order``."""
    GATED: bool = False
    ACT: str = ""
    BIASED: bool = False
    WEIGHTED: bool = False
    """Whether rows are multiplied by their choices' routing weights."""


@functools.cache
def position_table(trits: int, device: torch.device | str = "cpu") -> Tensor:
    """int32 (65536,): ascending positions of each word's nonzero weights; a byte has :data:`PRESENT` and the sign."""
    return _position_bytes(ternary.table(trits), trits).to(device)


@functools.cache
def two_level_tables(trits: int, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
    """The tables of two levels.

    uint8 (65536,): the block of each word. int32 (128,): each block's first word, and 2¹⁶ times the byte of its last
    position. int32: as :func:`position_table`, without the last position, by the word's number in its block.
    """
    codes = ternary.table(trits)[: ternary.word_count(trits)]
    entries = _position_bytes(codes, trits)
    count = sum((entries >> 8 * j & PRESENT != 0).int() for j in range(4))
    assert isinstance(count, Tensor)
    last = torch.where(count > 0, entries >> 8 * (count - 1).clamp(min=0) & 255, 0)
    new = torch.cat((torch.ones(1, dtype=torch.bool), last[1:] != last[:-1]))
    block = torch.zeros(ternary.TABLE_WORDS, dtype=torch.uint8)
    block[: len(codes)] = (new.cumsum(0) - 1).to(torch.uint8)
    first = new.nonzero().flatten()
    starts = torch.zeros(128, dtype=torch.int32)
    starts[: len(first)] = (first | last[first] << 16).int()
    rest = entries[(count < ternary.NONZERO[trits]) & (codes >= 0)]  # the last of 32 trits has the sign bit
    return block.to(device), starts.to(device), rest.to(device)


def _position_bytes(codes: Tensor, trits: int) -> Tensor:
    found, count = torch.zeros_like(codes), torch.zeros_like(codes)
    for i in range(trits):
        trit = codes >> 2 * i & 3
        byte = i + PRESENT + NEGATIVE * (trit == 2).long()
        found += torch.where(trit != 0, byte << 8 * count, 0)
        count += (trit != 0).long()
    return torch.where(found >= 1 << 31, found - (1 << 32), found).int()


@triton.jit
def _load_term(byte, x_row, at, inputs):
    """± x for one byte of a table entry; 0 if its weight is absent."""
    d = at + (byte & 31)
    x = tl.load(x_row + d, ((byte & 32) != 0) & (d < inputs), 0.0).to(tl.float32)
    return tl.where((byte & 128) != 0, -x, x)


@triton.jit
def _sum_word(word, x_row, at, inputs, tables, C: tl.constexpr):
    """Σ ± x of a word whose first input is ``at``."""
    if C.TWO_LEVELS:
        start = tl.load(tables.starts + tl.load(tables.blocks + word).to(tl.int32))
        total = _load_term(start >> 16, x_row, at, inputs)
        rest = tl.load(tables.places + (word - (start & 0xFFFF)))
        for j in tl.static_range(C.COUNT - 1):
            total += _load_term(rest >> (8 * j), x_row, at, inputs)
        return total
    code = tl.load(tables.places + word)
    total = _load_term(code, x_row, at, inputs)
    for j in tl.static_range(1, C.COUNT):
        total += _load_term(code >> (8 * j), x_row, at, inputs)
    return total


@triton.jit
def _sum_row(x_row, matrix, row, valid, inputs, units, tables, C: tl.constexpr):
    """Σ_d t_d x_d (BN,) of the rows ``row`` of a matrix, whose rows have ``units`` units."""
    step = tl.cdiv(units, C.S)
    start = tl.arange(0, C.S)[:, None] * step
    last = tl.minimum(start + step, units)
    w_row = matrix.units + (row * units)[None, :]
    total = tl.zeros([C.S, C.BN], tl.float32)
    for first in range(0, step, C.UNROLL):
        for i in tl.static_range(C.UNROLL):
            u = start + first + i
            inside = (u < last) & valid[None, :]
            unit, limit = tl.load(w_row + u, inside, 0), tl.where(inside, inputs, 0)  # word 0 is not always empty
            for j in tl.static_range(C.PER):
                word = (unit >> (16 * j)).to(tl.int32) & 0xFFFF
                total += _sum_word(word, x_row, (u * C.PER + j) * C.TRITS, limit, tables, C)
    return tl.sum(total, 0)


@triton.jit
def _scale_and_bias(y, matrix, row, valid, BIASED: tl.constexpr):
    y *= tl.load(matrix.scales + row, valid, 0.0).to(tl.float32)
    if BIASED:
        y += tl.load(matrix.bias + row, valid, 0.0).to(tl.float32)
    return y


@triton.jit
def ternary_kernel(
    x_ptr, order_ptr, ends_ptr, weights_ptr, matrix, gate, y_ptr, outputs, inputs, E, stride, active, units, tables,
    C: tl.constexpr,
):  # fmt: skip
    """y (rows, outputs), of a row of x by a matrix; with experts, by that of the row's expert."""
    f, r = tl.program_id(0) * C.BN + tl.arange(0, C.BN), tl.program_id(1)
    valid = f < outputs
    expert, x_at = 0, r
    if C.E_PAD > 0:
        e = tl.arange(0, C.E_PAD)
        expert = tl.sum((tl.load(ends_ptr + e, e < E, 2147483647) <= r).to(tl.int32), 0)
        if expert >= E:
            return
        if C.TOKENS:
            x_at = (tl.load(order_ptr + r) // active).to(tl.int32)
    row = expert * outputs.to(tl.int64) + f
    x_row = x_ptr + x_at.to(tl.int64) * stride
    y = _scale_and_bias(_sum_row(x_row, matrix, row, valid, inputs, units, tables, C), matrix, row, valid, C.BIASED)
    if C.GATED:
        a = _scale_and_bias(_sum_row(x_row, gate, row, valid, inputs, units, tables, C), gate, row, valid, C.BIASED)
        y *= activate(a, C.ACT)[0]
    elif C.ACT != "":
        y = activate(y, C.ACT)[0]
    if C.WEIGHTED:
        y *= tl.load(weights_ptr + tl.load(order_ptr + r)).to(tl.float32)
    tl.store(y_ptr + r.to(tl.int64) * outputs + f, y.to(y_ptr.dtype.element_ty), valid)


def select_tiles(weight: Quantised) -> Tiles:
    """Measured on an H200 for words of 18 weights; the splits are for enough warps where outputs are few.

    The number of rows does not matter: a row's sums have one order.
    """
    blocks = triton.cdiv(weight.outputs, BN)
    if weight.group == 18 and blocks * weight.values.shape[-1] >= TWO_LEVEL_WORDS // BN:
        return Tiles(BN, 4, 1, 4, two_levels=True)
    splits = 16 if blocks < FEW_BLOCKS else 8
    return Tiles(BN, splits, 2, splits)


def linear(x_TD: Tensor, weight: Quantised, tiles: Tiles | None = None) -> Tensor:
    """y_TF (see :func:`reference.quantised_linear`); with ``tiles``, this kernel instead of the one in CUDA C++."""
    y_TF = x_TD.new_empty(len(x_TD), weight.outputs)
    _launch(x_TD, weight, y_TF, tiles=tiles)
    return y_TF


def routed_rows(
    x_TD: Tensor,
    order_R: Tensor,
    ends_E: Tensor,
    weights_TA: Tensor,
    weights: Sequence[Quantised | Tensor | None],
    activation: str,
    tiles: Tiles | None = None,
) -> Tensor:
    """Rows w_r (W_down h_r + b) of the choices in ``order``; those past the last end are not written.

    ``weights`` are :class:`~colonnade.kernels.experts.quantised.QuantisedWeights`. Does not synchronise with the
    device.
    """
    up, down, gate, up_b, gate_b, down_b = weights
    assert isinstance(up, Quantised)
    assert isinstance(down, Quantised)
    R = len(order_R)
    h, y = x_TD.new_empty(R, up.outputs), x_TD.new_empty(R, down.outputs)
    _launch(
        x_TD, up, h, tiles=tiles, order=order_R, ends=ends_E, active=weights_TA.shape[1],
        bias=up_b, gate=gate, gate_bias=gate_b, activation=activation,
    )  # fmt: skip
    _launch(h, down, y, tiles=tiles, order=order_R, ends=ends_E, bias=down_b, routing=weights_TA)
    return y


def _launch(
    x: Tensor,
    matrix: Quantised,
    y: Tensor,
    *,
    tiles: Tiles | None,
    order: Tensor | None = None,
    ends: Tensor | None = None,
    active: int = 0,
    bias: Any = None,
    gate: Any = None,
    gate_bias: Any = None,
    routing: Tensor | None = None,
    activation: str = "",
) -> None:
    if not y.numel():
        return
    options: cuda_ternary.Routing = {
        "order": order, "ends": ends, "gate": gate, "routing": routing, "activation": activation
    }  # fmt: skip
    if tiles is None and bias is None and gate_bias is None and cuda_ternary.supports(x, matrix, **options):
        cuda_ternary.launch(x, matrix, y, active=active, **options)
        return
    tiles = tiles or select_tiles(matrix)
    words, trits = matrix.values.shape[-1], matrix.group
    per = 4 if words % 4 == 0 else 2 if words % 2 == 0 else 1
    dtype = {4: torch.int64, 2: torch.int32, 1: torch.int16}[per]
    if tiles.two_levels:
        block, starts, entries = two_level_tables(trits, x.device)
        tables = Tables(entries, block, starts)
    else:
        tables = Tables(position_table(trits, x.device), None, None)
    constants = Constants(
        tiles.BN, tiles.S, tiles.UNROLL, per, trits, ternary.NONZERO[trits], tiles.two_levels,
        E_PAD=0 if ends is None else triton.next_power_of_2(len(ends)), TOKENS=active > 0, GATED=gate is not None,
        ACT=activation, BIASED=bias is not None, WEIGHTED=routing is not None,
    )  # fmt: skip

    def pointers(part: Quantised | None, its_bias: Tensor | None) -> Matrix:
        return Matrix(None, None, None) if part is None else Matrix(part.values.view(dtype), part.scales, its_bias)

    ternary_kernel[triton.cdiv(matrix.outputs, tiles.BN), len(y)](
        x, order, ends, routing, pointers(matrix, bias), pointers(gate, gate_bias), y, matrix.outputs, matrix.inputs,
        0 if ends is None else len(ends), x.stride(0), max(1, active), words // per, tables, constexprs(constants),
        num_warps=tiles.warps,
    )  # fmt: skip
