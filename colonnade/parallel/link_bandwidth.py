"""Latency and bandwidth of the links between ranks, measured at the start of a run.

    seconds of a collective ≈ latency + bytes sent to other ranks / bandwidth

Two sizes of each collective are timed on all ranks. The slowest rank counts, so all ranks have the same numbers and
make the same decisions from them.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from colonnade.parallel import collectives
from colonnade.parallel.axis import Axis

SMALL, LARGE = 1 << 14, 1 << 22
"""Bytes that a rank sends to others."""
REPEATS = 5


@dataclass(frozen=True)
class Link:
    """Cost model of one kind of collective over some ranks."""

    latency_s: float
    bytes_per_s: float

    def seconds(self, size_bytes: float) -> float:
        """Estimated time to send ``size_bytes`` to other ranks."""
        return self.latency_s + size_bytes / self.bytes_per_s


NO_TRAFFIC = Link(0.0, float("inf"))
"""The link of a single rank."""


def all_to_all_link(axis: Axis, device: torch.device) -> Link:
    """Measure an all-to-all over ``axis``."""

    def run(x: Tensor) -> None:
        equal = [len(x) // axis.size] * axis.size
        collectives.all_to_all(x, equal, equal, axis.group)

    # A rank keeps one part of its buffer.
    return _measure(axis, device, run, lambda size: size * axis.size // max(1, axis.size - 1))


def all_gather_link(axis: Axis, device: torch.device) -> Link:
    """Measure an all-gather over ``axis``."""

    def run(x: Tensor) -> None:
        collectives.all_gather(x, axis.size, axis.group)

    return _measure(axis, device, run, lambda size: size // max(1, axis.size - 1))


def slowest_seconds(work: Callable[[], object], device: torch.device, world: Axis) -> float:
    """Median time of ``work`` on the slowest rank of ``world``."""
    times = []
    for _ in range(1 + REPEATS):
        begun = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - begun)
    median = sorted(times[1:])[REPEATS // 2]  # the first call includes setup
    return world.max_(torch.tensor([median], dtype=torch.float64)).item()


def _measure(
    axis: Axis, device: torch.device, run: Callable[[Tensor], None], buffer_bytes: Callable[[int], int]
) -> Link:
    if axis.size == 1:
        return NO_TRAFFIC
    times = []
    for size in (SMALL, LARGE):
        rows = -(-buffer_bytes(size) // axis.size) * axis.size
        x = torch.zeros(rows, dtype=torch.uint8, device=device)
        times.append(slowest_seconds(lambda x=x: run(x), device, axis))
    per_byte = max((times[1] - times[0]) / (LARGE - SMALL), 1e-15)  # the large one may be as fast as the small one
    return Link(max(times[0] - SMALL * per_byte, 0.0), 1 / per_byte)
