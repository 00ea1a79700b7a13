"""Paired timing: compared runs alternate, so that both see the same load of the machine."""

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


def run_interleaved(runs: Mapping[str, Callable[[int], T]], rounds: int, warm_up: int = 1) -> dict[str, list[T]]:
    """Call every run with the round's number, in alternating order; returns their results by name.

    The first ``warm_up`` rounds are discarded: they allocate, and create threads and kernels.
    """
    results: dict[str, list[T]] = {name: [] for name in runs}
    for i in range(warm_up + rounds):
        for name in list(runs)[:: 1 if i % 2 else -1]:
            result = runs[name](i)
            if i >= warm_up:
                results[name].append(result)
    return results


def wall_clock(run: Callable[[int], Any]) -> Callable[[int], float]:
    """A function that calls ``run`` and returns its wall-clock seconds."""

    def seconds(i: int) -> float:
        began = time.perf_counter()
        run(i)
        return time.perf_counter() - began

    return seconds


class OtherProcesses:
    """Measures the CPU share of other processes since construction, for a result's notes."""

    def __init__(self) -> None:
        self.began = self._now()

    def __str__(self) -> str:
        all_s, busy_s, ours_s = (now - then for now, then in zip(self._now(), self.began, strict=True))
        if not all_s:
            return "CPU time of other processes unknown"
        return f"other processes used {max(0.0, busy_s - ours_s) / all_s:.1%} of the CPU time"

    @staticmethod
    def _now() -> tuple[float, float, float]:
        """(CPU time in all, not idle, of this process) [s]; zeros where the system does not report them."""
        counts = Path("/proc/stat")
        if not counts.exists():
            return 0.0, 0.0, 0.0
        # user nice system idle iowait irq softirq steal, in ticks; guests are counted within user
        ticks = [int(word) / os.sysconf("SC_CLK_TCK") for word in counts.read_text().split("\n", 1)[0].split()[1:9]]
        return sum(ticks), sum(ticks) - ticks[3] - ticks[4], time.process_time()
