"""Memory, CPU time and files of a server with several HTTP processes (fronts), summed over all of them."""

import os
from collections.abc import Iterator
from pathlib import Path

from prometheus_client import ProcessCollector
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from colonnade.proc_stat import stat_fields

FIRST = "process_start_time_seconds"
"""The metric that is exported as its minimum instead of its sum."""


class FrontProcesses(Collector):
    """prometheus_client's metrics of processes: the fronts that use ``folder``, and the one that started them."""

    def __init__(self, folder: str):
        self._folder = Path(folder)

    def collect(self) -> Iterator[Metric]:
        """The sums."""
        totals: dict[str, Metric] = {}
        for pid in self._pids():
            for metric in ProcessCollector(pid=lambda pid=pid: pid, registry=None).collect():
                if (total := totals.setdefault(metric.name, metric)) is metric:
                    continue
                old, new = total.samples[0], metric.samples[0]
                value = min(old.value, new.value) if metric.name == FIRST else old.value + new.value
                total.samples[0] = old._replace(value=value)
        yield from totals.values()

    def _pids(self) -> Iterator[int]:
        """This process's parent, and its children that have files here (``counter_PID.db``) and still run."""
        parent = os.getppid()
        yield parent
        for pid in sorted({int(file.stem.rpartition("_")[2]) for file in self._folder.glob("*.db")}):
            try:
                fields = stat_fields(pid)
            except FileNotFoundError:
                continue
            if int(fields[1]) == parent and fields[0] != "Z":
                yield pid
