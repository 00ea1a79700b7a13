"""The ground that a model stands on: which process this is, on what device, along which axes.

Ranks are numbered (pp, replicate, dp, cp, tp), tensor parallel innermost, on the fastest links. The mesh is written
(pp, tp, replicate, shard) with shard = dp · cp: that is the *storage* order, tensor-parallel shards first and FSDP's
shards inside them. The other order corrupts checkpoints without a word (layout rule 1). Context ranks hold the same
weights and see other tokens, just as data ranks do, so that FSDP shards over both and sums their gradients.
"""

import datetime
import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from colonnade.config import Plan, plural
from colonnade.config.model import divisors
from colonnade.errors import PlanError
from colonnade.parallel.axis import SOLO, Axes, Axis, Grid, group_name, world_axis
from colonnade.parallel.collectives import abandon_groups, forget_meshes, urgent
from colonnade.parallel.config_check import agree
from colonnade.parallel.cuda_graphs import end_graphs
from colonnade.parallel.launch import local_ranks, place
from colonnade.parallel.rendezvous import fresh_store

TIMEOUT = datetime.timedelta(minutes=10)
# With GPUs both at once: gloo carries control messages on the CPU, NCCL the tensors of the model.
BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}


@dataclass(frozen=True)
class DistributedContext:
    """Where this process stands. ``mesh`` is None in a process without a process group (:meth:`solo`)."""

    plan: Plan
    axes: Axes
    device: torch.device
    rank: int = 0
    mesh: DeviceMesh | None = None
    expert_mesh: DeviceMesh | None = None
    """(pp, copies, ep, sh), where experts are shared out."""

    @property
    def world(self) -> int:
        """Processes in all."""
        return self.plan.world

    @cached_property
    def storage_mesh(self) -> DeviceMesh:
        """(tp, replicate, shard): the mesh of the checkpoint's view of each parameter of this pipeline rank."""
        assert self.mesh is not None, "no process group: Ground.build makes one"
        # Neighbouring ranks are those of tp, which comes first here: a slice that torch before 2.13 refuses to make.
        names = ("tp", "replicate", "shard")
        groups, ranks = [self.mesh.get_group(name) for name in names], self.mesh.mesh[self.axes.pp.rank]
        return DeviceMesh.from_group(groups, self.device.type, mesh=ranks, mesh_dim_names=names)

    @property
    def expert_storage_mesh(self) -> DeviceMesh:
        """(copies, ep, sh): the same for experts."""
        assert self.expert_mesh is not None, "all ranks have all experts"
        return self.expert_mesh["copies", "ep", "sh"]

    @cached_property
    def host_storage_mesh(self) -> DeviceMesh:
        """:attr:`storage_mesh` over the same groups, for tensors in host memory."""
        return _on_host(self.storage_mesh)

    @cached_property
    def host_expert_storage_mesh(self) -> DeviceMesh:
        """:attr:`expert_storage_mesh` likewise."""
        return _on_host(self.expert_storage_mesh)

    @property
    def fsdp_mesh(self) -> DeviceMesh:
        """(shard,), or (replicate, shard) for hybrid sharding: the mesh over which FSDP works."""
        assert self.mesh is not None, "no process group: Ground.build makes one"
        return self.mesh["replicate", "shard"] if self.plan.replicate > 1 else self.mesh["shard"]

    @property
    def sharded(self) -> bool:
        """Whether several ranks see different tokens with the same weights: FSDP's affair."""
        return self.plan.data_ranks * self.plan.cp > 1

    def stages(self, layers: int) -> list[tuple[int, range]]:
        """(number, blocks) of each pipeline stage on this rank; one process has them all in one."""
        spans = self.plan.stage_layers(layers)
        return [(s, spans[s]) for s in range(self.axes.pp.rank, len(spans), self.plan.pp)]

    @property
    def shard(self) -> Axis:
        """This rank's place among those over which FSDP cuts each parameter by rows (no group to talk over)."""
        plan, axes = self.plan, self.axes
        return Axis("shard", plan.dp * plan.cp, axes.dp.rank % plan.dp * plan.cp + axes.cp.rank)

    @staticmethod
    def solo(device: torch.device | str = "cpu") -> "DistributedContext":
        """One process, no process group: inference, and everything that needs no FSDP."""
        return DistributedContext(Plan(), Axes(), torch.device(device))

    @staticmethod
    @contextmanager
    def build(
        plan: Plan, device: str = "auto", timeout: datetime.timedelta = TIMEOUT
    ) -> Iterator["DistributedContext"]:
        """Join the process group that the launcher prepared (or make one of size 1), and leave it at the end.

        Over a group that stands already, what is laid over it is taken up again. ``timeout`` is after how long a
        collective gives up. Raises :class:`PlanError` when the number of processes is not the plan's, or other ranks
        have another plan.
        """
        launched = dist.is_torchelastic_launched()
        kind = choose_device(plan, device)
        ours = not dist.is_initialized()
        if ours:
            own_device(kind)
            store, rank, world = fresh_store(timeout) if launched else (dist.HashStore(), 0, 1)
            dist.init_process_group(BACKENDS[kind], store=store, rank=rank, world_size=world, timeout=timeout)
        with _standing(kind) if ours else nullcontext():
            plan.check_world(dist.get_world_size())
            agree(plan.model_dump(), world_axis())
            ground, laid = _stand(plan, kind, timeout)
            yield ground
            if not ours:  # after a failure they stay until the default group ends: a peer may be waiting in one
                _take_up(laid, ground.device)


@contextmanager
def fresh_group(file: Path, kind: str = "cpu") -> Iterator[None]:
    """A group of the launched processes that meet in ``file``, for tensors on ``kind`` ("cpu", "cuda"); all that was
    laid over it ends with it.
    """
    own_device(kind)
    rank, world = place()
    store = dist.FileStore(str(file), world)
    dist.init_process_group(BACKENDS[kind], store=store, rank=rank, world_size=world, timeout=TIMEOUT)
    with _standing(kind):
        yield


@contextmanager
def _standing(kind: str) -> Iterator[None]:
    """The default process group, until the end of what is done with it."""
    try:
        yield
    except BaseException:
        # What failed here has peers that wait for it, and NCCL's graceful end would wait for them: the failure would
        # be reported when a collective gives up, ten minutes later.
        end_graphs()
        abandon_groups() if kind == "cuda" else dist.destroy_process_group()
        raise
    end_graphs()
    dist.destroy_process_group()


def _stand(plan: Plan, kind: str, timeout: datetime.timedelta) -> tuple[DistributedContext, list[dist.ProcessGroup]]:
    """The ground, and the groups laid for it, in the same order on every rank."""
    order = torch.arange(plan.world).view(plan.pp, plan.replicate, plan.dp, plan.cp, plan.tp)
    ranks = order.flatten(2, 3).permute(0, 3, 1, 2)
    mesh = DeviceMesh(kind, ranks, mesh_dim_names=("pp", "tp", "replicate", "shard"))
    experts = order.view(plan.pp, plan.expert_replicas, plan.ep, plan.sh)
    expert_mesh = None
    if plan.ep * plan.sh > 1:
        expert_mesh = DeviceMesh(kind, experts, mesh_dim_names=("pp", "copies", "ep", "sh"))

    groups: dict[str, dist.ProcessGroup] = {}
    laid = [group for made in (mesh, expert_mesh) if made is not None for group in made.get_all_groups()]

    def axis(name: str, *along: int, of: torch.Tensor = order) -> Axis:
        """The ranks that differ from this one in the dimensions ``along`` of the array ``of`` ranks only."""
        rows = of.movedim(along, tuple(range(-len(along), 0))).flatten(-len(along)).flatten(0, -2).tolist()
        if len(rows[0]) == 1:
            return SOLO
        if str(rows) not in groups:  # axes over the same ranks share their connections
            options = urgent(timeout) if kind == "cuda" else None
            made, _ = dist.new_subgroups_by_enumeration(rows, timeout=timeout, pg_options=options)
            assert isinstance(made, dist.ProcessGroup)
            groups[str(rows)] = made
            laid.append(made)
        return named(name, groups[str(rows)])

    def named(name: str, group: dist.ProcessGroup) -> Axis:
        return Axis(name, dist.get_world_size(group), dist.get_rank(group), group_name(group))

    def grid() -> Grid:
        """The expert grid, over the ranks of each pipeline stage in their order."""
        strided: list[tuple[int, Axis]] = []
        for r in divisors(plan.sh):
            by_r = experts.unflatten(3, (plan.sh // r, r))
            strided.append((r, axis(f"sh mod {r}", 3, of=by_r)))
        near = far = None
        if plan.near:
            webs = experts.flatten(2, 3).unflatten(2, (-1, plan.near))
            near, far = axis("near", 3, of=webs), axis("far", 2, of=webs)
        return Grid(
            ep=axis("ep", 2, of=experts),
            sh=axis("sh", 3, of=experts),
            all=axis("experts", 2, 3, of=experts),
            copies=axis("copies", 1, of=experts),
            tokens=axis("tokens", 1, 2, 3, of=experts),
            strided=tuple(strided),
            near=near,
            far=far,
        )

    def ends() -> Axis:
        if plan.pp <= 2:
            return axis("pp", 0)
        group, _ = dist.new_subgroups_by_enumeration(order[[0, -1]].flatten(1).T.tolist(), timeout=timeout)
        if not isinstance(group, dist.ProcessGroup):
            return SOLO
        laid.append(group)
        return named("ends", group)

    device = torch.device("cuda", torch.cuda.current_device()) if kind == "cuda" else torch.device("cpu")
    tp, mover = axis("tp", 4), None
    if plan.tp_overlap and plan.tp > 1:
        from colonnade.parallel.copy_engine import mover_of  # imports torch.compile's tracer, most of a second

        mover = mover_of(tp, device)
    axes = Axes(
        tp=tp,
        cp=axis("cp", 3),
        dp=axis("dp", 1, 2),
        batch=axis("batch", 1, 2, 3),
        replicate=axis("replicate", 1),
        pp=axis("pp", 0),
        ends=ends(),
        model=axis("model", 3, 4),
        sequence_parallel=plan.sequence_parallel and plan.tp > 1,
        mover=mover,
        grid=grid(),
    )
    return DistributedContext(plan, axes, device, dist.get_rank(), mesh, expert_mesh), laid


def _take_up(laid: Sequence[dist.ProcessGroup], device: torch.device) -> None:
    """Let go of the groups ``laid`` over the default group, once all ranks are done with them.

    A group of gloo is three threads a rank, one of which wakes a hundred times a second whether or not anybody talks:
    a process that lays ground after ground would end up doing nothing else. Modules that FSDP and pipelines hold on to
    are cycles, and hold their groups until they are collected.
    """
    end_graphs()
    world_axis().sum_(torch.zeros((), device=device)).item()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    for group in laid:
        if group is not dist.group.WORLD:  # the mesh takes it for a dimension of all ranks
            dist.destroy_process_group(group)
    forget_meshes()
    gc.collect()


def _on_host(mesh: DeviceMesh) -> DeviceMesh:
    names = mesh.mesh_dim_names
    assert names is not None
    return DeviceMesh.from_group(mesh.get_all_groups(), "cpu", mesh=mesh.mesh, mesh_dim_names=names)


def own_device(kind: str) -> torch.device:
    """This process's device: the CPU, or the GPU of its number on this machine, which becomes its current one."""
    if kind != "cuda":
        return torch.device(kind)
    torch.cuda.set_device(dist.get_node_local_rank(0))
    return torch.device("cuda", torch.cuda.current_device())


def choose_device(plan: Plan, device: str) -> str:
    """Which of "cuda" and "cpu": ``auto`` takes GPUs when each local rank can have one (NCCL needs a GPU a rank)."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    local = local_ranks(plan)  # not this rank's own number: all must choose the same
    if device == "auto":
        return "cuda" if gpus >= local else "cpu"
    if device == "cuda" and gpus < local:
        raise PlanError(
            f"the plan puts {plural(local, 'rank')} on this machine, which has {plural(gpus, 'GPU')}; use --device cpu"
        )
    return device
