"""Divides the cores or the GPUs of this machine among replicas.

Each replica gets a block of neighbouring cores: whole cores with all their hardware threads, and as few sockets as
possible. Its processes are started with that affinity, so that every library counts the cores of the block only.
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
    """Where one replica runs; empty: anywhere."""

    cores: tuple[int, ...] = ()
    """Numbers of logical CPUs."""
    gpus: tuple[str, ...] = ()
    """Entries of CUDA_VISIBLE_DEVICES."""


ANYWHERE = Placement()


def place_replicas(count: int, plan: Plan, device: str) -> list[Placement]:
    """A placement for each of ``count`` replicas; raises :class:`ConfigError` if there are too few cores or GPUs."""
    if count == 1:
        return [ANYWHERE]
    from colonnade.parallel.launch import visible_gpus

    gpus = () if device == "cpu" else visible_gpus()
    if device == "cuda" or len(gpus) >= plan.world:
        return [Placement(gpus=block) for block in gpu_blocks(gpus, count, plan.world)]
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    return [Placement(cores=block) for block in core_blocks(neighbours(list(cores)), count)]


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
