"""Whether other processes compete for this process's cores; decides how OpenMP's threads wait.

Between two operators torch's threads spin for milliseconds. On a core of their own that saves the time to wake them; on
a core that others use too they hold up the very thread for which they wait. SmolLM2-135M on 2 cores, 8 tokens:

    nothing else runs       spinning 0.18 s     sleeping (OMP_WAIT_POLICY=PASSIVE) 0.32 s
    2 other busy processes  spinning 7.9 s      sleeping 0.29 s
"""

import os
from collections.abc import MutableMapping
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
"""Where Linux mounts cgroups."""

BUSY_SHARE = 0.25
"""Cores count as shared if other processes have kept more than this part of them busy during the last minute."""

OPENMP_VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
"""A user who has set one of them has decided."""


def let_threads_sleep(environ: MutableMapping[str, str]) -> None:
    """Let OpenMP's threads sleep while they wait, if cores are shared; to be called before torch is imported."""
    if not any(name in environ for name in OPENMP_VARIABLES) and cores_shared():
        environ["OMP_WAIT_POLICY"] = "PASSIVE"


def cores_shared() -> bool:
    """Whether this process has a smaller CPU quota than cores, or others keep the cores busy."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_quota()
    return (quota is not None and quota < cores) or os.getloadavg()[0] > BUSY_SHARE * (os.cpu_count() or 1)


def cpu_quota(cgroup: Path = CGROUP) -> float | None:
    """CPU quota of this container [cores], by cgroup v2 or v1; None without one."""
    try:
        if (both := cgroup / "cpu.max").exists():
            quota, period = both.read_text().split()
        else:
            quota = (cgroup / "cpu/cpu.cfs_quota_us").read_text().strip()
            period = (cgroup / "cpu/cpu.cfs_period_us").read_text()
    except FileNotFoundError:
        return None
    return None if quota in ("max", "-1") else int(quota) / int(period)
