"""Defers weight gradients (wgrad) until input gradients (dgrad) have been sent.

The backward pass of the experts has two parts: the gradient of the rows, which other ranks wait for, and the weight
gradients, half of all arithmetic, which no rank waits for. As one autograd node, both finish before the rows are sent.
Here the weight gradients are computed by a separate node. Autograd runs it after every node created later than it,
so a :class:`DeferredWgrad` created before the rows are received computes weight gradients while the gradients of those
rows are being sent. (Qi et al., Zero Bubble, arXiv 2401.10241, section 2, which fills a pipeline with the second part.)
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
"""Computes the weight gradients of one call: new tensors, in the order of ``Weights.tensors``."""


class DeferredWgrad:
    """Weights shared by one or more calls, and the weight gradients these calls have deferred."""

    def __init__(self, weights: Weights):
        self.weights, self._calls = weights, itertools.count()
        self.pending: dict[int, WgradFn] = {}
        """Keyed by call, because a zero-bubble pipeline runs a call's backward twice (first for the rows, then for the
        weights), and must add its weight gradients once."""
        self.token = _AccumulateWgrad.apply(self.pending, *weights.tensors)
        """A scalar 0 that each call takes as an input, so that its backward runs before the deferred node."""

    def call(self) -> int:
        """A key for one more call."""
        return next(self._calls)


class _AccumulateWgrad(Function):
    @staticmethod
    def forward(ctx: Any, pending: dict[int, WgradFn], *tensors: Tensor) -> Tensor:
        ctx.pending = pending
        ctx.save_for_backward(*tensors)
        return tensors[0].new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        total: list[Tensor] = []
        while ctx.pending:
            grads = ctx.pending.popitem()[1]()
            if total:
                torch._foreach_add_(total, grads)
            else:
                total = grads
        return None, *(total or map(torch.zeros_like, ctx.saved_tensors))
