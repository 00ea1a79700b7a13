"""Functional collectives: each returns a new tensor and traces under torch.compile.

In-place collectives inside autograd Functions gave silently wrong gradients under selective recomputation (an error
of 0.8 in a prototype), so nothing here writes to its input (but :func:`broadcast_`, which carries no gradient). These
are torch's ``_c10d_functional`` operators: the one file of the project that names a private interface of torch for
communication.

A group is passed by name, because a string is a constant for the compiler.
"""

import datetime
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_ops = torch.ops._c10d_functional


def all_reduce(x: Tensor, op: str, group: str) -> Tensor:
    """The element-wise ``op`` ("sum" or "max") of ``x`` over the group."""
    return _ops.wait_tensor(_ops.all_reduce(x.contiguous(), op, group))


def all_gather(x: Tensor, size: int, group: str) -> Tensor:
    """The ``x`` of ranks 0, 1, … laid one after another along dimension 0; shapes must agree."""
    return _ops.wait_tensor(_ops.all_gather_into_tensor(x.contiguous(), size, group))


def reduce_scatter(x: Tensor, size: int, group: str) -> Tensor:
    """Rank r receives the sum of everybody's r-th part of dimension 0, which must divide by ``size``."""
    return _ops.wait_tensor(_ops.reduce_scatter_tensor(x.contiguous(), "sum", size, group))


def all_to_all(x: Tensor, receive: list[int], send: list[int], group: str) -> Tensor:
    """Rows ``send[0]``, ``send[1]``, … of dimension 0 go to ranks 0, 1, …; ``receive`` says what comes back."""
    return wait(begin_all_to_all(x, receive, send, group))


def begin_all_to_all(x: Tensor, receive: list[int], send: list[int], group: str) -> Tensor:
    """:func:`all_to_all` whose result may be used only after :func:`wait`."""
    return _ops.all_to_all_single(x.contiguous(), receive, send, group)


def wait(x: Tensor) -> Tensor:
    """What a ``begin_`` function returned, once it is there."""
    return _ops.wait_tensor(x)


def send(x: Tensor, to: int, group: str) -> None:
    """Hand ``x`` to the group's rank ``to``; outside autograd and compilation."""
    dist.send(x.contiguous(), group=group_of(group), group_dst=to)


def receive(like: Tensor, source: int, group: str) -> Tensor:
    """What the group's rank ``source`` sent, of the shape and type of ``like``."""
    into = torch.empty_like(like)
    dist.recv(into, group=group_of(group), group_src=source)
    return into


def urgent(timeout: datetime.timedelta) -> Any:
    """Options of a group whose collectives on a GPU go before kernels that wait: an exchange under way beside a product
    of thousands of blocks would else begin when the last of them has. None where there is no NCCL.
    """
    if not dist.is_nccl_available():
        return None
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = timeout
    return options


def abandon_groups() -> None:
    """End all groups on GPUs at once, with whatever is under way in them."""
    dist.distributed_c10d._abort_process_group()


def group_of(name: str) -> dist.ProcessGroup:
    """The process group of this name."""
    return dist.distributed_c10d._resolve_process_group(name)  # pyright: ignore[reportArgumentType]


def store() -> dist.Store:
    """The key-value store over which the process group was made: for messages that must not wait for a collective."""
    return dist.distributed_c10d._get_default_store()


def forget_meshes() -> None:
    """Empty torch's memory of how operators shard DTensors: each entry holds a mesh, and with it groups and threads."""
    from torch.distributed.tensor import debug  # a second of imports, where there are no DTensors

    debug._clear_sharding_prop_cache()


def broadcast_(x: Tensor, src: int, group: Any) -> None:
    """Overwrite ``x`` with that of the group's rank ``src``; for control messages, outside autograd and compilation."""
    dist.broadcast(x, group=group_of(group), group_src=src)
