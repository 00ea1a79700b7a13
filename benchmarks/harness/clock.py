"""Timing on one device, a GPU by its own events: medians, with other numbers in the level-2 cache before each run."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch


class Clock:
    """Times runs on one device, with its caches cold."""

    def __init__(self, device: str) -> None:
        self.gpu = device == "cuda"
        self.trash = torch.zeros(2**26 if self.gpu else 2**10, device=device)

    def once(self, run: Callable[[], Any]) -> float:
        """Seconds of one run."""
        self.trash.amax()  # read, not written: what is written, the run would have to write back to memory first
        if not self.gpu:
            began = time.perf_counter()
            run()
            return time.perf_counter() - began
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        run()
        last.record()
        last.synchronize()
        return first.elapsed_time(last) / 1e3

    def median(self, run: Callable[[], Any], budget_s: float) -> float:
        """The median of as many runs as the budget allows, 5 to 50, after three to warm up."""
        for _ in range(2):
            run()
        once = self.once(run)
        return statistics.median(self.once(run) for _ in range(max(5, min(50, int(budget_s / max(once, 1e-4))))))

    def graphed(self, run: Callable[[], Any]) -> Callable[[], Any]:
        """``run`` as a graph's replay, where there is a GPU."""
        if not self.gpu:
            return run
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run()
            run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        return graph.replay
