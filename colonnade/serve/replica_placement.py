"""Decides where the replicas of a server run: on cores (:mod:`colonnade.cores`) or on GPUs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from colonnade.config import Plan
from colonnade.config.base import plural
from colonnade.cores import CpuPlacement, Machine, auto_replicas, idle_warning, place, read_machine
from colonnade.errors import ConfigError

GPU_DEVICES = ("nvidia[0-9]*", "nvgpu*", "nvhost-gpu", "dxg", "kfd")
"""Names of GPUs in /dev: NVIDIA's, on Jetson, on Windows' Linux, and AMD's."""


class Placement(NamedTuple):
    """Where one replica runs; empty: anywhere."""

    cpus: CpuPlacement | None = None
    gpus: tuple[str, ...] = ()
    """Entries of CUDA_VISIBLE_DEVICES."""


ANYWHERE = Placement()


def place_replicas(
    count: int | Literal["auto"], plan: Plan, device: str, machine: Machine | None = None
) -> tuple[list[Placement], str]:
    """(a placement for each of ``count`` replicas, a warning or nothing) on ``machine``, by default this one.

    Raises :class:`ConfigError` if there are too few cores or GPUs. Imports torch only if there may be GPUs.
    """
    if device == "cuda" or (device == "auto" and has_gpu_devices()):
        if count == 1:
            return [ANYWHERE], ""
        from colonnade.parallel.launch import visible_gpus

        gpus = visible_gpus()
        if device == "cuda" or len(gpus) >= plan.world:
            blocks = gpu_blocks(gpus, max(1, len(gpus) // plan.world) if count == "auto" else count, plan.world)
            return [Placement(gpus=block) for block in blocks], ""
    machine = machine or read_machine()
    number = auto_replicas(machine, plan.world) if count == "auto" else count
    placements = [Placement(cpus) for cpus in place(machine, number, plan.world)]
    return placements, idle_warning(machine, number, plan.world)


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
