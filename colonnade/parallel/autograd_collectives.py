"""The conjugate pairs behind :class:`~colonnade.parallel.axis.Axis`: what goes forward, and its gradient back.

Uneven shares are padded to the largest one, moved, and trimmed.
"""

from typing import TYPE_CHECKING

from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from colonnade.parallel import collectives

if TYPE_CHECKING:
    from colonnade.parallel.axis import Axis


def _share(x: Tensor, axis: "Axis", dim: int) -> Tensor:
    start, stop = axis.part(x.shape[dim])
    return x.narrow(dim, start, stop - start)


def padded(x: Tensor, dim: int, n: int) -> Tensor:
    """``x`` with zeros behind it, n along ``dim``."""
    missing = n - x.shape[dim]
    return x if missing == 0 else F.pad(x, [0, 0] * (x.dim() - 1 - dim % x.dim()) + [0, missing])


def all_gather(rows: Tensor, axis: "Axis") -> Tensor:
    """The rows of all ranks, one after another along dimension 0."""
    if axis.small is not None and axis.small.gathers(rows):
        return axis.small.gather(rows)
    return collectives.all_gather(rows, axis.size, axis.group)


def _whole(x: Tensor, axis: "Axis", dim: int, n: int) -> Tensor:
    share = -(-n // axis.size)
    rows = padded(x, dim, share).movedim(dim, 0)
    return all_gather(rows, axis)[:n].movedim(0, dim)


def _sum_share(x: Tensor, axis: "Axis", dim: int) -> Tensor:
    n = x.shape[dim]
    rows = padded(x, dim, -(-n // axis.size) * axis.size).movedim(dim, 0)
    start, stop = axis.part(n)
    return collectives.reduce_scatter(rows, axis.size, axis.group)[: stop - start].movedim(0, dim)


class _FanOut(Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: str) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return collectives.all_reduce(grad, "sum", ctx.group), None


class _FanIn(Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: str) -> Tensor:
        return collectives.all_reduce(x, "sum", group)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad, None


class _Gather(Function):
    @staticmethod
    def forward(ctx, x: Tensor, axis: "Axis", dim: int, n: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return _whole(x, axis, dim, n)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return _sum_share(grad, ctx.axis, ctx.dim), None, None, None


class _ScatterSum(Function):
    @staticmethod
    def forward(ctx, x: Tensor, axis: "Axis", dim: int) -> Tensor:
        ctx.axis, ctx.dim, ctx.n = axis, dim, x.shape[dim]
        return _sum_share(x, axis, dim)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return _whole(grad, ctx.axis, ctx.dim, ctx.n), None, None


class _Split(Function):
    @staticmethod
    def forward(ctx, x: Tensor, axis: "Axis", dim: int) -> Tensor:
        ctx.axis, ctx.dim, ctx.n = axis, dim, x.shape[dim]
        return _share(x, axis, dim).contiguous()

    @staticmethod
    def backward(ctx, grad: Tensor):
        return _whole(grad, ctx.axis, ctx.dim, ctx.n), None, None


class _Join(Function):
    @staticmethod
    def forward(ctx, x: Tensor, axis: "Axis", dim: int, n: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return _whole(x, axis, dim, n)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return _share(grad, ctx.axis, ctx.dim), None, None, None


class _Exchange(Function):
    @staticmethod
    def forward(ctx, x: Tensor, send: list[int], receive: list[int], group: str) -> Tensor:
        ctx.send, ctx.receive, ctx.group = send, receive, group
        return collectives.all_to_all(x, receive, send, group)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return collectives.all_to_all(grad, ctx.send, ctx.receive, ctx.group), None, None, None


class Journey:
    """One exchange under way, forward and later backward: what :meth:`Axis.begin_exchange` and ``finish`` share."""

    def __init__(self, send: list[int], receive: list[int], group: str):
        self.send, self.receive, self.group = send, receive, group
        self.gradient: Tensor | None = None
        """Of what was sent, on its way back."""


class _Begin(Function):
    @staticmethod
    def forward(ctx, x: Tensor, journey: Journey) -> Tensor:
        ctx.journey = journey
        return collectives.begin_all_to_all(x, journey.receive, journey.send, journey.group)

    @staticmethod
    def backward(ctx, grad: Tensor):
        # What autograd hands over stands for the gradient that is under way.
        gradient, ctx.journey.gradient = ctx.journey.gradient, None
        return collectives.wait(gradient), None


class _Finish(Function):
    @staticmethod
    def forward(ctx, x: Tensor, journey: Journey) -> Tensor:
        ctx.journey = journey
        y = collectives.wait(x)
        return y.view_as(y)

    @staticmethod
    def backward(ctx, grad: Tensor):
        journey = ctx.journey
        journey.gradient = collectives.begin_all_to_all(grad, journey.send, journey.receive, journey.group)
        return grad.new_zeros(()).expand_as(grad), None


# As Axis calls them.
fan_out, fan_in = _FanOut.apply, _FanIn.apply
gather, scatter_sum = _Gather.apply, _ScatterSum.apply
split, join = _Split.apply, _Join.apply
exchange, begin, finish = _Exchange.apply, _Begin.apply, _Finish.apply
