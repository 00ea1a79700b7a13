"""Places the engines of a server (replicas or different models) on cores or GPUs.

On a CPU all models share the cores, since not all are busy at the same time, and the replicas of each have their own
cores (:mod:`colonnade.cores`). Of the GPUs each engine gets as many as its plan has ranks; if they are too few,
different models share them.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from colonnade.config import Plan
from colonnade.config.base import plural
from colonnade.cores import CpuPlacement, Machine, auto_replicas, idle_warning, place_replicas, read_machine
from colonnade.errors import ConfigError

GPU_DEVICES = ("nvidia[0-9]*", "nvgpu*", "nvhost-gpu", "dxg", "kfd")
"""Names of GPUs in /dev: NVIDIA's, on Jetson, on Windows' Linux, and AMD's."""


class Placement(NamedTuple):
    """Where one engine runs; empty: anywhere."""

    cpus: CpuPlacement | None = None
    gpus: tuple[str, ...] = ()
    """Entries of CUDA_VISIBLE_DEVICES."""
    engines: int = 1
    """Number of engines that divide the memory that is free when this one allocates its cache
    (:mod:`colonnade.serve.start_order`)."""

    @property
    def alone(self) -> "Placement":
        """The same placement, with its memory undivided; equal for engines that share cores or GPUs."""
        return self._replace(engines=1)


ANYWHERE = Placement()


def place_engines(
    models: int, replicas: int | Literal["auto"], plan: Plan, device: str, machine: Machine | None = None
) -> tuple[list[list[Placement]], str]:
    """(for each of ``models`` a placement for each replica, a warning or nothing) on ``machine``, by default this one.

    Raises :class:`ConfigError` if there are too few cores or GPUs for the replicas of one model. Imports torch only if
    there may be GPUs.
    """
    if device == "cuda" or (device == "auto" and has_gpu_devices()):
        if models == replicas == 1:
            return [[ANYWHERE]], ""
        from colonnade.parallel.launch import visible_gpus

        gpus = visible_gpus()
        if device == "cuda" or len(gpus) >= plan.world:
            groups = len(gpus) // plan.world
            count = max(1, groups // models) if replicas == "auto" else replicas
            blocks = gpu_blocks(gpus, count, plan.world)
            blocks += gpu_blocks(gpus, groups, plan.world)[count:]
            return share_gpus(blocks, models, count), ""
    machine = machine or read_machine()
    count = auto_replicas(machine, plan.world) if replicas == "auto" else replicas
    cpus = [each._replace(owned=each.owned and models == 1) for each in place_replicas(machine, count, plan.world)]
    placements = [[Placement(each, engines=models) for each in cpus] for _ in range(models)]
    return placements, "\n".join(filter(None, (idle_warning(machine, count, plan.world), ranks_warning(plan))))


def ranks_warning(plan: Plan) -> str:
    """A note about an engine of several ranks on a CPU (decision 0012); empty for one rank."""
    if plan.world == 1:
        return ""
    return (
        f"on a CPU {plan.world} ranks launch each kernel of a decode step from Python, which is slower than one rank "
        "with all threads: remove --plan.tp unless the weights need the memory of several NUMA nodes"
    )


def share_gpus(blocks: Sequence[tuple[str, ...]], models: int, replicas: int) -> list[list[Placement]]:
    """The placements of the engines on ``blocks`` of GPUs, taken in turn; a block's later engines divide less."""
    chosen = [blocks[i % len(blocks)] for i in range(models * replicas)]
    flat = [Placement(gpus=block, engines=chosen[i:].count(block)) for i, block in enumerate(chosen)]
    return [flat[i : i + replicas] for i in range(0, len(flat), replicas)]


def has_gpu_devices(devices: Path = Path("/dev")) -> bool:
    """Whether the kernel has a driver for a GPU that torch may be able to use."""
    return any(any(devices.glob(name)) for name in GPU_DEVICES)


def gpu_blocks(gpus: Sequence[str], count: int, world: int) -> list[tuple[str, ...]]:
    """``world`` of ``gpus`` for each replica."""
    if len(gpus) < count * world:
        raise ConfigError(
            f"{count} replicas of {plural(world, 'rank')} need {count * world} GPUs, and this machine has "
            f"{plural(len(gpus), 'GPU')}; set --serve.replicas to at most {max(1, len(gpus) // world)}"
        )
    return [tuple(gpus[i * world : (i + 1) * world]) for i in range(count)]
