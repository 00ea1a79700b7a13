"""Sessions, timing, CPU affinity and per-rank files."""

import logging
import os
import time
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from colonnade.compat.tutel.net import Groups, create_groups_from_world
from colonnade.errors import ConfigError
from colonnade.parallel.launch import local_rank

_sessions: list[Groups] = []
NODES = Path("/sys/devices/system/node")
"""Where Linux lists the NUMA nodes and their cores."""


def init_data_model_parallel(group_count: int = 1, backend: str = "nccl") -> Groups:
    """Join the processes that torchrun started (or be one alone) and make ``group_count`` groups of them.

    Raises :class:`PlanError` for a backend without its device, and for ranks that do not divide into the groups.
    """
    _sessions[:] = [create_groups_from_world(group_count, include_init=backend)]
    return _sessions[0]


def init_affinity_at_program_beginning(numa_type: int = 1) -> None:
    """Bind this process to the cores of one NUMA node, ``numa_type`` consecutive local ranks to each node; 0 binds
    none.

    Call it first: running threads are not moved. ``numa_type`` is Tutel's environment variable NUMA_TYPE. If cores
    cannot be bound, a warning is printed.
    """
    if numa_type <= 0:
        return
    if not hasattr(os, "sched_setaffinity"):
        logging.getLogger(__name__).warning("this system does not bind processes to cores; nothing is bound")
        return
    allowed = os.sched_getaffinity(0)
    nodes = sorted(NODES.glob("node[0-9]*"), key=lambda node: int(node.name.removeprefix("node")))
    cores = [{int(core.name.removeprefix("cpu")) for core in node.glob("cpu[0-9]*")} & allowed for node in nodes]
    cores = [some for some in cores if some]  # a node may have memory only
    if not cores:
        logging.getLogger(__name__).warning("%s names no NUMA node of this process's cores; nothing is bound", NODES)
        return
    os.sched_setaffinity(0, cores[local_rank() // numa_type % len(cores)])


def get_local_session() -> Groups:
    """Return the latest session."""
    if not _sessions:
        raise ConfigError("there is no session; call system.init_data_model_parallel() first")
    return _sessions[0]


def record_time(is_cuda: bool | None = None) -> float:
    """Seconds since the epoch after synchronising with the device; ``is_cuda`` None: as in the session."""
    if get_local_session().is_cuda if is_cuda is None else is_cuda:
        torch.cuda.synchronize()
    return time.time()


def save(t: Tensor, path: str) -> None:
    """Write ``t`` as an .npy file."""
    np.save(path, t.detach().cpu().numpy())


def load(path: str, device: torch.device | str | None = None) -> Tensor:
    """Read an .npy file."""
    return torch.tensor(np.load(path), device=device)


def apply_rank_size_from_pattern(filename: str, rank: int, size: int, create_dir: bool = True) -> str:
    """``filename`` with {rank} and {size} filled in, in a folder that exists."""
    if "{rank}" not in filename:
        logging.getLogger(__name__).warning("no {rank} in '%s': all ranks will use the same file", filename)
    filename = filename.replace("{rank}", str(rank)).replace("{size}", str(size))
    if create_dir:
        Path(filename).parent.mkdir(parents=True, exist_ok=True)
    return filename


class LocalCache:
    """Process-wide values by name."""

    _values: ClassVar[dict[Any, Any]] = {}

    @classmethod
    def reset(cls) -> None:
        """Clear the cache."""
        cls._values.clear()

    @classmethod
    def set(cls, key: Any, val: Any) -> None:
        """Store ``val``."""
        cls._values[key] = val

    @classmethod
    def get(cls, key: Any = None) -> Any:
        """The value of ``key``, or all of them if there is none."""
        return cls._values[key] if key in cls._values else list(cls._values.values())


def cache() -> type[LocalCache]:
    """The process's values."""
    return LocalCache
