"""Median timing on one device, by CUDA events on a GPU, with cold caches."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch


class Clock:
    """Times runs on one device with cold caches."""

    def __init__(self, device: str) -> None:
        self.gpu = device == "cuda"
        self.trash = torch.zeros(2**26 if self.gpu else 2**10, device=device)

    def once(self, run: Callable[[], Any]) -> float:
        """Seconds of one run."""
        self.trash.amax()  # read, not written: dirty cache lines would have to be written back during the run
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
        """The median of 5 to 50 runs, as the budget allows, after three warm-up runs."""
        for _ in range(2):
            run()
        once = self.once(run)
        return statistics.median(self.once(run) for _ in range(max(5, min(50, int(budget_s / max(once, 1e-4))))))

    def graphed(self, run: Callable[[], Any]) -> Callable[[], Any]:
        """``run`` captured as a CUDA graph; on a CPU unchanged."""
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
