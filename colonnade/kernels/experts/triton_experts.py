"""Experts on a GPU with Triton: :mod:`triton_products` launches the grouped GEMMs; this file has their autograd.

    h_r = act(W_gate x_t(r)) ⊙ W_up x_t(r)        one kernel, which gathers the tokens
    y_r = w_r W_down h_r                          one kernel, which applies the routing weights
    y_t = Σ_j y_r(t, j)                           one kernel; j in order, so results are reproducible bit for bit

In the backward pass one kernel computes dh_r = W_downᵀ dy_t(r), and its epilogue also gives dw_r = h_r · dh_r: neither
x nor y needs to be saved in expert order, and y not at all. Saved for the backward pass: the 2RF pre-activation
elements. Nothing synchronises with the device: the host only knows the numbers of rows and experts.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from colonnade.kernels.experts import triton_products as products
from colonnade.kernels.experts.deferred_wgrad import DeferredWgrad
from colonnade.kernels.experts.reference import Weights
from colonnade.kernels.triton_permute import row_contiguous


@torch.library.custom_op("colonnade::experts", mutates_args=())
def _forward(
    x: Tensor, order_R: Tensor, ends_E: Tensor, routing_TA: Tensor, up: Tensor, down: Tensor, gate: Tensor | None,
    up_b: Tensor | None, gate_b: Tensor | None, down_b: Tensor | None, activation: str, keep: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(y, a, u); a and u are empty without ``keep``."""
    x, up, down, gate = (
        row_contiguous(x),
        up.contiguous(),
        down.contiguous(),
        None if gate is None else gate.contiguous(),
    )
    rows, a, u = products.RoutedRows(order_R, ends_E, routing_TA), None, None
    if rows.R and x.shape[1]:
        h, a, u = products.up_forward(rows, x, up, gate, up_b, gate_b, activation, keep=keep)
        y = products.down_forward(rows, h, down, down_b)
    else:
        y = rows.combine(x.new_empty(rows.R, x.shape[1]), weighted=False)
    saved, F = rows.R if keep else 0, up.shape[1]
    return (
        y,
        x.new_empty(saved if gate is not None else 0, F) if a is None else a,
        x.new_empty(saved, F) if u is None else u,
    )


@_forward.register_fake
def _(x, order_R, ends_E, routing_TA, up, down, gate, up_b, gate_b, down_b, activation, keep):
    saved, F = len(order_R) if keep else 0, up.shape[1]
    return x.new_empty(x.shape), x.new_empty(saved if gate is not None else 0, F), x.new_empty(saved, F)


@torch.library.custom_op("colonnade::experts_backward", mutates_args=())
def _backward(
    dy: Tensor, x: Tensor, order_R: Tensor, ends_E: Tensor, routing_TA: Tensor, up: Tensor, down: Tensor,
    gate: Tensor | None, up_b: Tensor | None, gate_b: Tensor | None, down_b: Tensor | None, a: Tensor, u: Tensor,
    activation: str, input_grad: bool, weight_grads: bool,
) -> list[Tensor]:  # fmt: skip
    """Gradients of x, routing weights, up, down, gate and their biases; empty where there is none or none is needed."""
    weights, empty = Weights(up, down, gate, up_b, gate_b, down_b), x.new_empty
    if not (u.numel() and up.numel()):
        needed = [x if input_grad else None, routing_TA, *(weights if weight_grads else [None] * 6)]
        return [empty(0) if w is None or not w.numel() else torch.zeros_like(w).contiguous() for w in needed]
    dx, d_routing, wgrads = _dgrad(dy, x, order_R, ends_E, routing_TA, weights, a, u, activation, input_grad)
    grads = wgrads() if weight_grads else [None] * 6
    # A custom operator's results must not share memory, so each is a new tensor.
    return [empty(0) if g is None or not g.numel() else g for g in (dx, d_routing, *grads)]


def _dgrad(
    dy: Tensor, x: Tensor, order_R: Tensor, ends_E: Tensor, routing_TA: Tensor, weights: Weights, a: Tensor, u: Tensor,
    activation: str, input_grad: bool,
) -> tuple[Tensor | None, Tensor, Callable[[], list[Tensor | None]]]:  # fmt: skip
    """(dx, gradient of the routing weights, a function that computes those of the six weights)."""
    x, dy = row_contiguous(x), dy.contiguous()
    up, down, gate = (None if w is None else w.contiguous() for w in weights[:3])
    assert up is not None
    assert down is not None
    up_b, gate_b, down_b = weights[3:]
    rows = products.RoutedRows(order_R, ends_E, routing_TA)
    h, du, da, dw_R = products.hidden_dgrad(rows, dy, down, None if gate is None else a, u, activation)
    dx = products.input_dgrad(rows, du, da, up, gate) if input_grad else None
    if down_b is not None:
        valid_R = rows.row_experts < len(ends_E)
        b_RD = down_b[rows.row_experts.clamp(max=len(ends_E) - 1)].float()
        dw_R = dw_R + (dy[order_R // rows.active].float() * b_RD).sum(1).where(valid_R, 0)
    d_routing = torch.zeros_like(routing_TA).flatten().scatter_(0, order_R, dw_R.to(routing_TA.dtype))

    def wgrads() -> list[Tensor | None]:
        d_up, d_gate = products.wgrad(rows, du, da, x)
        d_down, _ = products.wgrad(rows, h, None, dy)
        return [
            d_up, d_down, d_gate,
            None if up_b is None else products.bias_grad(rows, du, of_tokens=False),
            None if gate_b is None or da is None else products.bias_grad(rows, da, of_tokens=False),
            None if down_b is None else products.bias_grad(rows, dy, of_tokens=True),
        ]  # fmt: skip

    return dx, d_routing.view_as(routing_TA), wgrads


@_backward.register_fake
def _(
    dy, x, order_R, ends_E, routing_TA, up, down, gate, up_b, gate_b, down_b, a, u, activation, input_grad, weight_grads
):
    needed = [x if input_grad else None, routing_TA]
    needed += [up, down, gate, up_b, gate_b, down_b] if weight_grads else [None] * 6
    return [x.new_empty(0) if w is None or not w.numel() else torch.empty_like(w).contiguous() for w in needed]


def _setup_context(ctx, inputs: tuple, output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)  # a and u get no gradients; zeros for them would take 4RF bytes
    ctx.save_for_backward(*inputs[:10], *output[1:])
    ctx.activation = inputs[10]


def _differentiate(ctx, dy: Tensor | None, _a: Tensor | None, _u: Tensor | None):
    if dy is None:
        return (None,) * 12
    needs, saved = ctx.needs_input_grad, ctx.saved_tensors  # read once: under recomputation they are given only once
    dx, d_routing, *rest = _backward(dy, *saved, ctx.activation, needs[0], any(needs[4:10]))
    grads = (dx, None, None, d_routing, *rest)
    needed = [
        g.view_as(w) if need and g is not None else None
        for g, w, need in zip(grads, saved[:10], needs[:10], strict=True)
    ]
    return *needed, None, None


_forward.register_autograd(_differentiate, setup_context=_setup_context)


def routed(
    x_TD: Tensor, order_R: Tensor, ends_E: Tensor, weights_TA: Tensor, weights: Weights, activation: str
) -> Tensor:
    """y_TD (see :func:`reference.routed`)."""
    keep = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x_TD, weights_TA, *weights))
    up, down, gate, up_b, gate_b, down_b = weights
    return _forward(
        x_TD, order_R, ends_E.contiguous(), weights_TA, up, down, gate, up_b, gate_b, down_b, activation, keep
    )[0]  # fmt: skip


class _DeferredRouted(Function):
    """:func:`routed` with weight gradients left to a :class:`DeferredWgrad`."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, order_R: Tensor, ends_E: Tensor, routing_TA: Tensor, deferred: DeferredWgrad,
        activation: str, _: Tensor,
    ) -> Tensor:  # fmt: skip
        keep = any(ctx.needs_input_grad)
        y, a, u = _forward(x, order_R, ends_E.contiguous(), routing_TA, *deferred.weights, activation, keep)
        ctx.save_for_backward(x, order_R, ends_E, routing_TA, a, u)
        ctx.deferred, ctx.call, ctx.activation = deferred, deferred.call(), activation
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (x, order_R, ends_E, routing_TA, a, u), weights = ctx.saved_tensors, ctx.deferred.weights
        input_grad, weight_grads = ctx.needs_input_grad[0], ctx.needs_input_grad[6]
        token = dy.new_zeros(()) if weight_grads else None
        if not (u.numel() and weights.up_EFD.numel()):
            return torch.zeros_like(x), None, None, torch.zeros_like(routing_TA), None, None, token
        ends_E = ends_E.contiguous()
        dx, d_routing, wgrads = _dgrad(
            dy, x, order_R, ends_E, routing_TA, weights, a, u, ctx.activation, input_grad
        )  # fmt: skip
        if weight_grads:
            ctx.deferred.pending[ctx.call] = lambda: [g for g in wgrads() if g is not None]
        return dx, None, None, d_routing, None, None, token


def routed_deferred(
    x_TD: Tensor, order_R: Tensor, ends_E: Tensor, weights_TA: Tensor, deferred: DeferredWgrad, activation: str
) -> Tensor:
    """y_TD with the weights of ``deferred``, which computes their gradients later."""
    return _DeferredRouted.apply(x_TD, order_R, ends_E, weights_TA, deferred, activation, deferred.token)
