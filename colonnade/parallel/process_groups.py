"""Process groups for programs that hold groups themselves, instead of a plan: the compatibility doors.

A plan's mesh is laid once, by all ranks together (:mod:`colonnade.parallel.distributed_context`). Here a program asks
for one group after another, perhaps inside a group of its own of which other ranks know nothing; so only the members
of a new group take part in making it. A group is None where there is one process and nothing to talk over.
"""

import atexit
import datetime
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from colonnade.errors import PlanError
from colonnade.parallel import collectives
from colonnade.parallel.axis import SOLO, Axis, group_name, world_axis
from colonnade.parallel.hierarchical_all_to_all import HierarchicalAllToAll, Sizes
from colonnade.parallel.launch import beside, place

TIMEOUT = datetime.timedelta(days=1)
"""After which a collective gives up: as long as Tutel waits."""
Group = Any
"""A process group of torch, or None: all processes."""


class Place(NamedTuple):
    """Where this process stands."""

    rank: int
    world: int
    device: torch.device


def join(backend: str, timeout: datetime.timedelta) -> Place:
    """Join the group of the processes that torchrun started together; a process by itself makes none.

    ``backend`` is "nccl" (a GPU a process) or "gloo" (CPUs). A group that exists already is used as it is.
    """
    if backend not in ("nccl", "gloo"):
        raise PlanError(f"there is no backend '{backend}' here; use 'nccl' or 'gloo'")
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if backend == "nccl" and not gpus:
        raise PlanError("backend 'nccl' needs a GPU, and this machine has none; use backend='gloo'")
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", dist.get_node_local_rank(0) % gpus)
        torch.cuda.set_device(device)
    rank, world = place()
    if not dist.is_initialized() and (world > 1 or dist.is_torchelastic_launched()):
        dist.init_process_group("cpu:gloo,cuda:nccl" if backend == "nccl" else "gloo", timeout=timeout)
        atexit.register(_leave)
    if dist.is_initialized():
        rank, world = dist.get_rank(), dist.get_world_size()
    return Place(rank, world, device)


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def all_ranks() -> Group:
    """The group of all processes; None where there is one."""
    return dist.group.WORLD if dist.is_initialized() else None


def axis_of(group: Group = None) -> Axis:
    """``group`` as an axis."""
    if group is None:
        return world_axis()
    return Axis("group", dist.get_world_size(group), dist.get_rank(group), group_name(group))


def barrier(group: Group = None) -> None:
    """Wait for all of ``group``."""
    if axis_of(group).size > 1:
        dist.barrier(group=group)


def inner(size: int, parent: Group = None) -> Group:
    """This rank's group when ``parent`` is cut into runs of ``size`` ranks that follow one another."""
    axis = axis_of(parent)
    _divides(size, axis)
    start = axis.rank // size * size
    return _among(parent, axis, range(start, start + size))


def outer(size: int, parent: Group = None) -> Group:
    """The ranks that have this rank's place in their runs of ``size``."""
    axis = axis_of(parent)
    _divides(size, axis)
    return _among(parent, axis, range(axis.rank % size, axis.size, size))


def web_of(group: Group, *, two_steps: bool) -> tuple[HierarchicalAllToAll, Sizes]:
    """What carries one row to each rank of ``group`` and one from each; in ``two_steps``, first among the ranks of a
    machine, where the group is of all ranks and of several machines with several ranks each.
    """
    axis, near = axis_of(group), beside()
    ones = [1] * axis.size
    if not two_steps or near == 1 or axis.size != world_axis().size or axis.size % near or axis.size == near:
        return HierarchicalAllToAll(axis), Sizes(ones, ones)
    web = HierarchicalAllToAll(axis, axis_of(inner(near, group)), axis_of(outer(near, group)))
    return web, Sizes(ones, ones, [[1] * (axis.size // near)] * near)


def _divides(size: int, axis: Axis) -> None:
    if size < 1 or axis.size % size:
        raise PlanError(f"{axis.size} ranks do not divide into groups of {size}; use a divisor of {axis.size}")


_made: dict[tuple[int, ...], Group] = {}
_made_in: list[Group] = []


def _among(parent: Group, axis: Axis, numbers: range) -> Group:
    """The group of these ranks of ``parent``, which all of them ask for; made once, so that layers share it."""
    if axis is SOLO or len(numbers) == axis.size:
        return all_ranks() if parent is None else parent
    if not _made_in or _made_in[0] is not dist.group.WORLD:  # the old ones ended with their world
        _made.clear()
        _made_in[:] = [dist.group.WORLD]
    ranks = dist.get_process_group_ranks(dist.group.WORLD if parent is None else parent)
    members = tuple(ranks[i] for i in numbers)
    if members not in _made:
        _made[members] = dist.new_group(list(members), use_local_synchronization=True)
    return _made[members]


def reduce_(x: Tensor, op: Any, group: Group = None) -> Tensor:
    """``x`` of all ranks under ``op`` (a ReduceOp of torch, or its name in lower case), without a gradient."""
    axis = axis_of(group)
    if axis.size == 1:
        return x.detach()
    return collectives.all_reduce(x.detach(), op if isinstance(op, str) else op.name.lower(), axis.group)
