"""Collectives with Tutel's names, and an optimizer that shards the state of shared parameters (ZeRO stage 1).

Collectives by Tutel's names. Those called ``simple_`` and ``batch_`` have no gradient; the others have:

    all_to_all(x, i, j)      cut along j, joined along i        backward: cut along i, joined along j
    all_gather, fused        joined along a dimension           summed, and cut
    all_gather               the same                           cut: for ranks that all use it alike
    zero_gather              joined along the first one         summed, and cut
    reduce_scatter           summed, and cut                    joined
    spatial_split            cut                                joined
    allreduce_forward        summed                             handed on
    allreduce_backward       handed on                          summed

A ``group`` of None is all processes; a process by itself gets its input back.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from colonnade.errors import ConfigError, PlanError
from colonnade.parallel import collectives, process_groups
from colonnade.parallel.axis import Axis
from colonnade.parallel.process_groups import Group, axis_of, barrier


class TutelDistributedOptimizer:
    """ZeRO-1 optimizer of this rank's experts and its shard of every other parameter (arXiv 1910.02054).

    ``average_shared`` divides the gradients of the latter, which are summed over ``group``, by its size.
    """

    def __init__(self, params: Iterable[nn.Parameter], group: Group = None, average_shared: bool = False):
        everything = list(params)
        self.params = [p for p in everything if not hasattr(p, "_tutel_expert")]
        self.expert_params = [p for p in everything if hasattr(p, "_tutel_expert")]
        self.group, self.average_shared = group, average_shared
        self.axis = axis_of(group)
        self.local_optim: Optimizer | None = None

    def warp_local(
        self, local_optim: Callable[..., Optimizer], *args: Any, **kwargs: Any
    ) -> "TutelDistributedOptimizer":
        """Make ``local_optim(parameters, *args, **kwargs)`` over this rank's part."""
        self.virt_params = [self._part(p.detach()).clone().requires_grad_(p.requires_grad) for p in self.params]
        self.local_optim = local_optim(self.virt_params + self.expert_params, *args, **kwargs)
        return self

    def _padded(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1)
        return torch.nn.functional.pad(flat, (0, -len(flat) % self.axis.size))

    def _part(self, x: Tensor) -> Tensor:
        return self.axis.split(self._padded(x), 0)

    def zero_grad(self) -> None:
        """Clear all gradients."""
        for p in (*self.params, *self.expert_params, *getattr(self, "virt_params", ())):
            p.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """One step; afterwards all ranks have all of the shared parameters."""
        if self.local_optim is None:
            raise ConfigError("no optimizer to step; call warp_local(torch.optim.SGD, lr=…) first")
        for p, part in zip(self.params, self.virt_params, strict=True):
            if p.grad is not None:
                grad = self.axis.scatter_sum(self._padded(p.grad), 0)
                part.grad = grad / self.axis.size if self.average_shared else grad
        self.local_optim.step()
        for p, part in zip(self.params, self.virt_params, strict=True):
            whole = self.axis.join(part.detach(), 0, len(part) * self.axis.size)
            p.copy_(whole[: p.numel()].view(p.shape))


__all__ = [
    "TutelDistributedOptimizer", "all_gather", "all_to_all", "all_to_all_single", "allreduce_backward",
    "allreduce_forward", "barrier", "batch_all_gather_v", "batch_all_to_all_v", "create_groups_from_world",
    "create_standalone_group", "get_world_rank", "get_world_size", "reduce_scatter", "simple_all_gather",
    "simple_all_reduce", "simple_all_to_all", "simple_reduce_scatter", "simple_split", "spatial_split", "zero_gather",
    "zero_scatter",
]  # fmt: skip


class Groups(NamedTuple):
    """This rank's groups when all ranks are divided into ``group_count`` groups of consecutive ranks, each with a copy
    of the model.
    """

    global_size: int
    global_rank: int
    group_count: int
    data_rank: int
    """The number of this rank's group."""
    model_size: int
    model_rank: int
    """This rank's number in its group."""
    data_group: Group
    """The ranks of the same number in their groups."""
    model_group: Group
    """The ranks of this group."""
    global_group: Group
    is_distributed: bool
    local_device: torch.device | None
    dist_print: Callable[..., None]
    """print, on rank 0 only."""

    @property
    def is_cuda(self) -> bool:
        """Whether the session's device is a GPU."""
        return self.local_device is not None and self.local_device.type == "cuda"


def get_world_size(group: Group = None) -> int:
    """Ranks in ``group``; 1 without one."""
    return axis_of(group).size


def get_world_rank(group: Group = None) -> int:
    """This rank's number in ``group``; 0 without one."""
    return axis_of(group).rank


def create_groups_from_world(group_count: int, include_init: str | None = None, parent_group: Group = None) -> Groups:
    """``group_count`` groups, or groups of −``group_count`` ranks, out of all ranks or of those of ``parent_group``.

    ``include_init`` is the backend of a process group to join first. Raises :class:`PlanError`.
    """
    device = (
        None if include_init is None else process_groups.init_process_group(include_init, process_groups.TIMEOUT).device
    )
    axis = axis_of(parent_group)
    many = group_count if group_count > 0 else axis.size // max(1, -group_count)
    if many < 1 or axis.size % many or (group_count < 0 and many * -group_count != axis.size) or not group_count:
        raise PlanError(
            f"{axis.size} ranks cannot be divided into "
            + (f"{group_count} groups" if group_count >= 0 else f"groups of {-group_count}")
            + f"; use a divisor of {axis.size}"
        )
    size, world = axis.size // many, axis_of()

    def dist_print(*values: Any, **options: Any) -> None:
        if world.rank == 0:
            print(*values, **options)

    return Groups(
        world.size, world.rank, many, axis.rank // size, size, axis.rank % size,
        process_groups.strided_group(size, parent_group), process_groups.contiguous_group(size, parent_group),
        process_groups.all_ranks(), process_groups.all_ranks() is not None, device, dist_print,
    )  # fmt: skip


def create_standalone_group() -> Group:
    """A group of this rank alone."""
    return process_groups.contiguous_group(1)


# -- without gradients ---------------------------------------------------------------------------------------------


def simple_all_reduce(input: Tensor, group: Group = None, op: Any = "sum", inplace: bool = False) -> Tensor:  # noqa: A002
    """The ``op`` (a ReduceOp of torch, or "sum", "max", "min", "avg", "product") of all ranks' ``input``."""
    if get_world_size(group) == 1:
        return input
    output = process_groups.reduce_(input, op, group)
    return input.detach().copy_(output) if inplace else output


def simple_all_to_all(input: Tensor, group: Group = None, background: bool = False) -> Any:  # noqa: A002
    """The r-th part of ``input`` goes to rank r. In the ``background``: (output, wait); use it after wait()."""
    axis, input = axis_of(group), input.detach()  # noqa: A001
    _even(input, 0, axis)
    rows = [len(input) // axis.size] * axis.size
    output = input if axis.size == 1 else collectives.begin_all_to_all(input, rows, rows, axis.group)

    def wait() -> None:
        if axis.size > 1:
            collectives.wait(output)

    if background:
        return output, wait
    wait()
    return output


def simple_split(input: Tensor, group: Group = None) -> Tensor:  # noqa: A002
    """This rank's part of the rows."""
    return spatial_split(input.detach(), 0, group)


def simple_reduce_scatter(input: Tensor, group: Group = None, op: Any = "sum") -> Tensor:  # noqa: A002
    """This rank's part of the rows, under the ``op`` of all ranks."""
    return simple_split(process_groups.reduce_(input, op, group), group)


def simple_all_gather(input: Tensor, group: Group = None) -> Tensor:  # noqa: A002
    """The rows of all ranks."""
    return all_gather(input.detach(), 0, group=group)


def batch_all_to_all_v(
    datas: Sequence[Tensor], partition_sizes: Tensor | Sequence[int], group: Group = None
) -> tuple[list[Tensor], Tensor]:
    """Sends ``partition_sizes[r]`` elements of each flat tensor to rank r; returns the received elements and their
    number per rank.
    """
    axis, device = axis_of(group), datas[0].device
    sizes = torch.as_tensor(partition_sizes, dtype=torch.int64, device=device)
    if sizes.numel() != axis.size or int(sizes.sum()) != datas[0].numel():
        raise ConfigError(
            f"partition sizes {sizes.tolist()} for {axis.size} ranks and {datas[0].numel()} elements; pass one per "
            "rank, with the right sum"
        )
    received = simple_all_to_all(sizes, group)
    send, receive = sizes.tolist(), received.tolist()
    return [axis.exchange(data.detach().reshape(-1), send, receive) for data in datas], received


def batch_all_gather_v(datas: Sequence[Tensor], group: Group = None) -> tuple[list[Tensor], Tensor]:
    """Gathers a different number of elements from each rank; returns the elements and their number per rank."""
    counts = simple_all_gather(torch.tensor([datas[0].numel()], device=datas[0].device), group)
    return [axis_of(group).all_gather_uneven_(data.reshape(-1), counts.tolist()) for data in datas], counts


# -- with gradients ------------------------------------------------------------------------------------------------


def all_to_all(
    input: Tensor,  # noqa: A002
    input_dim: int,
    output_dim: int,
    group: Group = None,
    background: bool = False,
    use_2dh: bool = False,
) -> Any:
    """Splits ``input`` along ``output_dim`` among the ranks, and joins the received parts along ``input_dim``.

    With ``background``: returns a function that waits for the result. With ``use_2dh``: the same values in two steps,
    first among the ranks of a machine.
    """
    axis = axis_of(group)
    _even(input, output_dim, axis)
    if input_dim == output_dim or axis.size == 1:
        return (lambda: input) if background else input
    parts = input.unflatten(output_dim, (axis.size, input.shape[output_dim] // axis.size)).movedim(output_dim, 0)
    exchange, sizes = process_groups.make_all_to_all(group, two_steps=use_2dh)
    pending = exchange.begin(parts, sizes)

    def finish() -> Tensor:
        return exchange.finish(pending, sizes).movedim(0, input_dim).flatten(input_dim, input_dim + 1)

    return finish if background else finish()


def all_to_all_single(input: Tensor, group: Group = None) -> Tensor:  # noqa: A002
    """The r-th part of the rows goes to rank r."""
    axis = axis_of(group)
    _even(input, 0, axis)
    rows = [len(input) // axis.size] * axis.size
    return axis.exchange(input, rows, rows)


def all_gather(input: Tensor, dim: int, fused: bool = False, group: Group = None) -> Tensor:  # noqa: A002
    """The parts of all ranks, of one shape, joined along ``dim``; ``fused``: its gradients are summed."""
    axis = axis_of(group)
    return (axis.gather if fused else axis.join)(input, dim, input.shape[dim] * axis.size)


def zero_gather(input: Tensor, full_shape: Sequence[int] | None = None, group: Group = None) -> Tensor:  # noqa: A002
    """A tensor of ``full_shape``; each rank has a part of its elements, by default the rows of all ranks."""
    axis = axis_of(group)
    whole = axis.gather(input, 0, input.shape[0] * axis.size)
    if full_shape is None:
        return whole
    shape = torch.Size(full_shape)
    return whole.reshape(-1)[: shape.numel()].view(shape)


def zero_scatter(
    input: Tensor,  # noqa: A002
    scatter_fn: Callable[..., Tensor],
    group: Group = None,
) -> tuple[Tensor, torch.Size]:
    """This rank's part of the elements by ``scatter_fn`` (simple_split, simple_reduce_scatter), zero-padded to the same
    number on each rank, and the full shape.
    """
    flat = input.reshape(-1)
    flat = torch.nn.functional.pad(flat, (0, -len(flat) % get_world_size(group)))
    return scatter_fn(flat, group=group), input.shape


def spatial_split(input: Tensor, dim: int, group: Group = None) -> Tensor:  # noqa: A002
    """This rank's part of dimension ``dim``."""
    axis = axis_of(group)
    _even(input, dim, axis)
    return axis.split(input, dim)


def reduce_scatter(input: Tensor, dim: int, group: Group = None) -> Tensor:  # noqa: A002
    """This rank's part of dimension ``dim`` of the sum over the ranks."""
    axis = axis_of(group)
    _even(input, dim, axis)
    return axis.scatter_sum(input, dim)


def allreduce_forward(input: Tensor, op: Any = "sum", group: Group = None) -> Tensor:  # noqa: A002
    """The sum over the ranks; gradients are handed on."""
    _sum(op)
    return axis_of(group).fan_in(input)


def allreduce_backward(input: Tensor, op: Any = "sum", group: Group = None) -> Tensor:  # noqa: A002
    """``input``, whose gradients are summed over the ranks."""
    _sum(op)
    return axis_of(group).fan_out(input)


def _sum(op: Any) -> None:
    if (op if isinstance(op, str) else op.name.lower()) != "sum":
        raise ConfigError(f"only a sum has this gradient, not {op}; use simple_all_reduce")


def _even(x: Tensor, dim: int, axis: Axis) -> None:
    if x.shape[dim] % axis.size:
        raise PlanError(f"{x.shape[dim]} rows along dimension {dim} are not divisible by {axis.size} ranks")
