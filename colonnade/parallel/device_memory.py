"""How much memory a device has, and how much of it is free: a GPU's, or the host's within its control groups.

    free(host) = min(MemAvailable, limit − usage + file cache of each control group around this process)

Containers and job schedulers limit memory by control groups, version 1 or 2, often nested: the tightest one counts.
The kernel drops cached files before it kills a process, so they count as free.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from colonnade.parallel.launch import beside

SHARE = 0.95
"""Of the memory that is free, what may be planned for: allocators and libraries need the rest."""
PROC = Path("/proc")
UNLIMITED = 1 << 60
"""A limit from here on is none: version 1 writes the largest multiple of a page below 2⁶³."""


class _Names(NamedTuple):
    """Files of a control group, and the rows of its memory.stat that are file cache."""

    limit: str
    usage: str
    cache: tuple[str, str]


V1 = _Names("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file"))
V2 = _Names("memory.max", "memory.current", ("inactive_file", "active_file"))


def free_bytes(device: torch.device) -> int:
    """Memory that this process may still allocate; on a GPU with what torch holds in reserve."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free_host_bytes()


def share_bytes(device: torch.device) -> int:
    """What one rank may plan for: :data:`SHARE` of what is free, on a CPU divided among the host's ranks."""
    return int(SHARE * free_bytes(device)) // (beside() if device.type == "cpu" else 1)


def free_host_bytes(proc: Path = PROC) -> int:
    """Memory that the machine and the control groups of this process leave."""
    return min([_machine_bytes(proc / "meminfo", "MemAvailable"), *(free for _, free in _groups(proc))])


def host_bytes(proc: Path = PROC) -> int:
    """All memory that this process could have: the machine's, or the tightest limit of a control group."""
    return min([_machine_bytes(proc / "meminfo", "MemTotal"), *(limit for limit, _ in _groups(proc))])


def _machine_bytes(meminfo: Path, row: str) -> int:
    """``row`` of /proc/meminfo; all physical memory, where the system has no such file."""
    if meminfo.is_file():
        lines = dict(line.split(":", 1) for line in meminfo.read_text(encoding="ascii").splitlines() if ":" in line)
        if row in lines:
            return int(lines[row].split()[0]) << 10
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _groups(proc: Path) -> Iterator[tuple[int, int]]:
    """(limit, free) of each limited control group around this process, from the innermost out."""
    for names, mount, group in _mounted(proc):
        for folder in (group, *group.parents):
            limit, usage, stat = (folder / name for name in (names.limit, names.usage, "memory.stat"))
            if limit.is_file() and usage.is_file():
                most = limit.read_text(encoding="ascii").strip()
                if most != "max" and int(most) < UNLIMITED:
                    rows = dict(line.split() for line in stat.read_text("ascii").splitlines()) if stat.is_file() else {}
                    cache = sum(int(rows.get(row, 0)) for row in names.cache)
                    yield int(most), max(0, int(most) - int(usage.read_text(encoding="ascii")) + cache)
            if folder == mount:
                break


def _mounted(proc: Path) -> Iterator[tuple[_Names, Path, Path]]:
    """(files, mount point, folder of this process's group) of each hierarchy that limits memory."""
    cgroup, mountinfo = proc / "self" / "cgroup", proc / "self" / "mountinfo"
    if not (cgroup.is_file() and mountinfo.is_file()):
        return
    paths: dict[_Names, str] = {}
    for line in cgroup.read_text(encoding="utf-8").splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            paths[V2] = path
        elif "memory" in controllers.split(","):
            paths[V1] = path
    for line in mountinfo.read_text(encoding="utf-8").splitlines():
        left, _, right = line.partition(" - ")
        kind, _, options = right.split(" ", 2)
        names = V2 if kind == "cgroup2" else V1
        controls = kind == "cgroup2" or (kind == "cgroup" and "memory" in options.split(","))
        if not controls or names not in paths:
            continue
        root, mount = left.split()[3:5]
        inside = Path(paths[names])
        # In a container the path may be the host's, and the mount only what lies below ``root``.
        below = inside.relative_to(root) if inside.is_relative_to(root) else Path()
        yield names, Path(mount), Path(mount) / below
