"""Gradients of weights, summed when what others wait for has left.

The way back through experts is two things: the gradient of the rows, which travel on to other ranks, and sums over the
rows for the weights, half of all arithmetic, for which nobody waits. As one node of autograd's graph the rows leave
after both. Here the sums are owed, and paid by a node of their own, which autograd reaches after whatever was called
after its making: whoever makes a :class:`DeferredWgrad` before rows are received has the sums behind the sending of these rows'
gradients. (Qi et al., Zero Bubble, arXiv 2401.10241, section 2, part the two to fill a pipeline.)
"""

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from colonnade.kernels.experts.reference import Weights

WgradFn = Callable[[], list[Tensor]]
"""What one call owes: gradients of the weights' tensors, in their order, fresh ones."""


class DeferredWgrad:
    """Weights for one or more calls, and what these owe them."""

    def __init__(self, weights: Weights):
        self.weights, self._calls = weights, itertools.count()
        self.owed: dict[int, WgradFn] = {}
        """By call: a pipeline that asks for rows' gradients first and for weights' afterwards (zero bubble) goes back
        through a call twice, and owes once."""
        self.token = _Pay.apply(self.owed, *weights.tensors)
        """A 0 that a call takes for its weights, so that it comes before the payment on the way back."""

    def call(self) -> int:
        """A number for one more call."""
        return next(self._calls)


class _Pay(Function):
    @staticmethod
    def forward(ctx: Any, owed: dict[int, WgradFn], *tensors: Tensor) -> Tensor:
        ctx.owed = owed
        ctx.save_for_backward(*tensors)
        return tensors[0].new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        total: list[Tensor] = []
        while ctx.owed:
            found = ctx.owed.popitem()[1]()
            if total:
                torch._foreach_add_(total, found)
            else:
                total = found
        return None, *(total or map(torch.zeros_like, ctx.saved_tensors))
