"""Runs each of the experts' grouped GEMMs with our Triton kernels or torch's, as chosen by the tuning table.

    up_forward      h_r = act(W_gate x_r) ⊙ W_up x_r             down_forward   y_r = w_r (W_down h_r + b)
    hidden_dgrad    dh_r = W_downᵀ dy_r, then w h, du, da        input_dgrad    dx_r = W_upᵀ du_r + W_gateᵀ da_r
    wgrad           dW_e = Σ_r p_r ⊗ q_r over the rows of e

Both implementations take and return the same tensors, so each GEMM is chosen on its own. torch's needs contiguous rows,
no biases, and widths that are multiples of 16 bytes; otherwise our kernel is used.
"""

from functools import cached_property
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from colonnade.kernels import triton_permute
from colonnade.kernels.experts import grouped_mm, triton_activation, triton_grouped_gemm, triton_wgrad
from colonnade.kernels.experts.tiles import GroupedTiles, Kernel, LayerShape, select_tiles
from colonnade.kernels.experts.triton_tile_schedule import grid_size, padded_experts
from colonnade.kernels.triton_constants import constexprs


class RoutedRows:
    """Rows in expert order: their experts, their tokens and their routing weights."""

    def __init__(self, order_R: Tensor, ends_E: Tensor, routing_TA: Tensor):
        self.order_R, self.ends_E, self.R = order_R, ends_E, len(order_R)
        self.routing_TA, self.active = routing_TA.contiguous(), routing_TA.shape[1]
        self.one_token = self.active == self.R
        """Whether all rows are choices of one token, which have distinct experts."""
        self._gathered: dict[int, tuple[Tensor, Tensor]] = {}

    @cached_property
    def ends_int32(self) -> Tensor:
        """Ends in the dtype of torch's grouped GEMM."""
        return self.ends_E.to(torch.int32)

    @cached_property
    def row_tokens(self) -> Tensor:
        """The token of each row, int32; a division per row in each step of a GEMM would be its bottleneck."""
        return (self.order_R // self.active).to(torch.int32)

    @cached_property
    def inverse(self) -> Tensor | None:
        """The row of each choice; None where there are so few rows that kernels search for it."""
        return triton_permute.inverse_if_large(self.order_R, *self.routing_TA.shape)

    @cached_property
    def row_experts(self) -> Tensor:
        """The expert of each row; E for rows past the last end."""
        return torch.searchsorted(self.ends_E, torch.arange(self.R, device=self.ends_E.device), right=True)

    @cached_property
    def experts_by_load(self) -> Tensor:
        """The experts, busiest first."""
        return self.ends_E.diff(prepend=self.ends_E.new_zeros(1)).argsort(descending=True)

    def gather(self, x_TD: Tensor) -> Tensor:
        """The token of each row, (R, D); cached."""
        if id(x_TD) not in self._gathered:
            self.cache_gathered(x_TD, triton_permute.gather_rows(x_TD, self.order_R, self.active, self.inverse))
        return self._gathered[id(x_TD)][1]

    def cache_gathered(self, x_TD: Tensor, x_RD: Tensor) -> None:
        """Use ``x_RD`` as the result of ``gather(x_TD)``."""
        self._gathered[id(x_TD)] = x_TD, x_RD  # keeping x_TD keeps its id unique

    def combine(self, y_RD: Tensor, *, weighted: bool) -> Tensor:
        """Each token's rows summed, with ``weighted`` by their routing weights."""
        routing_TA = self.routing_TA if weighted else None
        return triton_permute.combine_rows(
            y_RD, self.order_R, *self.routing_TA.shape, routing_TA, self.ends_E, self.inverse
        )  # fmt: skip


class _Launch:
    """Grid, block sizes and TMA descriptors of one grouped GEMM; sums over ``inner``, writes ``outer`` columns."""

    def __init__(self, tiles: GroupedTiles, rows: RoutedRows, outer: int, inner: int, *operands: Tensor | None,
        one_token: bool = False,
    ):  # fmt: skip
        self.tiles = tiles
        self.grid = (grid_size(rows.R, rows.ends_E, outer, tiles, one_token=one_token),)
        self.tma = tiles.descriptors and tma_compatible(*operands)
        self.constants = triton_grouped_gemm.Constants(
            tiles.BM, tiles.BN, tiles.BK, tiles.GROUP, padded_experts(rows.ends_E), inner % tiles.BK == 0, self.tma
        )
        self.options = {"num_warps": tiles.warps, "num_stages": tiles.stages}

    def constexprs(self, **changes: Any) -> triton_grouped_gemm.Constants:
        """The kernel's constants."""
        return constexprs(self.constants._replace(**changes))

    def weight(self, w: Tensor | None, *, inner_last: bool) -> Tensor | TensorDescriptor | None:
        """``w``, as a descriptor where TMA loads it."""
        if w is None or not self.tma:
            return w
        block = (self.tiles.BN, self.tiles.BK) if inner_last else (self.tiles.BK, self.tiles.BN)
        return TensorDescriptor.from_tensor(w, [1, *block])

    def rows(self, x: Tensor | None) -> Tensor | TensorDescriptor | None:
        """``x``, which has contiguous rows, as a descriptor where TMA loads it."""
        return x if x is None or not self.tma else TensorDescriptor.from_tensor(x, [self.tiles.BM, self.tiles.BK])


def tma_compatible(*operands: Tensor | None) -> bool:
    """Whether TMA can load all operands: their rows start at multiples of 16 bytes."""
    return not any(
        x.data_ptr() % 16 or not x.numel() or any(n * x.element_size() % 16 for n in x.stride()[:-1])
        for x in operands
        if x is not None
    )


def use_library(tiles: GroupedTiles, *operands: Tensor | None, widths: tuple[int, ...], biased: bool = False) -> bool:
    """Whether the table chose torch's grouped GEMM, and it supports these operands."""
    whole = all(n * x.element_size() % 16 == 0 for n in widths for x in operands if x is not None)
    return tiles.library and grouped_mm.available and whole and not biased and tma_compatible(*operands)


def up_forward(
    rows: RoutedRows, x_TD: Tensor, up: Tensor, gate: Tensor | None, up_b: Tensor | None, gate_b: Tensor | None,
    activation: str, *, keep: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """(h, and with ``keep`` the pre-activations a and u)."""
    E, F, D = up.shape
    tiles = select_tiles("up" if gate is None else "gated_up", rows.R, LayerShape(E, F, D), up.element_size())
    if use_library(tiles, up, gate, widths=(F, D), biased=up_b is not None):
        x = rows.gather(x_TD)
        u = grouped_mm.product(x, up.transpose(1, 2), rows.ends_int32)
        a = None if gate is None else grouped_mm.product(x, gate.transpose(1, 2), rows.ends_int32)
        h = triton_activation.activation_forward(a, u, rows.ends_E, activation)
        return (h, a, u) if keep else (h, None, None)
    gather = not tiles.gather_first
    x = x_TD if gather else rows.gather(x_TD)
    h, u = x.new_empty(rows.R, F), x.new_empty(rows.R, F) if keep else None
    a = x.new_empty(rows.R, F) if keep and gate is not None else None
    launch = _Launch(tiles, rows, F, D, up, gate, None if gather else x, one_token=rows.one_token)
    triton_grouped_gemm.up_kernel[launch.grid](
        x if gather else launch.rows(x), rows.order_R, rows.ends_E, launch.weight(up, inner_last=True),
        launch.weight(gate, inner_last=True), up_b, gate_b, h, a, u, D, F, E, x.stride(0), rows.active,
        launch.constexprs(
            GATHER=gather, GATED=gate is not None, BIASED=up_b is not None, KEEP=keep, ACT=activation,
            ONE_TOKEN=rows.one_token,
        ),
        **launch.options,
    )  # fmt: skip
    return h, a, u


def down_forward(rows: RoutedRows, h: Tensor, down: Tensor, down_b: Tensor | None) -> Tensor:
    """y_TD."""
    E, F, D = down.shape
    tiles = select_tiles("down", rows.R, LayerShape(E, F, D), down.element_size())
    if use_library(tiles, h, down, widths=(F, D), biased=down_b is not None):
        return rows.combine(grouped_mm.product(h, down, rows.ends_int32), weighted=True)
    y = h.new_empty(rows.R, D)
    launch = _Launch(tiles, rows, D, F, h, down, one_token=rows.one_token)
    triton_grouped_gemm.down_kernel[launch.grid](
        launch.rows(h), None, rows.order_R, rows.ends_E, launch.weight(down, inner_last=False), None, down_b,
        rows.routing_TA, y, F, D, E,
        launch.constexprs(BIASED=down_b is not None, WEIGHTED=True, ONE_TOKEN=rows.one_token), **launch.options,
    )  # fmt: skip
    return rows.combine(y, weighted=False)


def hidden_dgrad(
    rows: RoutedRows, dy_TD: Tensor, down: Tensor, a: Tensor | None, u: Tensor, activation: str
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """(w ⊙ h, du, da, and h · dh of each row in float32, 0 for rows past the last end)."""
    (E, F, D), R = down.shape, rows.R
    tiles = select_tiles("hidden_dgrad", R, LayerShape(E, F, D), down.element_size())
    if use_library(tiles, down, dy_TD, widths=(F, D)):
        dh = grouped_mm.product(rows.gather(dy_TD), down.transpose(1, 2), rows.ends_int32)
        return triton_activation.activation_backward(
            dh, a, u, rows.order_R, rows.routing_TA, rows.ends_E, activation
        )  # fmt: skip
    gather = not tiles.gather_first
    dy = dy_TD if gather else rows.gather(dy_TD)
    h, du, da = torch.empty_like(u), torch.empty_like(u), None if a is None else torch.empty_like(a)
    dot = torch.zeros(triton.cdiv(F, tiles.BN), R, dtype=torch.float32, device=u.device)
    launch = _Launch(tiles, rows, F, D, down, None if gather else dy)
    triton_grouped_gemm.hidden_dgrad_kernel[launch.grid](
        dy if gather else launch.rows(dy), rows.order_R, rows.ends_E, launch.weight(down, inner_last=True),
        rows.routing_TA, triton_grouped_gemm.Activations(a, u, h, da, du), dot, R, D, F, E, dy.stride(0), rows.active,
        launch.constexprs(GATHER=gather, GATED=a is not None, ACT=activation), **launch.options,
    )  # fmt: skip
    return h, du, da, dot.sum(0)


def input_dgrad(rows: RoutedRows, du: Tensor, da: Tensor | None, up: Tensor, gate: Tensor | None) -> Tensor:
    """dx_TD."""
    E, F, D = up.shape
    tiles = select_tiles("input_dgrad", rows.R, LayerShape(E, F, D), up.element_size())
    if use_library(tiles, du, up, gate, widths=(F, D)):
        dx = grouped_mm.product(du, up, rows.ends_int32)
        if da is not None and gate is not None:
            dx += grouped_mm.product(da, gate, rows.ends_int32)
        return rows.combine(dx, weighted=False)
    dx = du.new_empty(rows.R, D)
    launch = _Launch(tiles, rows, D, F, du, da, up, gate)
    triton_grouped_gemm.down_kernel[launch.grid](
        launch.rows(du), launch.rows(da), rows.order_R, rows.ends_E, launch.weight(up, inner_last=False),
        launch.weight(gate, inner_last=False), None, None, dx, F, D, E,
        launch.constexprs(TWO=gate is not None, INTERLEAVED=gate is not None and tiles.interleaved),
        **launch.options,
    )  # fmt: skip
    return rows.combine(dx, weighted=False)


def wgrad(rows: RoutedRows, p: Tensor, s: Tensor | None, q_TD: Tensor) -> tuple[Tensor, Tensor | None]:
    """(pᵀ q, sᵀ q) over each expert's rows."""
    E, F, D = len(rows.ends_E), p.shape[1], q_TD.shape[1]
    kernel: Kernel = "wgrad" if s is None else "gated_wgrad"
    tiles = select_tiles(kernel, rows.R, LayerShape(E, F, D), q_TD.element_size())
    if use_library(tiles, p, s, widths=(F, D)):
        q = rows.gather(q_TD)
        return grouped_mm.wgrad(p, q, rows.ends_int32), None if s is None else grouped_mm.wgrad(s, q, rows.ends_int32)
    gather = not tiles.gather_first
    q = q_TD if gather else rows.gather(q_TD)
    dp = q.new_empty(E, F, D)
    ds = None if s is None else q.new_empty(E, F, D)
    tma = tiles.descriptors and tma_compatible(p, s, None if gather else q)

    def operand(x: Tensor | None, columns: int) -> Tensor | TensorDescriptor | None:
        return x if x is None or not tma else TensorDescriptor.from_tensor(x, [tiles.BK, columns])

    triton_wgrad.wgrad_kernel[E * triton.cdiv(F, tiles.BM) * triton.cdiv(D, tiles.BN),](
        operand(p, tiles.BM), operand(s, tiles.BM), q if gather else operand(q, tiles.BN),
        rows.row_tokens if gather else None, rows.experts_by_load, rows.ends_E, dp, ds, F, D, q.stride(0),
        constexprs(triton_wgrad.Constants(
            tiles.BM, tiles.BN, tiles.BK, tiles.GROUP, EVEN=F % tiles.BM == 0 and D % tiles.BN == 0, TMA=tma,
            TWO=s is not None, GATHER=gather,
        )),
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    return dp, ds


def bias_grad(rows: RoutedRows, p: Tensor, *, of_tokens: bool) -> Tensor:
    """Sums over each expert's rows; with ``of_tokens``, ``p`` is gathered and weighted by routing weights."""
    E, F = len(rows.ends_E), p.shape[1]
    total = p.new_empty(E, F)
    block = min(128, triton.next_power_of_2(F))
    triton_wgrad.bias_grad_kernel[E, triton.cdiv(F, block)](
        p, rows.order_R, rows.ends_E, rows.routing_TA, total, F, rows.active, of_tokens, 32, block
    )
    return total
