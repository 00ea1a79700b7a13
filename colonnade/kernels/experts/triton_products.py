"""Each of the experts' products by whom the table names: our Triton kernels, or torch's grouped product.

    hidden        h_r = act(W_gate x_r) ⊙ W_up x_r           out         y_r = w_r (W_down h_r + b)
    hidden_back   dh_r = W_downᵀ dy_r, then w h, du, da      rows_back   dx_r = W_upᵀ du_r + W_gateᵀ da_r
    sums          dW_e = Σ_r p_r ⊗ q_r over the rows of e

Whoever computes a product takes and gives the same tensors, so that each is chosen for itself. A library's product
needs rows that lie one after another, no biases, and widths of whole 16 bytes; where these are not so, ours does it.
"""

# pyright: reportCallIssue=false, reportArgumentType=false
# A kernel is launched with more than its signature says, and its constants are plain numbers.

from functools import cached_property

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from colonnade.kernels.experts import grouped_mm, triton_activation, triton_grouped_gemm, triton_wgrad
from colonnade.kernels.experts.tiles import Kernel, Shape, Tiles, pick
from colonnade.kernels.experts.triton_tile_schedule import padded, programs
from colonnade.kernels.triton_permute import combine_rows, gather_rows, inverse_if_large


class Route:
    """Which rows there are, whose they are, and which tokens they come from."""

    def __init__(self, order_R: Tensor | None, ends_E: Tensor, routing_TA: Tensor | None, rows: int):
        self.order_R, self.ends_E, self.R = order_R, ends_E, rows
        self.weights_TA = None if routing_TA is None else routing_TA.contiguous()
        self.active = 1 if routing_TA is None else routing_TA.shape[1]
        self.gather = order_R is not None
        self.single = self.gather and rows == self.active
        self._laid: dict[int, tuple[Tensor, Tensor]] = {}

    @cached_property
    def ends(self) -> Tensor:
        """As torch's product wants them."""
        return self.ends_E.to(torch.int32)

    @cached_property
    def row_tokens(self) -> Tensor | None:
        """Found once: a division for each row in each step of a sum is what such a sum would wait for."""
        return None if self.order_R is None else (self.order_R // self.active).to(torch.int32)

    @cached_property
    def inverse(self) -> Tensor | None:
        """The row of each choice, found once for all who move rows; None where there are too few to need it."""
        if self.order_R is None or self.weights_TA is None:
            return None
        return inverse_if_large(self.order_R, *self.weights_TA.shape)

    @cached_property
    def row_experts(self) -> Tensor:
        """E for rows of no expert."""
        return torch.searchsorted(self.ends_E, torch.arange(self.R, device=self.ends_E.device), right=True)

    @cached_property
    def turns(self) -> Tensor:
        """The experts, the busiest first."""
        return self.ends_E.diff(prepend=self.ends_E.new_zeros(1)).argsort(descending=True)

    def laid(self, x: Tensor) -> Tensor:
        """Tokens in the order of the rows, once for all who ask; rows as they are."""
        if self.order_R is None:
            return x
        if id(x) not in self._laid:
            self.adopt(x, gather_rows(x, self.order_R, self.active, self.inverse))
        return self._laid[id(x)][1]

    def adopt(self, x: Tensor, x_RD: Tensor) -> None:
        """Take ``x_RD`` for the tokens ``x`` laid out."""
        self._laid[id(x)] = x, x_RD  # x too, so that no other gets its identity

    def within(self, y_RD: Tensor) -> Tensor:
        """0 for rows of no expert where anybody sees them."""
        return y_RD if self.gather else y_RD.where((self.row_experts < len(self.ends_E)).unsqueeze(1), 0)

    def back(self, y_RD: Tensor, *, weighted: bool) -> Tensor:
        """Rows summed over the choices of each token; rows as they are."""
        if self.order_R is None or self.weights_TA is None:
            return y_RD
        weights_TA = self.weights_TA if weighted else None
        return combine_rows(y_RD, self.order_R, *self.weights_TA.shape, weights_TA, self.ends_E, self.inverse)


class _Cut:
    """How a product of ours is cut up, and what its launch takes: ``inner`` is summed over, ``outer`` the columns."""

    def __init__(self, tiles: Tiles, route: Route, outer: int, inner: int, *operands: Tensor | None,
        tail: bool = False, single: bool = False,
    ):  # fmt: skip
        self.tiles = tiles
        self.grid = (programs(route.R, route.ends_E, outer, tiles, tail=tail, single=single),)
        self.tma = tiles.descriptors and describable(*operands)
        self.how = {
            **tiles.launch, "GROUP": tiles.GROUP, "E_PAD": padded(route.ends_E),
            "EVEN": inner % tiles.BK == 0, "TMA": self.tma,
        }  # fmt: skip

    def weight(self, w: Tensor | None, *, inner_last: bool) -> Tensor | TensorDescriptor | None:
        if w is None or not self.tma:
            return w
        block = (self.tiles.BN, self.tiles.BK) if inner_last else (self.tiles.BK, self.tiles.BN)
        return TensorDescriptor.from_tensor(w, [1, *block])

    def rows(self, x: Tensor | None) -> Tensor | TensorDescriptor | None:
        """Of rows that lie one after another."""
        return x if x is None or not self.tma else TensorDescriptor.from_tensor(x, [self.tiles.BM, self.tiles.BK])


def describable(*operands: Tensor | None) -> bool:
    """Whether the tensor copy engine can fetch from all: rows that begin at multiples of 16 bytes."""
    for x in operands:
        if x is not None and (
            x.data_ptr() % 16 or not x.numel() or any(n * x.element_size() % 16 for n in x.stride()[:-1])
        ):
            return False
    return True


def by_library(tiles: Tiles, *operands: Tensor | None, widths: tuple[int, ...], biased: bool = False) -> bool:
    """Whether torch's product is to do it, and can."""
    whole = all(n * x.element_size() % 16 == 0 for n in widths for x in operands if x is not None)
    return tiles.library and grouped_mm.available and whole and not biased and describable(*operands)


def hidden(
    route: Route, x: Tensor, up: Tensor, gate: Tensor | None, up_b: Tensor | None, gate_b: Tensor | None,
    activation: str, *, keep: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """(h, and with ``keep`` a and u before the activation)."""
    E, F, D = up.shape
    tiles = pick("up" if gate is None else "gated_up", route.R, Shape(E, F, D), up.element_size())
    if by_library(tiles, up, gate, None if route.gather else x, widths=(F, D), biased=up_b is not None):
        x = route.laid(x)
        u = grouped_mm.product(x, up.transpose(1, 2), route.ends)
        a = None if gate is None else grouped_mm.product(x, gate.transpose(1, 2), route.ends)
        h = triton_activation.hidden(a, u, route.ends_E, activation)
        return (h, a, u) if keep else (h, None, None)
    if tiles.laid:
        x = route.laid(x)
    gather = route.gather and not tiles.laid
    h, u = x.new_empty(route.R, F), x.new_empty(route.R, F) if keep else None
    a = x.new_empty(route.R, F) if keep and gate is not None else None
    cut = _Cut(tiles, route, F, D, up, gate, None if gather else x, single=route.single)
    triton_grouped_gemm.up[cut.grid](
        x if gather else cut.rows(x), route.order_R, route.ends_E, cut.weight(up, inner_last=True),
        cut.weight(gate, inner_last=True), up_b, gate_b, h, a, u, route.R, D, F, E, x.stride(0), route.active,
        gather, gate is not None, up_b is not None, keep, activation, route.single, **cut.how,
    )  # fmt: skip
    return h, a, u


def out(route: Route, h: Tensor, down: Tensor, down_b: Tensor | None) -> Tensor:
    """y of the tokens, of the rows where these are not tokens'."""
    E, F, D = down.shape
    tiles = pick("down", route.R, Shape(E, F, D), down.element_size())
    if by_library(tiles, h, down, widths=(F, D), biased=down_b is not None):
        return route.back(route.within(grouped_mm.product(h, down, route.ends)), weighted=True)
    y = h.new_empty(route.R, D)
    weighted = route.weights_TA is not None
    cut = _Cut(tiles, route, D, F, h, down, tail=not route.gather, single=route.single)
    triton_grouped_gemm.down[cut.grid](
        cut.rows(h), None, route.order_R, route.ends_E, cut.weight(down, inner_last=False), None, down_b,
        route.weights_TA, y, route.R, F, D, E, False, down_b is not None, weighted, not route.gather, route.single,
        False, **cut.how,
    )  # fmt: skip
    return route.back(y, weighted=False)


def hidden_back(
    route: Route, dy: Tensor, down: Tensor, a: Tensor | None, u: Tensor, activation: str
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """(w ⊙ h, du, da, and of tokens h · dh of each row in float32, 0 for rows of no expert)."""
    (E, F, D), R = down.shape, route.R
    tiles = pick("hidden_back", R, Shape(E, F, D), down.element_size())
    if by_library(tiles, down, dy, widths=(F, D)):
        dh = grouped_mm.product(route.laid(dy), down.transpose(1, 2), route.ends)
        return triton_activation.hidden_back(dh, a, u, route.order_R, route.weights_TA, route.ends_E, activation)
    if tiles.laid:
        dy = route.laid(dy)
    gather = route.gather and not tiles.laid
    h, du, da = torch.empty_like(u), torch.empty_like(u), None if a is None else torch.empty_like(a)
    part = None
    if route.gather:
        part = torch.zeros(triton.cdiv(F, tiles.BN), R, dtype=torch.float32, device=u.device)
    cut = _Cut(tiles, route, F, D, down, None if gather else dy)
    triton_grouped_gemm.hidden_back[cut.grid](
        dy if gather else cut.rows(dy), route.order_R, route.ends_E, cut.weight(down, inner_last=True),
        route.weights_TA, a, u, h, da, du, part, R, D, F, E, dy.stride(0), route.active,
        gather, a is not None, route.gather, activation, **cut.how,
    )  # fmt: skip
    return h, du, da, None if part is None else part.sum(0)


def rows_back(route: Route, du: Tensor, da: Tensor | None, up: Tensor, gate: Tensor | None) -> Tensor:
    """dx of the tokens, of the rows where these are not tokens'."""
    E, F, D = up.shape
    tiles = pick("rows_back", route.R, Shape(E, F, D), up.element_size())
    if by_library(tiles, du, up, gate, widths=(F, D)):
        dx = grouped_mm.product(du, up, route.ends)
        if da is not None and gate is not None:
            dx += grouped_mm.product(da, gate, route.ends)
        return route.back(route.within(dx), weighted=False)
    dx = du.new_empty(route.R, D)
    cut = _Cut(tiles, route, D, F, du, da, up, gate, tail=not route.gather)
    triton_grouped_gemm.down[cut.grid](
        cut.rows(du), cut.rows(da), route.order_R, route.ends_E, cut.weight(up, inner_last=False),
        cut.weight(gate, inner_last=False), None, None, dx, route.R, F, D, E, gate is not None, False, False,
        not route.gather, False, gate is not None and tiles.together, **cut.how,
    )  # fmt: skip
    return route.back(dx, weighted=False)


def sums(route: Route, p: Tensor, s: Tensor | None, q: Tensor) -> tuple[Tensor, Tensor | None]:
    """(pᵀ q, sᵀ q) over each expert's rows; q is of tokens where there are such."""
    E, F, D = len(route.ends_E), p.shape[1], q.shape[1]
    kernel: Kernel = "weights_back" if s is None else "gated_weights_back"
    tiles = pick(kernel, route.R, Shape(E, F, D), q.element_size())
    if by_library(tiles, p, s, None if route.gather else q, widths=(F, D)):
        q = route.laid(q)
        return grouped_mm.sums(p, q, route.ends), None if s is None else grouped_mm.sums(s, q, route.ends)
    if tiles.laid:
        q = route.laid(q)
    dp = q.new_empty(E, F, D)
    ds = None if s is None else q.new_empty(E, F, D)
    gather = route.gather and not tiles.laid
    tma = tiles.descriptors and describable(p, s, None if gather else q)

    def of(x: Tensor | None, columns: int) -> Tensor | TensorDescriptor | None:
        return x if x is None or not tma else TensorDescriptor.from_tensor(x, [tiles.BK, columns])

    triton_wgrad.weights_back[E * triton.cdiv(F, tiles.BM) * triton.cdiv(D, tiles.BN),](
        of(p, tiles.BM), of(s, tiles.BM), q if gather else of(q, tiles.BN), route.row_tokens if gather else None,
        route.turns, route.ends_E, dp, ds, route.R, F, D, E, q.stride(0), s is not None, gather, GROUP=tiles.GROUP,
        EVEN=F % tiles.BM == 0 and D % tiles.BN == 0, TMA=tma, **tiles.launch,
    )  # fmt: skip
    return dp, ds


def bias_sums(route: Route, p: Tensor, *, tokens: bool) -> Tensor:
    """Plain sums over each expert's rows, of tokens each by its routing weight."""
    E, F, gather = len(route.ends_E), p.shape[1], tokens and route.gather
    total = p.new_empty(E, F)
    block = min(128, triton.next_power_of_2(F))
    triton_wgrad.biases_back[E, triton.cdiv(F, block)](
        p, route.order_R, route.ends_E, route.weights_TA, total, route.R, F, E, route.active, gather, gather, 32, block
    )
    return total
