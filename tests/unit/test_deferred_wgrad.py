"""Deferred weight gradients of experts run after rows are sent and before the next wait."""

import gc
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from colonnade.kernels.experts.deferred_wgrad import DeferredWgrad
from colonnade.kernels.experts.reference import Weights

EVENTS: list[str] = []


class Record(Function):
    """Records an event in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, what: str) -> Tensor:
        ctx.what = what
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        EVENTS.append(ctx.what)
        return grad, None


class DeferredDouble(Function):
    """Multiplies by 2, and defers weight gradients of ones."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, later: DeferredWgrad, what: str, _: Tensor) -> Tensor:
        ctx.later, ctx.call, ctx.what = later, later.call(), what
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        what, weights = ctx.what, ctx.later.weights
        EVENTS.append(f"rows {what}")

        def weight_grads() -> list[Tensor]:
            EVENTS.append(f"sums {what}")
            return [torch.ones_like(w) for w in weights.tensors]

        ctx.later.pending[ctx.call] = weight_grads
        return 2 * grad, None, None, grad.new_zeros(())


def test_weight_gradients_run_after_all_rows_are_sent() -> None:
    """In the call order of a layer over several ranks: a part is sent before the previous part is computed."""
    EVENTS.clear()
    x, up, down = (torch.ones(2, 2, 2, requires_grad=True) for _ in range(3))
    first = Record.apply(x, "waits for 0")
    deferred = DeferredWgrad(Weights(up, down))
    second = Record.apply(x, "waits for 1")
    y = DeferredDouble.apply(Record.apply(first, "sends 0"), deferred, "0", deferred.token)
    y = y + DeferredDouble.apply(Record.apply(second, "sends 1"), deferred, "1", deferred.token)
    grads = torch.autograd.grad(y.sum(), [x, up, down])
    assert EVENTS[:5] == ["rows 1", "sends 1", "rows 0", "sends 0", "waits for 1"]
    assert sorted(EVENTS[5:7]) == ["sums 0", "sums 1"]
    assert EVENTS[7:] == ["waits for 0"]
    assert not deferred.pending
    assert [sorted(set(grad.flatten().tolist())) for grad in grads] == [[4.0], [2.0], [2.0]]


def test_separate_input_and_weight_backward_computes_them_once() -> None:
    """As in a zero-bubble pipeline: two backward passes through each call."""
    x, up, down = (torch.ones(2, 2, 2, requires_grad=True) for _ in range(3))
    deferred = DeferredWgrad(Weights(up, down))
    y = DeferredDouble.apply(x, deferred, "0", deferred.token) + DeferredDouble.apply(x, deferred, "1", deferred.token)
    (dx,) = torch.autograd.grad(y.sum(), [x], retain_graph=True)
    grads = torch.autograd.grad(y.sum(), [up, down])
    assert not deferred.pending
    assert [sorted(set(grad.flatten().tolist())) for grad in (dx, *grads)] == [[4.0], [2.0], [2.0]]


def test_without_deferred_calls_gradients_are_zero() -> None:
    up, down = (torch.ones(1, 2, 2, requires_grad=True) for _ in range(2))
    grads = torch.autograd.grad(DeferredWgrad(Weights(up, down)).token, [up, down])
    assert not any(grad.any() for grad in grads)


def test_deferred_gradients_are_freed() -> None:
    """Weights and pending gradients are freed without a garbage collector."""
    gc.disable()
    try:
        up = torch.ones(1, 2, 2, requires_grad=True)
        deferred = DeferredWgrad(Weights(up, up))
        y = DeferredDouble.apply(torch.ones(2, requires_grad=True), deferred, "", deferred.token)
        y.sum().backward()
        reference = weakref.ref(deferred)
        del deferred, y
        assert reference() is None
    finally:
        gc.enable()
