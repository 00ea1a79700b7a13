"""Experts on a GPU in our own grouped products: ``triton_rows`` has the arithmetic, ``triton_schedule`` the order.

:func:`experts` takes rows that stand in the order of the experts; :func:`routed` takes tokens, and gathers them within
the first product and weights them within the second:

    h_r = act(W_gate x_t(r)) ⊙ W_up x_t(r)        one kernel
    y_r = w_r W_down h_r                          one kernel
    y_t = Σ_j y_r(t, j)                           one kernel; j in order, so the bits are the same each time

and back, with dh_r = W_downᵀ dy_t(r) in one kernel whose epilogue also gives dw_r = h_r · dh_r, so that neither x nor y
is ever held in the order of the experts, and y not at all. Kept for the way back: the 2RF elements before the
activation. Nothing waits for the device: the number of rows and of experts is all that the host knows.
"""

# pyright: reportCallIssue=false, reportArgumentType=false
# A kernel is launched with more than its signature says, and its constants are plain numbers.

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from colonnade.kernels.experts import triton_rows, triton_weights
from colonnade.kernels.experts.reference import Weights
from colonnade.kernels.experts.tiles import Kernel, Tiles, pick
from colonnade.kernels.experts.triton_schedule import padded, programs
from colonnade.kernels.permute.triton_moves import inverse, rows_in, summed


class _Cut:
    """How one product is cut up, and what its launch takes: ``inner`` is summed over, ``outer`` the columns."""

    def __init__(self, kernel: Kernel, rows: int, ends_E: Tensor, outer: int, inner: int, weight: Tensor, tail=False):
        self.tiles: Tiles = pick(kernel, rows, len(ends_E), weight.element_size())
        self.grid = (programs(rows, ends_E, outer, self.tiles, tail),)
        # The tensor copy engine wants rows that start at 16 bytes.
        self.tma = self.tiles.descriptors and weight.shape[-1] * weight.element_size() % 16 == 0
        self.how = {
            **self.tiles.launch, "GROUP": self.tiles.GROUP, "E_PAD": padded(ends_E),
            "EVEN": inner % self.tiles.BK == 0, "TMA": self.tma,
        }  # fmt: skip

    def weight(self, w: Tensor | None, *, inner_last: bool) -> Tensor | TensorDescriptor | None:
        if w is None or not self.tma:
            return w
        block = (self.tiles.BN, self.tiles.BK) if inner_last else (self.tiles.BK, self.tiles.BN)
        return TensorDescriptor.from_tensor(w, [1, *block])


@torch.library.custom_op("colonnade::experts", mutates_args=())
def _forward(
    x: Tensor, order_R: Tensor | None, ends_E: Tensor, routing_TA: Tensor | None, up: Tensor, down: Tensor,
    gate: Tensor | None, up_b: Tensor | None, gate_b: Tensor | None, down_b: Tensor | None, activation: str, keep: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    x, up, down, gate = rows_in(x), up.contiguous(), down.contiguous(), None if gate is None else gate.contiguous()
    (E, F, D), R, active = up.shape, len(x) if order_R is None else len(order_R), 1
    h = x.new_empty(R, F)
    u = x.new_empty((R if keep else 0), F)
    a = x.new_empty((R if keep and gate is not None else 0), F)
    y = x.new_empty(R, D)
    weights_TA = None
    if routing_TA is not None:
        active, weights_TA = routing_TA.shape[1], routing_TA.contiguous()
    if y.numel():
        cut = _Cut("up" if gate is None else "gated_up", R, ends_E, F, D, up)
        triton_rows.up[cut.grid](
            x, order_R, ends_E, cut.weight(up, inner_last=True), cut.weight(gate, inner_last=True), up_b, gate_b,
            h, a, u, R, D, F, E, x.stride(0), active, order_R is not None, gate is not None, up_b is not None, keep,
            activation, **cut.how,
        )  # fmt: skip
        cut = _Cut("down", R, ends_E, D, F, down, tail := order_R is None)
        triton_rows.down[cut.grid](
            h, None, order_R, ends_E, cut.weight(down, inner_last=False), None, down_b, weights_TA, y, R, F, D, E,
            False, down_b is not None, weights_TA is not None, tail, **cut.how,
        )  # fmt: skip
    if order_R is not None:
        assert routing_TA is not None
        y = summed(y, inverse(order_R, *routing_TA.shape), ends_E=ends_E)
    return y, a, u


@_forward.register_fake
def _(x, order_R, ends_E, routing_TA, up, down, gate, up_b, gate_b, down_b, activation, keep):
    R, F = len(x) if order_R is None else len(order_R), up.shape[1]
    kept = R if keep else 0
    return x.new_empty(x.shape), x.new_empty(kept if gate is not None else 0, F), x.new_empty(kept, F)


@torch.library.custom_op("colonnade::experts_backward", mutates_args=())
def _backward(
    dy: Tensor, x: Tensor, order_R: Tensor | None, ends_E: Tensor, routing_TA: Tensor | None, up: Tensor, down: Tensor,
    gate: Tensor | None, up_b: Tensor | None, gate_b: Tensor | None, down_b: Tensor | None, a: Tensor, u: Tensor,
    activation: str, of_rows: bool, of_weights: bool,
) -> list[Tensor]:  # fmt: skip
    """dx, of the routing weights, of up, down, gate and their biases; empty where there is none or none is wanted."""
    x, dy, up, down = rows_in(x), dy.contiguous(), up.contiguous(), down.contiguous()
    gate = None if gate is None else gate.contiguous()
    (E, F, D), R, gather, gated = up.shape, len(u), order_R is not None, gate is not None
    none = x.new_empty
    h, du, da = x.new_empty(R, F), x.new_empty(R, F), x.new_empty(R if gated else 0, F)
    active, weights_TA, part = 1, None, None
    cut = _Cut("hidden_back", R, ends_E, F, D, down)
    if routing_TA is not None:
        active, weights_TA = routing_TA.shape[1], routing_TA.contiguous()
        part = torch.zeros(triton.cdiv(F, cut.tiles.BN), R, dtype=torch.float32, device=x.device)
    some = R > 0 and D > 0 and F > 0 and E > 0
    if some:
        triton_rows.hidden_back[cut.grid](
            dy, order_R, ends_E, cut.weight(down, inner_last=True), weights_TA, a, u, h, da, du, part, R, D, F, E,
            active, gather, gated, gather, activation, **cut.how,
        )  # fmt: skip
    dx, d_routing = none(0), none(0)
    if of_rows:
        dx = x.new_empty(R, D)
        if some:
            cut = _Cut("rows_back", R, ends_E, D, F, up, not gather)
            triton_rows.down[cut.grid](
                du, da, order_R, ends_E, cut.weight(up, inner_last=False), cut.weight(gate, inner_last=False), None,
                None, dx, R, F, D, E, gated, False, False, not gather, **cut.how,
            )  # fmt: skip
        if routing_TA is not None and order_R is not None:
            dx = summed(dx, inverse(order_R, *routing_TA.shape), ends_E=ends_E)
    if routing_TA is not None and order_R is not None and part is not None:
        dw_R = part.sum(0)
        if down_b is not None:
            row = torch.arange(R, device=x.device)
            expert_R = torch.searchsorted(ends_E, row, right=True)
            dot_R = (dy[order_R // active].float() * down_b[expert_R.clamp(max=E - 1)].float()).sum(1)
            dw_R = dw_R + dot_R.where(expert_R < E, 0)
        d_routing = torch.zeros_like(routing_TA).flatten().scatter_(0, order_R, dw_R.to(routing_TA.dtype))
        d_routing = d_routing.view_as(routing_TA)
    grads = [none(0)] * 6
    if of_weights:
        sums = _Sums(order_R, ends_E, weights_TA, active, R)
        d_up, d_gate = sums.product(du, da if gated else None, x, gather=gather)
        d_down, _ = sums.product(h, None, dy, gather=gather)
        grads[:3] = d_up, d_down, none(0) if d_gate is None else d_gate
        grads[3] = none(0) if up_b is None else sums.rows(du, gather=False)
        grads[4] = none(0) if gate_b is None else sums.rows(da, gather=False)
        grads[5] = none(0) if down_b is None else sums.rows(dy, gather=gather)
    # A fresh tensor for each: an operator's results share no memory.
    return [dx, d_routing, *(none(0) if not g.numel() else g for g in grads)]


@_backward.register_fake
def _(dy, x, order_R, ends_E, routing_TA, up, down, gate, up_b, gate_b, down_b, a, u, activation, of_rows, of_weights):
    wanted = [x if of_rows else None, routing_TA]
    wanted += [up, down, gate, up_b, gate_b, down_b] if of_weights else [None] * 6
    return [x.new_empty(0) if w is None or not w.numel() else torch.empty_like(w).contiguous() for w in wanted]


class _Sums:
    """Sums over each expert's own rows."""

    def __init__(self, order_R: Tensor | None, ends_E: Tensor, weights_TA: Tensor | None, active: int, rows: int):
        self.order_R, self.ends_E, self.weights_TA, self.active, self.rows_ = order_R, ends_E, weights_TA, active, rows

    def product(self, p: Tensor, s: Tensor | None, q: Tensor, *, gather: bool) -> tuple[Tensor, Tensor | None]:
        """(pᵀ q, sᵀ q) of each expert."""
        E, F, D = len(self.ends_E), p.shape[1], q.shape[1]
        dp = q.new_empty(E, F, D)
        ds = None if s is None else q.new_empty(E, F, D)
        if dp.numel():
            kernel = "weights_back" if s is None else "gated_weights_back"
            tiles = pick(kernel, self.rows_, E, q.element_size())
            grid = (E * triton.cdiv(F, tiles.BM) * triton.cdiv(D, tiles.BN),)
            triton_weights.weights_back[grid](
                p, s, q, self.order_R, self.ends_E, dp, ds, self.rows_, F, D, E, q.stride(0), self.active,
                s is not None, gather, GROUP=tiles.GROUP, **tiles.launch,
            )  # fmt: skip
        return dp, ds

    def rows(self, p: Tensor, *, gather: bool) -> Tensor:
        """Their plain sum, each by its routing weight where rows are gathered."""
        E, F = len(self.ends_E), p.shape[1]
        total = p.new_empty(E, F)
        if total.numel():
            block = min(128, triton.next_power_of_2(F))
            triton_weights.biases_back[E, triton.cdiv(F, block)](
                p, self.order_R, self.ends_E, self.weights_TA, total, self.rows_, F, E, self.active, gather, gather,
                32, block,
            )  # fmt: skip
        return total


def _keep(ctx, inputs: tuple, output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:10], *output[1:])
    ctx.activation = inputs[10]


def _differentiate(ctx, dy: Tensor, _a: Tensor | None, _u: Tensor | None):
    needs, saved = ctx.needs_input_grad, ctx.saved_tensors  # asked for once: recomputation gives them once
    of_weights = any(needs[4:10])
    dx, d_routing, *rest = _backward(dy, *saved, ctx.activation, needs[0], of_weights)
    grads = (dx, dx, dx, d_routing, *rest)  # the order and the ends have none, and need none
    wanted = [g.view_as(w) if need else None for g, w, need in zip(grads, saved[:10], needs[:10], strict=True)]
    return *wanted, None, None


_forward.register_autograd(_differentiate, setup_context=_keep)


def _run(x: Tensor, order_R: Tensor | None, ends_E: Tensor, routing_TA: Tensor | None, w: Weights, activation: str):
    keep = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, routing_TA, *w))
    ends_E = ends_E.contiguous()
    return _forward(x, order_R, ends_E, routing_TA, w[0], w[1], w[2], w[3], w[4], w[5], activation, keep)[0]


def experts(x_RD: Tensor, ends_E: Tensor, weights: Weights, activation: str) -> Tensor:
    """y_RD (see :func:`reference.experts`)."""
    return _run(x_RD, None, ends_E, None, weights, activation)


def routed(
    x_TD: Tensor, order_R: Tensor, ends_E: Tensor, weights_TA: Tensor, weights: Weights, activation: str
) -> Tensor:
    """y_TD (see :func:`reference.routed`)."""
    return _run(x_TD, order_R, ends_E, weights_TA, weights, activation)
