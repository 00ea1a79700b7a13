"""The ground that a model stands on: which process this is, on what device, along which axes.

Ranks are numbered rank = dp_index · tp + tp_index, tensor parallel innermost, on the fastest links. The mesh is
written (tp, dp): that is the *storage* order, tensor-parallel shards first and FSDP's shards inside them. The other
order corrupts checkpoints without a word (layout rule 1).
"""

import datetime
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from colonnade.config import Plan
from colonnade.errors import PlanError
from colonnade.parallel.axis import SOLO, Axes, Axis, group_name
from colonnade.parallel.launch import local_ranks

TIMEOUT = datetime.timedelta(minutes=10)


@dataclass(frozen=True)
class Ground:
    """Where this process stands. ``mesh`` is None in a process without a process group (:meth:`solo`)."""

    plan: Plan
    axes: Axes
    device: torch.device
    rank: int = 0
    mesh: DeviceMesh | None = None

    @property
    def world(self) -> int:
        """Processes in all."""
        return self.plan.world

    @property
    def storage_mesh(self) -> DeviceMesh:
        """(tp, dp): the mesh of the checkpoint's view of each parameter."""
        assert self.mesh is not None, "no process group: Ground.build makes one"
        return self.mesh

    @property
    def fsdp_mesh(self) -> DeviceMesh:
        """(dp,): the mesh over which FSDP shards parameters."""
        return self.storage_mesh["dp"]

    @staticmethod
    def solo(device: torch.device | str = "cpu") -> "Ground":
        """One process, no process group: inference, and everything that needs no FSDP."""
        return Ground(Plan(), Axes(), torch.device(device))

    @staticmethod
    @contextmanager
    def build(plan: Plan, device: str = "auto") -> Iterator["Ground"]:
        """Join the process group that the launcher prepared (or make one of size 1), and leave it at the end.

        Raises :class:`PlanError` when the number of processes is not the plan's.
        """
        launched = dist.is_torchelastic_launched()
        kind = choose_device(plan, device)
        ours = not dist.is_initialized()
        if ours:
            # Both backends at once: gloo carries control messages on the CPU, NCCL the tensors of the model.
            backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
            if kind == "cuda":
                torch.cuda.set_device(dist.get_node_local_rank(0))
            if launched:
                dist.init_process_group(backend, timeout=TIMEOUT)
            else:
                dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=TIMEOUT)
        try:
            plan.check_world(dist.get_world_size())
            yield _stand(plan, kind)
        finally:
            if ours:
                dist.destroy_process_group()


def _stand(plan: Plan, kind: str) -> Ground:
    ranks = torch.arange(plan.world).view(plan.dp, plan.tp).T
    mesh = DeviceMesh(kind, ranks, mesh_dim_names=("tp", "dp"))

    def axis(name: str) -> Axis:
        group = mesh.get_group(name)
        size = dist.get_world_size(group)
        return Axis(name, size, dist.get_rank(group), group_name(group)) if size > 1 else SOLO

    device = torch.device("cuda", torch.cuda.current_device()) if kind == "cuda" else torch.device("cpu")
    return Ground(plan, Axes(tp=axis("tp"), dp=axis("dp")), device, dist.get_rank(), mesh)


def choose_device(plan: Plan, device: str) -> str:
    """Which of "cuda" and "cpu": ``auto`` takes GPUs when each local rank can have one (NCCL needs a GPU a rank)."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    local = local_ranks(plan)  # not this rank's own number: all must choose the same
    if device == "auto":
        return "cuda" if gpus >= local else "cpu"
    if device == "cuda" and gpus < local:
        raise PlanError(f"the plan puts {local} ranks on this machine, which has {gpus} GPUs; use --device cpu")
    return device
