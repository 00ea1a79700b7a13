"""Total and free memory of a device: a GPU's, or the host's within its control groups.

    free(host) = min(MemAvailable, limit − usage + file cache of each control group of this process,
                     RLIMIT_AS − address space in use)

Containers and job schedulers limit memory by control groups (:mod:`colonnade.cgroups`); the tightest limit counts. The
kernel drops the file cache before it kills a process, so the cache counts as free. psutil does not read
cgroup limits, so it would replace only the three lines that parse /proc/meminfo.
"""

import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from colonnade.cgroups import control_groups
from colonnade.parallel.launch import local_world_size
from colonnade.proc_stat import PROC

USABLE_FRACTION = 0.95
"""Of free memory; allocators and libraries need the rest."""
UNLIMITED = 1 << 60
"""Limits from here on mean none: version 1 writes the largest multiple of a page below 2⁶³."""


class _CgroupFiles(NamedTuple):
    """File names of a control group, and the rows of its memory.stat that are file cache."""

    limit: str
    usage: str
    cache: tuple[str, str]


V1 = _CgroupFiles("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file"))
V2 = _CgroupFiles("memory.max", "memory.current", ("inactive_file", "active_file"))


def free_bytes(device: torch.device) -> int:
    """Memory that this process may still allocate; on a GPU including torch's cached blocks."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free_host_bytes()


def usable_bytes(device: torch.device) -> int:
    """Memory that one rank may plan for: :data:`USABLE_FRACTION` of what is free, on a CPU divided by local ranks."""
    return int(USABLE_FRACTION * free_bytes(device)) // (local_world_size() if device.type == "cpu" else 1)


def free_host_bytes(proc: Path = PROC) -> int:
    """Free host memory within the limits of this process and of its control groups."""
    available = _meminfo_bytes(proc / "meminfo", "MemAvailable")
    return min([available, *(free for _, free in _cgroup_limits(proc)), *_free_address_space(proc)])


def host_bytes(proc: Path = PROC) -> int:
    """Total host memory, or the tightest limit of a control group."""
    return min([_meminfo_bytes(proc / "meminfo", "MemTotal"), *(limit for limit, _ in _cgroup_limits(proc))])


def _free_address_space(proc: Path) -> list[int]:
    """The memory that RLIMIT_AS (``ulimit -v``) leaves to this process, if it is set."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    statm = proc / "self" / "statm"
    if limit == resource.RLIM_INFINITY or not statm.is_file():
        return []
    return [max(0, limit - int(statm.read_text(encoding="ascii").split()[0]) * resource.getpagesize())]


def _meminfo_bytes(meminfo: Path, row: str) -> int:
    """``row`` of /proc/meminfo; all physical memory on systems without this file."""
    if meminfo.is_file():
        lines = dict(line.split(":", 1) for line in meminfo.read_text(encoding="ascii").splitlines() if ":" in line)
        if row in lines:
            return int(lines[row].split()[0]) << 10
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _cgroup_limits(proc: Path) -> Iterator[tuple[int, int]]:
    """(limit, free) of each limited control group of this process, innermost first."""
    for version, folder in control_groups("memory", proc):
        names = V1 if version == 1 else V2
        limit_file, usage_file, stat = (folder / name for name in (names.limit, names.usage, "memory.stat"))
        if limit_file.is_file() and usage_file.is_file():
            limit = limit_file.read_text(encoding="ascii").strip()
            if limit != "max" and int(limit) < UNLIMITED:
                rows = dict(line.split() for line in stat.read_text("ascii").splitlines()) if stat.is_file() else {}
                cache = sum(int(rows.get(row, 0)) for row in names.cache)
                used = int(usage_file.read_text(encoding="ascii")) - cache
                yield int(limit), max(0, int(limit) - used)
