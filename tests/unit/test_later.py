"""What experts owe their weights is paid after rows have left, and before anybody waits for others."""

import gc
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from colonnade.kernels.experts.deferred_wgrad import DeferredWgrad
from colonnade.kernels.experts.reference import Weights

SAID: list[str] = []


class Says(Function):
    """Notes when its turn comes on the way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, what: str) -> Tensor:
        ctx.what = what
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        SAID.append(ctx.what)
        return grad, None


class Owes(Function):
    """Multiplies by 2, and owes both weights ones."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, later: DeferredWgrad, what: str, _: Tensor) -> Tensor:
        ctx.later, ctx.call, ctx.what = later, later.call(), what
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        what, weights = ctx.what, ctx.later.weights
        SAID.append(f"rows {what}")

        def sums() -> list[Tensor]:
            SAID.append(f"sums {what}")
            return [torch.ones_like(w) for w in weights.tensors]

        ctx.later.pending[ctx.call] = sums
        return 2 * grad, None, None, grad.new_zeros(())


def test_sums_come_after_all_rows_have_left() -> None:
    """In the order in which a layer over several ranks calls: a part is sent before the one before it is worked at."""
    SAID.clear()
    x, up, down = (torch.ones(2, 2, 2, requires_grad=True) for _ in range(3))
    first = Says.apply(x, "waits for 0")
    later = DeferredWgrad(Weights(up, down))
    second = Says.apply(x, "waits for 1")
    y = Owes.apply(Says.apply(first, "sends 0"), later, "0", later.token)
    y = y + Owes.apply(Says.apply(second, "sends 1"), later, "1", later.token)
    grads = torch.autograd.grad(y.sum(), [x, up, down])
    assert SAID[:5] == ["rows 1", "sends 1", "rows 0", "sends 0", "waits for 1"]
    assert sorted(SAID[5:7]) == ["sums 0", "sums 1"]
    assert SAID[7:] == ["waits for 0"]
    assert not later.pending
    assert [sorted(set(grad.flatten().tolist())) for grad in grads] == [[4.0], [2.0], [2.0]]


def test_who_is_asked_for_rows_first_and_for_weights_afterwards_owes_once() -> None:
    """As a pipeline without bubbles goes back, twice through each call."""
    x, up, down = (torch.ones(2, 2, 2, requires_grad=True) for _ in range(3))
    later = DeferredWgrad(Weights(up, down))
    y = Owes.apply(x, later, "0", later.token) + Owes.apply(x, later, "1", later.token)
    (dx,) = torch.autograd.grad(y.sum(), [x], retain_graph=True)
    grads = torch.autograd.grad(y.sum(), [up, down])
    assert not later.pending
    assert [sorted(set(grad.flatten().tolist())) for grad in (dx, *grads)] == [[4.0], [2.0], [2.0]]


def test_who_owes_nothing_gives_zeros() -> None:
    up, down = (torch.ones(1, 2, 2, requires_grad=True) for _ in range(2))
    grads = torch.autograd.grad(DeferredWgrad(Weights(up, down)).token, [up, down])
    assert not any(grad.any() for grad in grads)


def test_nothing_of_it_is_left_behind() -> None:
    """Weights, and what was owed, are freed without a garbage collector."""
    gc.disable()
    try:
        up = torch.ones(1, 2, 2, requires_grad=True)
        later = DeferredWgrad(Weights(up, up))
        y = Owes.apply(torch.ones(2, requires_grad=True), later, "", later.token)
        y.sum().backward()
        gone = weakref.ref(later)
        del later, y
        assert gone() is None
    finally:
        gc.enable()
