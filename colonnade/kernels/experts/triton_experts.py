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

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from colonnade.kernels.experts import triton_products as products
from colonnade.kernels.experts.deferred_wgrad import Later
from colonnade.kernels.experts.reference import Weights
from colonnade.kernels.triton_permute import row_contiguous


@torch.library.custom_op("colonnade::experts", mutates_args=())
def _forward(
    x: Tensor, order_R: Tensor | None, ends_E: Tensor, routing_TA: Tensor | None, up: Tensor, down: Tensor,
    gate: Tensor | None, up_b: Tensor | None, gate_b: Tensor | None, down_b: Tensor | None, activation: str, keep: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    x, up, down, gate = (
        row_contiguous(x),
        up.contiguous(),
        down.contiguous(),
        None if gate is None else gate.contiguous(),
    )
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
    weights, none = Weights(up, down, gate, up_b, gate_b, down_b), x.new_empty
    if not (u.numel() and up.numel()):
        wanted = [x if of_rows else None, routing_TA if order_R is not None else None]
        wanted += weights if of_weights else [None] * 6
        return [none(0) if w is None or not w.numel() else torch.zeros_like(w).contiguous() for w in wanted]
    dx, d_routing, owed = _rows_back(dy, x, order_R, ends_E, routing_TA, weights, a, u, activation, of_rows)
    grads = owed() if of_weights else [None] * 6
    # A fresh tensor for each: an operator's results share no memory.
    return [none(0) if g is None or not g.numel() else g for g in (dx, d_routing, *grads)]


def _rows_back(
    dy: Tensor, x: Tensor, order_R: Tensor | None, ends_E: Tensor, routing_TA: Tensor | None, weights: Weights,
    a: Tensor, u: Tensor, activation: str, of_rows: bool,
) -> tuple[Tensor | None, Tensor | None, Callable[[], list[Tensor | None]]]:  # fmt: skip
    """(dx, of the routing weights, how to sum up those of the six weights)."""
    x, dy = row_contiguous(x), dy.contiguous()
    up, down, gate = (None if w is None else w.contiguous() for w in weights[:3])
    assert up is not None
    assert down is not None
    up_b, gate_b, down_b = weights[3:]
    route = products.Route(order_R, ends_E, routing_TA, len(u))
    h, du, da, dw_R = products.hidden_back(route, dy, down, None if gate is None else a, u, activation)
    dx = products.rows_back(route, du, da, up, gate) if of_rows else None
    d_routing = None
    if routing_TA is not None and order_R is not None and dw_R is not None:
        if down_b is not None:
            here_R = route.row_experts < len(ends_E)
            b_RD = down_b[route.row_experts.clamp(max=len(ends_E) - 1)].float()
            dw_R = dw_R + (dy[order_R // route.active].float() * b_RD).sum(1).where(here_R, 0)
        d_routing = torch.zeros_like(routing_TA).flatten().scatter_(0, order_R, dw_R.to(routing_TA.dtype))
        d_routing = d_routing.view_as(routing_TA)

    def sums() -> list[Tensor | None]:
        d_up, d_gate = products.sums(route, du, da, x)
        d_down, _ = products.sums(route, h, None, dy)
        return [
            d_up, d_down, d_gate,
            None if up_b is None else products.bias_sums(route, du, tokens=False),
            None if gate_b is None or da is None else products.bias_sums(route, da, tokens=False),
            None if down_b is None else products.bias_sums(route, dy, tokens=True),
        ]  # fmt: skip

    return dx, d_routing, sums


@_backward.register_fake
def _(dy, x, order_R, ends_E, routing_TA, up, down, gate, up_b, gate_b, down_b, a, u, activation, of_rows, of_weights):
    wanted = [x if of_rows else None, routing_TA]
    wanted += [up, down, gate, up_b, gate_b, down_b] if of_weights else [None] * 6
    return [x.new_empty(0) if w is None or not w.numel() else torch.empty_like(w).contiguous() for w in wanted]


def _keep(ctx, inputs: tuple, output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)  # nobody has any of what is kept, and zeros in their place are 4RF bytes
    ctx.save_for_backward(*inputs[:10], *output[1:])
    ctx.activation = inputs[10]


def _differentiate(ctx, dy: Tensor | None, _a: Tensor | None, _u: Tensor | None):
    if dy is None:
        return (None,) * 12
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


class _Owing(Function):
    """:func:`routed`, whose weights' gradients are left to a :class:`Later`."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, order_R: Tensor, ends_E: Tensor, routing_TA: Tensor, later: Later, activation: str,
        _: Tensor,
    ) -> Tensor:  # fmt: skip
        keep = any(ctx.needs_input_grad)
        y, a, u = _forward(x, order_R, ends_E.contiguous(), routing_TA, *later.weights, activation, keep)
        ctx.save_for_backward(x, order_R, ends_E, routing_TA, a, u)
        ctx.later, ctx.call, ctx.activation = later, later.call(), activation
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (x, order_R, ends_E, routing_TA, a, u), weights = ctx.saved_tensors, ctx.later.weights
        of_rows, of_weights = ctx.needs_input_grad[0], ctx.needs_input_grad[6]
        token = dy.new_zeros(()) if of_weights else None
        if not (u.numel() and weights.up_EFD.numel()):
            return torch.zeros_like(x), None, None, torch.zeros_like(routing_TA), None, None, token
        ends_E = ends_E.contiguous()
        dx, d_routing, sums = _rows_back(dy, x, order_R, ends_E, routing_TA, weights, a, u, ctx.activation, of_rows)
        if of_weights:
            ctx.later.owed[ctx.call] = lambda: [g for g in sums() if g is not None]
        return dx, None, None, d_routing, None, None, token


def routed_later(
    x_TD: Tensor, order_R: Tensor, ends_E: Tensor, weights_TA: Tensor, later: Later, activation: str
) -> Tensor:
    """y_TD of the weights of ``later``, which gets their gradients when others have theirs."""
    return _Owing.apply(x_TD, order_R, ends_E, weights_TA, later, activation, later.token)


def experts(x_RD: Tensor, ends_E: Tensor, weights: Weights, activation: str) -> Tensor:
    """y_RD (see :func:`reference.experts`)."""
    return _run(x_RD, None, ends_E, None, weights, activation)


def routed(
    x_TD: Tensor, order_R: Tensor, ends_E: Tensor, weights_TA: Tensor, weights: Weights, activation: str
) -> Tensor:
    """y_TD (see :func:`reference.routed`)."""
    return _run(x_TD, order_R, ends_E, weights_TA, weights, activation)
