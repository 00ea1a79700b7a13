"""Functional collectives, and the autograd Functions behind :class:`~colonnade.parallel.axis.Axis`.

Each collective returns a new tensor and traces under torch.compile. In-place collectives inside autograd Functions gave
silently wrong gradients under selective recomputation (an error of 0.8 in a prototype), so nothing here writes to its
input except :func:`broadcast_`, which carries no gradient. These are torch's ``_c10d_functional`` operators; this is
the only file that names torch's private communication interface.

A group is passed by name, because a string is a constant for the compiler. Uneven shards are padded to the largest one,
communicated, and trimmed.
"""

import datetime
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

if TYPE_CHECKING:
    from colonnade.parallel.axis import Axis

_ops = torch.ops._c10d_functional


def all_reduce(x: Tensor, op: str, group: str) -> Tensor:
    """Reduce ``x`` element by element over the group with ``op`` ("sum" or "max")."""
    return _ops.wait_tensor(_ops.all_reduce(x.contiguous(), op, group))


def all_gather(x: Tensor, size: int, group: str) -> Tensor:
    """Concatenate the equally shaped ``x`` of ranks 0, 1, … along dimension 0."""
    return _ops.wait_tensor(_ops.all_gather_into_tensor(x.contiguous(), size, group))


def reduce_scatter(x: Tensor, size: int, group: str) -> Tensor:
    """Return the sum over ranks of this rank's part of dimension 0, which must be divisible by ``size``."""
    return _ops.wait_tensor(_ops.reduce_scatter_tensor(x.contiguous(), "sum", size, group))


def all_to_all(x: Tensor, receive: list[int], send: list[int], group: str) -> Tensor:
    """Send ``send[r]`` rows of dimension 0 to each rank r and receive ``receive[r]`` rows from it."""
    return wait(begin_all_to_all(x, receive, send, group))


def begin_all_to_all(x: Tensor, receive: list[int], send: list[int], group: str) -> Tensor:
    """Start :func:`all_to_all`; use the result only after :func:`wait`."""
    return _ops.all_to_all_single(x.contiguous(), receive, send, group)


def wait(x: Tensor) -> Tensor:
    """Wait for a ``begin_`` function's result."""
    return _ops.wait_tensor(x)


def send(x: Tensor, to: int, group: str) -> None:
    """Send ``x`` to the group's rank ``to``; outside autograd and compilation."""
    dist.send(x.contiguous(), group=group_of(group), group_dst=to)


def receive(like: Tensor, source: int, group: str) -> Tensor:
    """Receive a tensor of ``like``'s shape and dtype from the group's rank ``source``."""
    into = torch.empty_like(like)
    dist.recv(into, group=group_of(group), group_src=source)
    return into


def broadcast_(x: Tensor, src: int, group: Any) -> None:
    """Overwrite ``x`` with that of the group's rank ``src``; for control messages, outside autograd and compilation."""
    dist.broadcast(x, group=group_of(group), group_src=src)


# -- process groups ----------------------------------------------------------------------------------------------------


def high_priority_options(timeout: datetime.timedelta) -> Any:
    """Options of a group whose NCCL kernels run on a high-priority stream; None without NCCL.

    Otherwise an all-to-all that is to overlap a matrix product of thousands of blocks would start after the last block.
    """
    if not dist.is_nccl_available():
        return None
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = timeout
    return options


def abort_process_groups() -> None:
    """Abort all NCCL groups at once, including collectives in flight."""
    dist.distributed_c10d._abort_process_group()


def group_of(name: str) -> dist.ProcessGroup:
    """Return the process group of this name."""
    return dist.distributed_c10d._resolve_process_group(name)  # pyrefly: ignore[bad-argument-type]


def store() -> dist.Store:
    """Return the default group's key-value store, for messages that must not wait for a collective."""
    return dist.distributed_c10d._get_default_store()


def clear_sharding_cache() -> None:
    """Clear torch's DTensor sharding cache: its entries keep meshes alive, and with them groups and threads."""
    from torch.distributed.tensor import debug  # a second of imports, where there are no DTensors

    debug._clear_sharding_prop_cache()


# -- autograd Functions ------------------------------------------------------------------------------------------------


def pad_to(x: Tensor, dim: int, n: int) -> Tensor:
    """Pad ``x`` with zeros at the end of ``dim`` to size n."""
    missing = n - x.shape[dim]
    return x if missing == 0 else F.pad(x, [0, 0] * (x.dim() - 1 - dim % x.dim()) + [0, missing])


def gather_rows(rows: Tensor, axis: "Axis") -> Tensor:
    """All-gather along dimension 0, by the axis' small collectives where they support it."""
    small = axis.small_collectives
    if small is not None and small.can_gather(rows):
        return small.gather(rows)
    return all_gather(rows, axis.size, axis.group)


def _slice(x: Tensor, axis: "Axis", dim: int) -> Tensor:
    start, stop = axis.part(x.shape[dim])
    return x.narrow(dim, start, stop - start)


def _all_gather_dim(x: Tensor, axis: "Axis", dim: int, n: int) -> Tensor:
    rows = pad_to(x, dim, -(-n // axis.size)).movedim(dim, 0)
    return gather_rows(rows, axis)[:n].movedim(0, dim)


def _reduce_scatter_dim(x: Tensor, axis: "Axis", dim: int) -> Tensor:
    n = x.shape[dim]
    rows = pad_to(x, dim, -(-n // axis.size) * axis.size).movedim(dim, 0)
    start, stop = axis.part(n)
    return reduce_scatter(rows, axis.size, axis.group)[: stop - start].movedim(0, dim)


class _FanOut(Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: str) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return all_reduce(grad, "sum", ctx.group), None


class _FanIn(Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: str) -> Tensor:
        return all_reduce(x, "sum", group)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad, None


class _Gather(Function):
    @staticmethod
    def forward(ctx, x: Tensor, axis: "Axis", dim: int, n: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return _all_gather_dim(x, axis, dim, n)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return _reduce_scatter_dim(grad, ctx.axis, ctx.dim), None, None, None


class _ScatterSum(Function):
    @staticmethod
    def forward(ctx, x: Tensor, axis: "Axis", dim: int) -> Tensor:
        ctx.axis, ctx.dim, ctx.n = axis, dim, x.shape[dim]
        return _reduce_scatter_dim(x, axis, dim)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return _all_gather_dim(grad, ctx.axis, ctx.dim, ctx.n), None, None


class _Split(Function):
    @staticmethod
    def forward(ctx, x: Tensor, axis: "Axis", dim: int) -> Tensor:
        ctx.axis, ctx.dim, ctx.n = axis, dim, x.shape[dim]
        return _slice(x, axis, dim).contiguous()

    @staticmethod
    def backward(ctx, grad: Tensor):
        return _all_gather_dim(grad, ctx.axis, ctx.dim, ctx.n), None, None


class _Join(Function):
    @staticmethod
    def forward(ctx, x: Tensor, axis: "Axis", dim: int, n: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return _all_gather_dim(x, axis, dim, n)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return _slice(grad, ctx.axis, ctx.dim), None, None, None


class _Exchange(Function):
    @staticmethod
    def forward(ctx, x: Tensor, send: list[int], receive: list[int], group: str) -> Tensor:
        ctx.send, ctx.receive, ctx.group = send, receive, group
        return all_to_all(x, receive, send, group)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return all_to_all(grad, ctx.send, ctx.receive, ctx.group), None, None, None


class PendingExchange:
    """One asynchronous all-to-all, forward and later backward, shared by its begin and finish."""

    def __init__(self, send: list[int], receive: list[int], group: str):
        self.send, self.receive, self.group = send, receive, group
        self.gradient: Tensor | None = None
        """The input's gradient while its all-to-all is in flight."""


class _BeginExchange(Function):
    @staticmethod
    def forward(ctx, x: Tensor, pending: PendingExchange) -> Tensor:
        ctx.pending = pending
        return begin_all_to_all(x, pending.receive, pending.send, pending.group)

    @staticmethod
    def backward(ctx, grad: Tensor):
        # ``grad`` is a placeholder: the real gradient is in flight.
        gradient, ctx.pending.gradient = ctx.pending.gradient, None
        return wait(gradient), None


class _FinishExchange(Function):
    @staticmethod
    def forward(ctx, x: Tensor, pending: PendingExchange) -> Tensor:
        ctx.pending = pending
        y = wait(x)
        return y.view_as(y)

    @staticmethod
    def backward(ctx, grad: Tensor):
        pending = ctx.pending
        pending.gradient = begin_all_to_all(grad, pending.send, pending.receive, pending.group)
        return grad.new_zeros(()).expand_as(grad), None


# As Axis calls them.
fan_out, fan_in = _FanOut.apply, _FanIn.apply
gather, scatter_sum = _Gather.apply, _ScatterSum.apply
split, join = _Split.apply, _Join.apply
exchange, begin_exchange, finish_exchange = _Exchange.apply, _BeginExchange.apply, _FinishExchange.apply
