"""Divides the cores or the GPUs of this machine among the engines of a server: replicas, or different models.

Each replica gets a block of neighbouring cores: whole cores with all their hardware threads, and as few sockets as
possible. Its processes are started with that affinity, so that every library counts the cores of the block only. Of the
GPUs each engine gets as many as its plan has ranks. If they are too few, different models share them. Models always
share cores, since not all are busy at the same time.
"""

import os
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from colonnade.config import Plan
from colonnade.config.base import plural
from colonnade.errors import ConfigError

CPUS = Path("/sys/devices/system/cpu")


class Placement(NamedTuple):
    """Where one engine runs; empty: anywhere."""

    cores: tuple[int, ...] = ()
    """Numbers of logical CPUs."""
    gpus: tuple[str, ...] = ()
    """Entries of CUDA_VISIBLE_DEVICES."""
    engines: int = 1
    """Engines among which the memory is divided that is free when this one allocates its cache
    (:mod:`colonnade.serve.start_order`)."""

    @property
    def alone(self) -> "Placement":
        """The same place, with its memory undivided; equal for engines that share cores or GPUs."""
        return self._replace(engines=1)


ANYWHERE = Placement()


def place_engines(models: int, replicas: int, plan: Plan, device: str) -> list[list[Placement]]:
    """For each of ``models`` a placement for each of its ``replicas``.

    Raises :class:`ConfigError` if there are too few cores or GPUs for the replicas of one model.
    """
    if models == replicas == 1:
        return [[ANYWHERE]]
    from colonnade.parallel.launch import visible_gpus

    gpus = () if device == "cpu" else visible_gpus()
    if device == "cuda" or len(gpus) >= plan.world:
        blocks = gpu_blocks(gpus, replicas, plan.world)
        blocks += gpu_blocks(gpus, len(gpus) // plan.world, plan.world)[replicas:]
        return share_gpus(blocks, models, replicas)
    if replicas == 1:
        return [[Placement(engines=models)] for _ in range(models)]
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    blocks = core_blocks(neighbours(list(cores)), replicas)
    return [[Placement(cores=block, engines=models) for block in blocks] for _ in range(models)]


def share_gpus(blocks: Sequence[tuple[str, ...]], models: int, replicas: int) -> list[list[Placement]]:
    """The placements of the engines on ``blocks`` of GPUs, taken in turn; a block's later engines divide less."""
    chosen = [blocks[i % len(blocks)] for i in range(models * replicas)]
    flat = [Placement(gpus=block, engines=chosen[i:].count(block)) for i, block in enumerate(chosen)]
    return [flat[i : i + replicas] for i in range(0, len(flat), replicas)]


def gpu_blocks(gpus: Sequence[str], count: int, world: int) -> list[tuple[str, ...]]:
    """``world`` of ``gpus`` for each replica."""
    if len(gpus) < count * world:
        raise ConfigError(
            f"{count} replicas of {plural(world, 'rank')} need {count * world} GPUs, and this machine has "
            f"{plural(len(gpus), 'GPU')}; set --serve.replicas to at most {max(1, len(gpus) // world)}"
        )
    return [tuple(gpus[i * world : (i + 1) * world]) for i in range(count)]


def core_blocks(cores: Sequence[int], count: int) -> list[tuple[int, ...]]:
    """Blocks of ``cores`` whose sizes differ by one at most."""
    if len(cores) < count:
        raise ConfigError(
            f"{count} replicas need a core each, and this process may use {plural(len(cores), 'core')}; set "
            f"--serve.replicas to at most {len(cores)}"
        )
    edges = [i * len(cores) // count for i in range(count + 1)]
    return [tuple(cores[start:end]) for start, end in pairwise(edges)]


def neighbours(cores: Sequence[int], cpus: Path = CPUS) -> list[int]:
    """``cores`` by socket, then by physical core; by number where the kernel does not tell."""

    def position(core: int) -> tuple[int, int, int]:
        folder = cpus / f"cpu{core}" / "topology"
        try:
            socket, physical = (int((folder / name).read_text()) for name in ("physical_package_id", "core_id"))
        except (OSError, ValueError):
            return (0, core, core)
        return (socket, physical, core)

    return sorted(cores, key=position)
