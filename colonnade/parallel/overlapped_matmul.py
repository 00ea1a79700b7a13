"""Products that begin with the rows that are on this rank and go on as the other ranks' rows arrive.

    gather_products     x_tD, W_0, W_1, …    gather(x) W_iᵀ          the first products of a tensor-parallel part
    product_scatter     x_Tz, W_Dz           scatter_sum(x Wᵀ)       its last one

Sequence parallelism gathers rows before a part and scatters a sum behind it (Korthikanti et al., arXiv 2205.05198,
section 4.2.2). Done whole, each of the two stands in the way of a product. Cut into the ranks' parts, only the first
piece of it does (Wang et al., "Overlap Communication with Dependent Computation via Decomposition", ASPLOS 2023): the
own rows are multiplied while the next rank's come in, and a sum is sent off rank by rank as its parts are multiplied.
Backward each is the other, and the weight's gradient, which needs no rank, fills the gaps.

What moves the rows is a :class:`Mover`. :class:`Plain` does it by collectives that are over when the call is: the
specification, and what runs on CPUs.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import Function

from colonnade.parallel import collectives
from colonnade.parallel.axis import Axis


class Mover(Protocol):
    """Moves equal parts of rows between the ranks of an axis, all of which ask for the same in the same order."""

    axis: Axis

    def begin(self) -> None:
        """A forward pass begins."""
        ...

    def arriving(self, x_tD: Tensor, x_TD: Tensor) -> Iterator[int]:
        """Fill ``x_TD`` and tell whose rows may be used from now on: first the own, then the others' as they come."""
        ...

    def push(self, r: int, part_tD: Tensor) -> None:
        """Send rank ``r`` its part of a sum; in :func:`order`."""
        ...

    def pushed(self) -> Tensor:
        """The sum of what was sent here, which may be used after :meth:`join`."""
        ...

    def join(self, x: Tensor) -> Tensor:
        """``x`` that :meth:`pushed` gave, when it is there."""
        ...


def order(axis: Axis) -> list[int]:
    """In which order a rank deals with the others: the next one first, itself last, so that no two send to one."""
    return [(axis.rank + step) % axis.size for step in range(1, axis.size + 1)]


class Plain:
    """By collectives."""

    def __init__(self, axis: Axis):
        self.axis = axis
        self._parts: dict[int, Tensor] = {}

    def begin(self) -> None:
        """Nothing to do."""

    def arriving(self, x_tD: Tensor, x_TD: Tensor) -> Iterator[int]:
        """All at once, told in the order in which copies would come."""
        x_TD.copy_(collectives.all_gather(x_tD, self.axis.size, self.axis.group))
        yield from [self.axis.rank, *order(self.axis)[:-1]]

    def push(self, r: int, part_tD: Tensor) -> None:
        """Keep it."""
        self._parts[r] = part_tD

    def pushed(self) -> Tensor:
        """The sum."""
        y_TD = torch.cat([self._parts.pop(r) for r in range(self.axis.size)])
        return collectives.reduce_scatter(y_TD, self.axis.size, self.axis.group)

    def join(self, x: Tensor) -> Tensor:
        """There already."""
        return x


@torch.compiler.disable()  # streams, and rows that are written while they are read
def gather_products(x_tD: Tensor, weights: Sequence[Tensor], mover: Mover) -> tuple[Tensor, ...]:
    """y_Tz of each of ``weights`` (z × D), of the rows of all ranks."""
    return _GatherProducts.apply(x_tD, mover, *weights)


@torch.compiler.disable()
def product_scatter(x_Tz: Tensor, weight_Dz: Tensor, mover: Mover) -> Tensor:
    """y_tD: this rank's rows of the sum of all ranks' products."""
    return _ProductScatter.apply(x_Tz, weight_Dz, mover)


class _GatherProducts(Function):
    @staticmethod
    def forward(ctx: Any, x_tD: Tensor, mover: Mover, *weights: Tensor) -> tuple[Tensor, ...]:
        x_TD, ys = _multiplied(x_tD, [weight_zD.T for weight_zD in weights], mover)
        ctx.save_for_backward(x_TD, *weights)
        ctx.mover = mover
        return ys

    @staticmethod
    def backward(ctx: Any, *grads: Tensor):
        x_TD, *weights = ctx.saved_tensors
        mine = _summed(grads, weights, ctx.mover) if ctx.needs_input_grad[0] else None
        gradients = [
            grad_Tz.T @ x_TD if needed else None
            for grad_Tz, needed in zip(grads, ctx.needs_input_grad[2:], strict=True)
        ]
        return mine if mine is None else ctx.mover.join(mine), None, *gradients


class _ProductScatter(Function):
    @staticmethod
    def forward(ctx: Any, x_Tz: Tensor, weight_Dz: Tensor, mover: Mover) -> Tensor:
        ctx.save_for_backward(x_Tz, weight_Dz)
        ctx.mover = mover
        return mover.join(_summed([x_Tz], [weight_Dz.T], mover))

    @staticmethod
    def backward(ctx: Any, grad_tD: Tensor):
        x_Tz, weight_Dz = ctx.saved_tensors
        grad_TD, (dx_Tz,) = _multiplied(grad_tD, [weight_Dz], ctx.mover)
        return dx_Tz, grad_TD.T @ x_Tz if ctx.needs_input_grad[1] else None, None


def _multiplied(x_tD: Tensor, matrices: Sequence[Tensor], mover: Mover) -> tuple[Tensor, tuple[Tensor, ...]]:
    """(x_TD of all ranks, x_TD w for each of the ``matrices`` w_Dz), a part as soon as it is here."""
    size = mover.axis.size
    x_TD = x_tD.new_empty(len(x_tD) * size, x_tD.shape[1])
    ys = tuple(x_tD.new_empty(len(x_TD), w_Dz.shape[1]) for w_Dz in matrices)
    for r in mover.arriving(x_tD.contiguous(), x_TD):
        rows = slice(r * len(x_tD), (r + 1) * len(x_tD))
        for w_Dz, y_Tz in zip(matrices, ys, strict=True):
            torch.mm(x_TD[rows], w_Dz, out=y_Tz[rows])
    return x_TD, ys


def _summed(xs: Sequence[Tensor], matrices: Sequence[Tensor], mover: Mover) -> Tensor:
    """This rank's rows of the sum, over ranks and over the pairs of x_Tz and w_zD, of x w; to be joined."""
    share = len(xs[0]) // mover.axis.size
    for r in order(mover.axis):
        rows = slice(r * share, (r + 1) * share)
        part_tD = xs[0][rows] @ matrices[0]
        for x_Tz, w_zD in zip(xs[1:], matrices[1:], strict=True):
            part_tD.addmm_(x_Tz[rows], w_zD)
        mover.push(r, part_tD)
    return mover.pushed()
