"""Process groups for programs that manage groups themselves instead of using a plan: the compatibility layers.

A plan's mesh is built once, by all ranks together (:mod:`colonnade.parallel.distributed_context`). Here a program asks
for one group after another, perhaps for a group that other ranks are not aware of; so only the members of a new group
take part in creating it. A group is None where there is only one process.
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
from colonnade.parallel.hierarchical_all_to_all import ExchangeSizes, HierarchicalAllToAll
from colonnade.parallel.launch import local_world_size, rank_and_world

TIMEOUT = datetime.timedelta(days=1)
"""Of a collective; Tutel's."""
Group = Any
"""A process group of torch, or None: all processes."""


class ProcessInfo(NamedTuple):
    """Rank, world size and device of this process."""

    rank: int
    world: int
    device: torch.device


def init_process_group(backend: str, timeout: datetime.timedelta) -> ProcessInfo:
    """Join the default group of the processes that torchrun started; a single process makes none.

    ``backend`` is "nccl" (a GPU per process) or "gloo" (CPUs). An existing default group is used unchanged.
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
    rank, world = rank_and_world()
    if not dist.is_initialized() and (world > 1 or dist.is_torchelastic_launched()):
        dist.init_process_group("cpu:gloo,cuda:nccl" if backend == "nccl" else "gloo", timeout=timeout)
        atexit.register(_destroy)
    if dist.is_initialized():
        rank, world = dist.get_rank(), dist.get_world_size()
    return ProcessInfo(rank, world, device)


def _destroy() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def all_ranks() -> Group:
    """The group of all processes; None in a single process."""
    return dist.group.WORLD if dist.is_initialized() else None


def axis_of(group: Group = None) -> Axis:
    """``group`` as an axis."""
    if group is None:
        return world_axis()
    return Axis("group", dist.get_world_size(group), dist.get_rank(group), group_name(group))


def barrier(group: Group = None) -> None:
    """Wait for all ranks of ``group``."""
    if axis_of(group).size > 1:
        dist.barrier(group=group)


def contiguous_group(size: int, parent: Group = None) -> Group:
    """This rank's group when ``parent`` is divided into runs of ``size`` consecutive ranks."""
    axis = axis_of(parent)
    _check_divides(size, axis)
    start = axis.rank // size * size
    return _subgroup(parent, axis, range(start, start + size))


def strided_group(size: int, parent: Group = None) -> Group:
    """The ranks with this rank's index in their runs of ``size`` consecutive ranks."""
    axis = axis_of(parent)
    _check_divides(size, axis)
    return _subgroup(parent, axis, range(axis.rank % size, axis.size, size))


def make_all_to_all(group: Group, *, two_steps: bool) -> tuple[HierarchicalAllToAll, ExchangeSizes]:
    """An all-to-all over ``group``, and the sizes of one row to and from each rank.

    With ``two_steps`` it is hierarchical, where the group has all ranks and there are several per machine.
    """
    axis, near = axis_of(group), local_world_size()
    ones = [1] * axis.size
    if not two_steps or near == 1 or axis.size != world_axis().size or axis.size % near or axis.size == near:
        return HierarchicalAllToAll(axis), ExchangeSizes(ones, ones)
    exchange = HierarchicalAllToAll(axis, axis_of(contiguous_group(near, group)), axis_of(strided_group(near, group)))
    return exchange, ExchangeSizes(ones, ones, [[1] * (axis.size // near)] * near)


def _check_divides(size: int, axis: Axis) -> None:
    if size < 1 or axis.size % size:
        raise PlanError(f"{axis.size} ranks cannot be divided into groups of {size}; use a divisor of {axis.size}")


_groups: dict[tuple[int, ...], Group] = {}
_default_group: list[Group] = []
"""The default group in which :data:`_groups` were made."""


def _subgroup(parent: Group, axis: Axis, numbers: range) -> Group:
    """The group of these ranks of ``parent``, created by all of them on first use and then shared."""
    if axis is SOLO or len(numbers) == axis.size:
        return all_ranks() if parent is None else parent
    if not _default_group or _default_group[0] is not dist.group.WORLD:  # the old groups ended with their world
        _groups.clear()
        _default_group[:] = [dist.group.WORLD]
    ranks = dist.get_process_group_ranks(dist.group.WORLD if parent is None else parent)
    members = tuple(ranks[i] for i in numbers)
    if members not in _groups:
        _groups[members] = dist.new_group(list(members), use_local_synchronization=True)
    return _groups[members]


def reduce_(x: Tensor, op: Any, group: Group = None) -> Tensor:
    """All-reduce ``x`` with ``op`` (a ReduceOp of torch, or its name in lower case), without a gradient."""
    axis = axis_of(group)
    if axis.size == 1:
        return x.detach()
    return collectives.all_reduce(x.detach(), op if isinstance(op, str) else op.name.lower(), axis.group)
