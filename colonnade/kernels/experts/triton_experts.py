"""Experts on a GPU in grouped products: ``triton_products`` launches them, ``triton_rows`` has their arithmetic.

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
from torch import Tensor

from colonnade.kernels.experts import triton_products as products
from colonnade.kernels.experts.reference import Weights
from colonnade.kernels.permute.triton_moves import rows_in


@torch.library.custom_op("colonnade::experts", mutates_args=())
def _forward(
    x: Tensor, order_R: Tensor | None, ends_E: Tensor, routing_TA: Tensor | None, up: Tensor, down: Tensor,
    gate: Tensor | None, up_b: Tensor | None, gate_b: Tensor | None, down_b: Tensor | None, activation: str, keep: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    x, up, down, gate = rows_in(x), up.contiguous(), down.contiguous(), None if gate is None else gate.contiguous()
    R = len(x) if order_R is None else len(order_R)
    route, a, u = products.Route(order_R, ends_E, routing_TA, R), None, None
    if R and x.shape[1]:
        h, a, u = products.hidden(route, x, up, gate, up_b, gate_b, activation, keep=keep)
        y = products.out(route, h, down, down_b)
    else:
        y = route.back(x.new_empty(R, x.shape[1]), weighted=False)
    kept, F = R if keep else 0, up.shape[1]
    return (
        y,
        x.new_empty(kept if gate is not None else 0, F) if a is None else a,
        x.new_empty(kept, F) if u is None else u,
    )


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
    route, none = products.Route(order_R, ends_E, routing_TA, len(u)), x.new_empty
    if not (u.numel() and up.numel()):
        wanted = [x if of_rows else None, routing_TA if order_R is not None else None]
        wanted += [up, down, gate, up_b, gate_b, down_b] if of_weights else [None] * 6
        return [none(0) if w is None or not w.numel() else torch.zeros_like(w).contiguous() for w in wanted]
    h, du, da, dw_R = products.hidden_back(route, dy, down, None if gate is None else a, u, activation)
    dx = products.rows_back(route, du, da, up, gate) if of_rows else none(0)
    d_routing = none(0)
    if routing_TA is not None and order_R is not None and dw_R is not None:
        if down_b is not None:
            here_R = route.row_experts < len(ends_E)
            b_RD = down_b[route.row_experts.clamp(max=len(ends_E) - 1)].float()
            dw_R = dw_R + (dy[order_R // route.active].float() * b_RD).sum(1).where(here_R, 0)
        d_routing = torch.zeros_like(routing_TA).flatten().scatter_(0, order_R, dw_R.to(routing_TA.dtype))
        d_routing = d_routing.view_as(routing_TA)
    grads = [none(0)] * 6
    if of_weights:
        d_up, d_gate = products.sums(route, du, da, x)
        d_down, _ = products.sums(route, h, None, dy)
        grads[:3] = d_up, d_down, none(0) if d_gate is None else d_gate
        grads[3] = none(0) if up_b is None else products.bias_sums(route, du, tokens=False)
        grads[4] = none(0) if gate_b is None or da is None else products.bias_sums(route, da, tokens=False)
        grads[5] = none(0) if down_b is None else products.bias_sums(route, dy, tokens=True)
    # A fresh tensor for each: an operator's results share no memory.
    return [dx, d_routing, *(none(0) if not g.numel() else g for g in grads)]


@_backward.register_fake
def _(dy, x, order_R, ends_E, routing_TA, up, down, gate, up_b, gate_b, down_b, a, u, activation, of_rows, of_weights):
    wanted = [x if of_rows else None, routing_TA]
    wanted += [up, down, gate, up_b, gate_b, down_b] if of_weights else [None] * 6
    return [x.new_empty(0) if w is None or not w.numel() else torch.empty_like(w).contiguous() for w in wanted]


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
