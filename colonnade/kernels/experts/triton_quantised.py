"""Experts with weight-only quantisation on a GPU: two grouped GEMM kernels and a sum.

    up      h_r = act(a) ⊙ u,  u = W_up x_t(r) + b, a = W_gate x_t(r) + b; gathers x, computes h in its epilogue
    down    y_r = w_r (W_down h_r + b)

Grouped as in :mod:`~colonnade.kernels.experts.triton_grouped_gemm`; weights are dequantised in registers as in
:mod:`colonnade.kernels.linear.triton_quantised`, at any number of rows: no dequantised copy is written, so prompts take
no more memory than single tokens. Both compute (W xᵀ), with a tile of weights on the left, since tensor cores can take
the left operand from registers, where the weights are dequantised. Quantised weights are read once per tile of an
expert's rows; a decode step has one tile per expert. :mod:`~colonnade.kernels.experts.triton_tile_schedule` defines the
order of tiles; rows past the last end are not written. Nothing synchronises with the device.

Ternary experts have separate kernels for a few rows (:mod:`~colonnade.kernels.linear.triton_ternary`), and the
reference for more.
"""

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton import language as tl

from colonnade.kernels import tuning
from colonnade.kernels.experts import quantised as reference
from colonnade.kernels.experts.quantised import QuantisedWeights
from colonnade.kernels.experts.tiles import GroupedTiles
from colonnade.kernels.experts.triton_activation import activate
from colonnade.kernels.experts.triton_tile_schedule import (
    count_tiles,
    expert_rows,
    grid_size,
    locate_tile,
    padded_experts,
)
from colonnade.kernels.linear import triton_ternary
from colonnade.kernels.linear.quantise import INT4_PER_WORD, Quantised
from colonnade.kernels.linear.triton_quantised import nibble, scale_and_low
from colonnade.kernels.triton_constants import constexprs
from colonnade.kernels.triton_permute import combine_rows, row_contiguous


class Matrices(NamedTuple):
    """Pointers of a stack of quantised matrices: stored values, scales, bias."""

    stored: Any
    scales: Any
    bias: Any


class Constants(NamedTuple):
    """Compile-time constants of the kernels."""

    BM: int
    BN: int
    BK: int
    GROUP: int
    E_PAD: int
    KIND: str
    WORDS: int
    """Words per int4 group."""
    GATED: bool = False
    BIASED: bool = False
    ACT: str = ""


@triton.jit
def _dot(x_ptr, x_at, x_valid, w_mat, v_mat, row, K, columns, groups, TWO: tl.constexpr, C: tl.constexpr):
    """(w xᵀ, v xᵀ), (BN, BM) each, for ``x_valid`` rows of x at offsets ``x_at`` and rows ``row`` of the weights.

    ``columns`` counts stored columns: inputs, or int32 words of eight int4 inputs.
    """
    k = tl.arange(0, C.BK)
    dtype = x_ptr.dtype.element_ty
    x_rows = x_ptr + x_at[None, :]
    w_rows = w_mat.stored + (row * columns)[:, None]
    v_rows = w_rows
    if TWO:
        v_rows = v_mat.stored + (row * columns)[:, None]
    acc_w = tl.zeros((C.BN, C.BM), tl.float32)
    acc_v = tl.zeros((C.BN, C.BM), tl.float32)
    for k0 in range(0, columns, C.BK):
        c = k0 + k
        valid = (c < columns)[None, :]
        w = tl.load(w_rows + c[None, :], valid, 0.0)
        v = w
        if TWO:
            v = tl.load(v_rows + c[None, :], valid, 0.0)
        if C.KIND == "int4":
            group = c // C.WORDS
            w_scale, w_low = scale_and_low(w_mat.scales, row[:, None], group[None, :], groups, valid)
            v_scale, v_low = w_scale, w_low
            if TWO:
                v_scale, v_low = scale_and_low(v_mat.scales, row[:, None], group[None, :], groups, valid)
            first = group * (8 * C.WORDS) + c % C.WORDS
            for i in tl.static_range(8):
                d = (first + i * C.WORDS)[:, None]
                x = tl.load(x_rows + d, x_valid[None, :] & (c < columns)[:, None] & (d < K), 0.0)
                acc_w = tl.dot((nibble(w, i) * w_scale + w_low).to(dtype), x, acc_w, input_precision="ieee")
                if TWO:
                    acc_v = tl.dot((nibble(v, i) * v_scale + v_low).to(dtype), x, acc_v, input_precision="ieee")
        else:
            x = tl.load(x_rows + c[:, None], x_valid[None, :] & (c < columns)[:, None], 0.0)
            acc_w = tl.dot(w.to(dtype), x, acc_w, input_precision="ieee")
            if TWO:
                acc_v = tl.dot(v.to(dtype), x, acc_v, input_precision="ieee")
    if C.KIND != "int4":
        acc_w *= tl.load(w_mat.scales + row)[:, None]
        if TWO:
            acc_v *= tl.load(v_mat.scales + row)[:, None]
    return acc_w, acc_v


@triton.jit
def quantised_up_kernel(
    x_ptr, order_ptr, ends_ptr, up, gate, h_ptr, D, F, E, stride, active, columns, groups, C: tl.constexpr
):
    """h (R, F) of the tokens of the choices in ``order``."""
    column_tiles = tl.cdiv(F, C.BN)
    first_e, tiles_e = count_tiles(ends_ptr, E, column_tiles, C.BM, C.E_PAD)
    for tile in range(tl.program_id(0), tl.sum(tiles_e, 0) * column_tiles, tl.num_programs(0)):
        expert, m, n = locate_tile(tile, first_e, tiles_e, column_tiles, C.E_PAD, C.GROUP)
        start, end = expert_rows(ends_ptr, expert)
        r = start + m * C.BM + tl.arange(0, C.BM)
        x_at = tl.load(order_ptr + r, r < end, 0).to(tl.int64) // active * stride
        f = n * C.BN + tl.arange(0, C.BN)
        row = expert.to(tl.int64) * F + tl.where(f < F, f, 0)
        u, a = _dot(x_ptr, x_at, r < end, up, gate, row, D, columns, groups, C.GATED, C)
        if C.BIASED:
            u += tl.load(up.bias + row).to(tl.float32)[:, None]
            if C.GATED:
                a += tl.load(gate.bias + row).to(tl.float32)[:, None]
        h = activate(a, C.ACT)[0] * u if C.GATED else activate(u, C.ACT)[0]
        at = r.to(tl.int64)[None, :] * F + f[:, None]
        tl.store(h_ptr + at, h.to(h_ptr.dtype.element_ty), (f < F)[:, None] & (r < end)[None, :])


@triton.jit
def quantised_down_kernel(
    h_ptr, order_ptr, ends_ptr, down, routing_ptr, y_ptr, F, D, E, columns, groups, C: tl.constexpr
):
    """y (R, D), each row times its routing weight."""
    column_tiles = tl.cdiv(D, C.BN)
    first_e, tiles_e = count_tiles(ends_ptr, E, column_tiles, C.BM, C.E_PAD)
    for tile in range(tl.program_id(0), tl.sum(tiles_e, 0) * column_tiles, tl.num_programs(0)):
        expert, m, n = locate_tile(tile, first_e, tiles_e, column_tiles, C.E_PAD, C.GROUP)
        start, end = expert_rows(ends_ptr, expert)
        r = start + m * C.BM + tl.arange(0, C.BM)
        d = n * C.BN + tl.arange(0, C.BN)
        row = expert.to(tl.int64) * D + tl.where(d < D, d, 0)
        y, _ = _dot(h_ptr, r.to(tl.int64) * F, r < end, down, down, row, F, columns, groups, False, C)
        if C.BIASED:
            y += tl.load(down.bias + row).to(tl.float32)[:, None]
        choice = tl.load(order_ptr + r, r < end, 0)
        y *= tl.load(routing_ptr + choice, r < end, 0.0).to(tl.float32)[None, :]
        at = r.to(tl.int64)[None, :] * D + d[:, None]
        tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), (d < D)[:, None] & (r < end)[None, :])


TILES: tuple[tuple[int | None, GroupedTiles], ...] = (
    (16, GroupedTiles(16, 64, 64, 4, 4)),
    (64, GroupedTiles(64, 64, 64, 4, 3)),
    (None, GroupedTiles(128, 128, 64, 8, 3)),
)
"""(maximum mean rows per expert, tiles); for int4, BK is :data:`INT4_WORDS` instead. Estimated, not measured."""
INT4_WORDS = 16
"""Words per step of int4: the smallest summed dimension of tensor cores."""
FLOAT32_TILES = GroupedTiles(16, 64, 32, 4, 2)
"""For float32, which tensor cores would round."""


def routed(
    x_TD: Tensor, order_R: Tensor, ends_E: Tensor, weights_TA: Tensor, weights: QuantisedWeights, activation: str,
    tiles: GroupedTiles | None = None,
) -> Tensor:  # fmt: skip
    """y_TD (see :func:`quantised.routed`); ``tiles`` overrides the choice made here."""
    if all(w is None or w.kind == "ternary" for w in weights[:3]) and len(order_R) <= triton_ternary.MAX_ROWS:
        x_TD, weights_TA, ends_E = row_contiguous(x_TD), weights_TA.contiguous(), ends_E.contiguous()
        y = triton_ternary.routed_rows(x_TD, order_R, ends_E, weights_TA, weights, activation)
        return combine_rows(y, order_R, *weights_TA.shape, ends_E=ends_E)
    if any(w is not None and w.needs_reference for w in weights[:3]):
        return reference.routed(x_TD, order_R, ends_E, weights_TA, weights, activation)
    x_TD, weights_TA, ends_E = row_contiguous(x_TD), weights_TA.contiguous(), ends_E.contiguous()
    up_w, down_w, gate_w, up_b, gate_b, down_b = weights
    R, E, F, D = len(order_R), len(ends_E), up_w.outputs, down_w.outputs
    h, y = x_TD.new_empty(R, F), x_TD.new_empty(R, D)
    if y.numel():
        tiles = tiles or select_tiles(R, E, x_TD.dtype)
        launch = _Launch(up_w, tiles, R, ends_E)
        quantised_up_kernel[launch.grid](
            x_TD, order_R, ends_E, launch.matrices(up_w, up_b), launch.matrices(gate_w, gate_b), h, D, F, E,
            x_TD.stride(0), weights_TA.shape[1], *launch.stored_sizes,
            constexprs(launch.constants._replace(GATED=gate_w is not None, BIASED=up_b is not None, ACT=activation)),
            **launch.options,
        )  # fmt: skip
        launch = _Launch(down_w, tiles, R, ends_E)
        quantised_down_kernel[launch.grid](
            h, order_R, ends_E, launch.matrices(down_w, down_b), weights_TA, y, F, D, E, *launch.stored_sizes,
            constexprs(launch.constants._replace(BIASED=down_b is not None)), **launch.options,
        )  # fmt: skip
    return combine_rows(y, order_R, *weights_TA.shape, ends_E=ends_E)


def select_tiles(rows: int, experts: int, dtype: torch.dtype) -> GroupedTiles:
    """Tiles for ``rows`` rows over ``experts`` experts."""
    return FLOAT32_TILES if dtype.itemsize > 2 else tuning.first_fitting(TILES, rows / max(1, experts))


class _Launch:
    """Grid and block sizes of a GEMM with ``weight``."""

    def __init__(self, weight: Quantised, tiles: GroupedTiles, rows: int, ends_E: Tensor):
        self.int4 = weight.kind == "int4"
        self.grid = (grid_size(rows, ends_E, weight.outputs, tiles),)
        self.stored_sizes = (weight.values.shape[2], weight.scales.shape[2] if self.int4 else 0)
        """Stored columns and groups per row."""
        self.constants = Constants(
            tiles.BM, tiles.BN, INT4_WORDS if self.int4 else tiles.BK, tiles.GROUP, padded_experts(ends_E), weight.kind,
            weight.group // INT4_PER_WORD if self.int4 else 1,
        )  # fmt: skip
        self.options = {"num_warps": tiles.warps, "num_stages": tiles.stages}

    def matrices(self, weight: Quantised | None, bias: Tensor | None) -> Matrices:
        """Tensors as the kernels read them: int4's pairs of bfloat16 as one int32."""
        if weight is None:
            return Matrices(None, None, None)
        return Matrices(weight.values, weight.scales.view(torch.int32) if self.int4 else weight.scales, bias)
