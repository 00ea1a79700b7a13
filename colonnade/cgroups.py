"""Control groups (cgroups) of this process, version 1 or 2: the folders that limit a resource, innermost first.

    /proc/self/cgroup      path of the process's group in each hierarchy
    /proc/self/mountinfo   where the hierarchy is mounted, and which group is its root

Containers and job schedulers nest groups; every one of them limits the process, so the tightest limit counts.
"""

from collections.abc import Iterator
from pathlib import Path

from colonnade.proc_stat import PROC


def control_groups(controller: str, proc: Path = PROC) -> Iterator[tuple[int, Path]]:
    """(version, folder) of each group that may limit ``controller`` (cpu, memory) for this process."""
    cgroup, mountinfo = proc / "self" / "cgroup", proc / "self" / "mountinfo"
    if not (cgroup.is_file() and mountinfo.is_file()):
        return
    paths: dict[int, str] = {}
    for line in _lines(cgroup):
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            paths[2] = path
        elif controller in controllers.split(","):
            paths[1] = path
    for line in _lines(mountinfo):
        left, _, right = line.partition(" - ")
        kind, _, options = right.split(" ", 2)
        version = 2 if kind == "cgroup2" else 1
        limits = kind == "cgroup2" or (kind == "cgroup" and controller in options.split(","))
        if not limits or version not in paths:
            continue
        root, mount = left.split()[3:5]
        group = Path(paths[version])
        # In a container the path may be the host's, while only the part below ``root`` is mounted.
        folder = Path(mount) / (group.relative_to(root) if group.is_relative_to(root) else Path())
        for each in (folder, *folder.parents):
            yield version, each
            if each == Path(mount):
                break


def _lines(file: Path) -> list[str]:
    """Its lines. Names of folders in them may have any bytes; of those only the newline is escaped."""
    return [line for line in file.read_text(encoding="utf-8", errors="surrogateescape").split("\n") if line]
