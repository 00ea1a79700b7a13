"""Rank, device, device mesh and axes of this process.

Ranks are numbered (pp, replicate, dp, cp, tp), tensor parallel innermost, on the fastest links. The mesh is
(pp, tp, replicate, shard) with shard = dp · cp: this is the *storage* order, tensor-parallel shards first and FSDP
shards inside them. The other order corrupts checkpoints silently (layout rule 1). Context ranks hold the same weights
and see other tokens, just like data ranks, so FSDP shards over both and sums their gradients.
"""

import datetime
import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from colonnade.config import Plan, plural
from colonnade.config.model import divisors
from colonnade.errors import PlanError
from colonnade.parallel.axis import SOLO, Axes, Axis, ExpertAxes, group_name, world_axis
from colonnade.parallel.collectives import abort_process_groups, clear_sharding_cache, high_priority_options
from colonnade.parallel.cuda_graphs import destroy_graphs
from colonnade.parallel.launch import local_ranks, rank_and_world
from colonnade.parallel.rendezvous import check_same_settings, fresh_store

TIMEOUT = datetime.timedelta(minutes=10)
# With GPUs both: gloo for control messages on the CPU, NCCL for the model's tensors.
BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}


@dataclass(frozen=True)
class DistributedContext:
    """Plan, axes, device and meshes of this process; ``mesh`` is None without a process group (:meth:`solo`)."""

    plan: Plan
    axes: Axes
    device: torch.device
    rank: int = 0
    mesh: DeviceMesh | None = None
    expert_mesh: DeviceMesh | None = None
    """(pp, copies, ep, etp), with expert parallelism."""

    @property
    def world(self) -> int:
        """Number of processes."""
        return self.plan.world

    @cached_property
    def storage_mesh(self) -> DeviceMesh:
        """(tp, replicate, shard): the mesh of the checkpoint's DTensor views on this pipeline rank."""
        assert self.mesh is not None, "no process group: DistributedContext.build makes one"
        # Neighbouring ranks are those of tp, the first dimension here: torch before 2.13 cannot slice a mesh so.
        names = ("tp", "replicate", "shard")
        groups, ranks = [self.mesh.get_group(name) for name in names], self.mesh.mesh[self.axes.pp.rank]
        return DeviceMesh.from_group(groups, self.device.type, mesh=ranks, mesh_dim_names=names)

    @property
    def expert_storage_mesh(self) -> DeviceMesh:
        """(copies, ep, etp): the same for experts."""
        assert self.expert_mesh is not None, "experts are not sharded"
        return self.expert_mesh["copies", "ep", "etp"]

    @cached_property
    def host_storage_mesh(self) -> DeviceMesh:
        """:attr:`storage_mesh` over the same groups, for tensors in host memory."""
        return _cpu_mesh(self.storage_mesh)

    @cached_property
    def host_expert_storage_mesh(self) -> DeviceMesh:
        """The same for :attr:`expert_storage_mesh`."""
        return _cpu_mesh(self.expert_storage_mesh)

    @property
    def fsdp_mesh(self) -> DeviceMesh:
        """FSDP's mesh: (shard,), or (replicate, shard) for hybrid sharding."""
        assert self.mesh is not None, "no process group: DistributedContext.build makes one"
        return self.mesh["replicate", "shard"] if self.plan.replicate > 1 else self.mesh["shard"]

    @property
    def sharded(self) -> bool:
        """Whether FSDP shards the weights: several ranks see different tokens with the same weights."""
        return self.plan.data_ranks * self.plan.cp > 1

    def stages(self, layers: int) -> list[tuple[int, range]]:
        """(number, blocks) of each pipeline stage on this rank."""
        spans = self.plan.stage_layers(layers)
        return [(s, spans[s]) for s in range(self.axes.pp.rank, len(spans), self.plan.pp)]

    def replica(self) -> "DistributedContext":
        """This data rank's tp and cp ranks alone, for inference: each replica loads the whole model."""
        plan = self.plan.replace(dp=1, replicate=1)
        axes = replace(self.axes, dp=SOLO, replicate=SOLO, batch=self.axes.cp)
        return replace(self, plan=plan, axes=axes, rank=self.rank % plan.world)

    @property
    def shard(self) -> Axis:
        """The axis over which FSDP shards each parameter by rows (without a process group)."""
        plan, axes = self.plan, self.axes
        return Axis("shard", plan.dp * plan.cp, axes.dp.rank % plan.dp * plan.cp + axes.cp.rank)

    @staticmethod
    def solo(device: torch.device | str = "cpu") -> "DistributedContext":
        """One process without a process group: for inference, and everything that needs no FSDP."""
        return DistributedContext(Plan(), Axes(), torch.device(device))

    @staticmethod
    @contextmanager
    def build(
        plan: Plan, device: str = "auto", timeout: datetime.timedelta = TIMEOUT
    ) -> Iterator["DistributedContext"]:
        """Join the launcher's process group (or create one of size 1), and leave it at the end.

        In an existing default group, only the groups made here are destroyed at the end. ``timeout`` applies to each
        collective. Raises :class:`PlanError` when the number of processes is not the plan's, or ranks have different
        plans.
        """
        launched = dist.is_torchelastic_launched()
        kind = choose_device(plan, device)
        ours = not dist.is_initialized()
        if ours:
            local_device(kind)
            store, rank, world = fresh_store(timeout) if launched else (dist.HashStore(), 0, 1)
            dist.init_process_group(BACKENDS[kind], store=store, rank=rank, world_size=world, timeout=timeout)
        with _destroy_default_group(kind) if ours else nullcontext():
            plan.check_world(dist.get_world_size())
            check_same_settings(plan.model_dump(), world_axis())
            context, groups = _build(plan, kind, timeout)
            yield context
            if not ours:  # after a failure they stay until the default group ends: a peer may be waiting in one
                _destroy_groups(groups, context.device)


@contextmanager
def file_process_group(file: Path, kind: str = "cpu") -> Iterator[None]:
    """A default group of the launched processes that rendezvous in ``file``, on ``kind`` ("cpu" or "cuda").

    All groups made inside end with it.
    """
    local_device(kind)
    rank, world = rank_and_world()
    store = dist.FileStore(str(file), world)
    dist.init_process_group(BACKENDS[kind], store=store, rank=rank, world_size=world, timeout=TIMEOUT)
    with _destroy_default_group(kind):
        yield


@contextmanager
def _destroy_default_group(kind: str) -> Iterator[None]:
    """Destroy the default process group at the end."""
    try:
        yield
    except BaseException:
        # The peers wait for this rank, and NCCL's graceful end would wait for them: the failure would be reported only
        # when a collective times out, ten minutes later.
        destroy_graphs()
        abort_process_groups() if kind == "cuda" else dist.destroy_process_group()
        raise
    destroy_graphs()
    dist.destroy_process_group()


def _build(plan: Plan, kind: str, timeout: datetime.timedelta) -> tuple[DistributedContext, list[dist.ProcessGroup]]:
    """The context, and the process groups made for it, in the same order on every rank."""
    order = torch.arange(plan.world).view(plan.pp, plan.replicate, plan.dp, plan.cp, plan.tp)
    ranks = order.flatten(2, 3).permute(0, 3, 1, 2)
    mesh = DeviceMesh(kind, ranks, mesh_dim_names=("pp", "tp", "replicate", "shard"))
    experts = order.view(plan.pp, plan.expert_replicas, plan.ep, plan.etp)
    expert_mesh = None
    if plan.ep * plan.etp > 1:
        expert_mesh = DeviceMesh(kind, experts, mesh_dim_names=("pp", "copies", "ep", "etp"))

    by_ranks: dict[str, dist.ProcessGroup] = {}
    groups = [group for made in (mesh, expert_mesh) if made is not None for group in made.get_all_groups()]

    def axis(name: str, *along: int, of: torch.Tensor = order) -> Axis:
        """The ranks that differ from this one only in the dimensions ``along`` of the rank array ``of``."""
        rows = of.movedim(along, tuple(range(-len(along), 0))).flatten(-len(along)).flatten(0, -2).tolist()
        if len(rows[0]) == 1:
            return SOLO
        if str(rows) not in by_ranks:  # axes over the same ranks share a group
            options = high_priority_options(timeout) if kind == "cuda" else None
            made, _ = dist.new_subgroups_by_enumeration(rows, timeout=timeout, pg_options=options)
            assert isinstance(made, dist.ProcessGroup)
            by_ranks[str(rows)] = made
            groups.append(made)
        return of_group(name, by_ranks[str(rows)])

    def of_group(name: str, group: dist.ProcessGroup) -> Axis:
        return Axis(name, dist.get_world_size(group), dist.get_rank(group), group_name(group))

    def expert_axes() -> ExpertAxes:
        strided: list[tuple[int, Axis]] = []
        for r in divisors(plan.etp):
            by_r = experts.unflatten(3, (plan.etp // r, r))
            strided.append((r, axis(f"etp mod {r}", 3, of=by_r)))
        intra_node = inter_node = None
        if plan.hierarchical_a2a_size:
            nodes = experts.flatten(2, 3).unflatten(2, (-1, plan.hierarchical_a2a_size))
            intra_node, inter_node = axis("intra_node", 3, of=nodes), axis("inter_node", 2, of=nodes)
        return ExpertAxes(
            ep=axis("ep", 2, of=experts),
            etp=axis("etp", 3, of=experts),
            all=axis("experts", 2, 3, of=experts),
            copies=axis("copies", 1, of=experts),
            tokens=axis("tokens", 1, 2, 3, of=experts),
            strided=tuple(strided),
            intra_node=intra_node,
            inter_node=inter_node,
        )

    def embedding() -> Axis:
        if plan.pp <= 2:
            return axis("pp", 0)
        group, _ = dist.new_subgroups_by_enumeration(order[[0, -1]].flatten(1).T.tolist(), timeout=timeout)
        if not isinstance(group, dist.ProcessGroup):
            return SOLO
        groups.append(group)
        return of_group("embedding", group)

    device = torch.device("cuda", torch.cuda.current_device()) if kind == "cuda" else torch.device("cpu")
    tp, transfer = axis("tp", 4), None
    if plan.tp_overlap and plan.tp > 1:
        # Importing torch.compile's tracer takes most of a second.
        from colonnade.parallel.overlapped_matmul import make_transfer

        transfer = make_transfer(tp, device)
    axes = Axes(
        tp=tp,
        cp=axis("cp", 3),
        dp=axis("dp", 1, 2),
        batch=axis("batch", 1, 2, 3),
        replicate=axis("replicate", 1),
        pp=axis("pp", 0),
        embedding=embedding(),
        model=axis("model", 3, 4),
        sequence_parallel=plan.sequence_parallel and plan.tp > 1,
        row_transfer=transfer,
        experts=expert_axes(),
    )
    return DistributedContext(plan, axes, device, dist.get_rank(), mesh, expert_mesh), groups


def _destroy_groups(groups: Sequence[dist.ProcessGroup], device: torch.device) -> None:
    """Destroy ``groups``, but not the default one, once all ranks are done with them.

    A gloo group has three threads per rank, one of which wakes a hundred times per second even when idle, so groups
    must not pile up in a process that builds one context after another. Modules under FSDP and pipelines are reference
    cycles, and hold their groups until they are collected.
    """
    destroy_graphs()
    world_axis().sum_(torch.zeros((), device=device)).item()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    for group in groups:
        if group is not dist.group.WORLD:  # the mesh uses it for a dimension of all ranks
            dist.destroy_process_group(group)
    clear_sharding_cache()
    gc.collect()


def _cpu_mesh(mesh: DeviceMesh) -> DeviceMesh:
    names = mesh.mesh_dim_names
    assert names is not None
    return DeviceMesh.from_group(mesh.get_all_groups(), "cpu", mesh=mesh.mesh, mesh_dim_names=names)


def local_device(kind: str) -> torch.device:
    """Return this process's device: the CPU, or the GPU of its local rank, which becomes the current device."""
    if kind != "cuda":
        return torch.device(kind)
    torch.cuda.set_device(dist.get_node_local_rank(0))
    return torch.device("cuda", torch.cuda.current_device())


def choose_device(plan: Plan, device: str) -> str:
    """Choose "cuda" or "cpu"; ``auto`` takes GPUs when there is one for each local rank, which NCCL needs."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    local = local_ranks(plan)  # a number that is equal on all local ranks, so that they choose the same
    if device == "auto":
        return "cuda" if gpus >= local else "cpu"
    if device == "cuda" and gpus < local:
        raise PlanError(
            f"the plan puts {plural(local, 'rank')} on this machine, which has {plural(gpus, 'GPU')}; use --device cpu"
        )
    return device
