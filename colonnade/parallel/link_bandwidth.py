"""How fast the links between some ranks are, measured once at the start of a run.

    seconds of a collective ≈ latency + bytes handed to others / bandwidth

Two sizes of each collective are timed on all ranks and the slowest rank counts, so that all ranks know the same
numbers, and decide alike by them.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from colonnade.parallel import collectives
from colonnade.parallel.axis import Axis

SMALL, LARGE = 1 << 14, 1 << 22
"""Bytes that a rank hands to others."""
REPEATS = 5


@dataclass(frozen=True)
class Link:
    """One kind of collective over some ranks."""

    latency_s: float
    bytes_per_s: float

    def seconds(self, size_bytes: float) -> float:
        """What it takes to hand so many bytes to others."""
        return self.latency_s + size_bytes / self.bytes_per_s


FREE = Link(0.0, float("inf"))
"""Nothing travels."""


def exchange_link(axis: Axis, device: torch.device) -> Link:
    """An all-to-all over ``axis``."""

    def run(x: Tensor) -> None:
        equal = [len(x) // axis.size] * axis.size
        collectives.all_to_all(x, equal, equal, axis.group)

    # Of what a rank lays out it keeps one part.
    return _link(axis, device, run, lambda size: size * axis.size // max(1, axis.size - 1))


def gather_link(axis: Axis, device: torch.device) -> Link:
    """An all-gather over ``axis``."""

    def run(x: Tensor) -> None:
        collectives.all_gather(x, axis.size, axis.group)

    return _link(axis, device, run, lambda size: size // max(1, axis.size - 1))


def rate(work: Callable[[], object], device: torch.device, world: Axis) -> float:
    """Seconds that ``work`` takes on the slowest rank of ``world``: the median of some."""
    return _slowest(_times(work, device), world)


def _link(axis: Axis, device: torch.device, run: Callable[[Tensor], None], laid: Callable[[int], int]) -> Link:
    if axis.size == 1:
        return FREE
    took = []
    for size in (SMALL, LARGE):
        rows = -(-laid(size) // axis.size) * axis.size
        x = torch.zeros(rows, dtype=torch.uint8, device=device)
        took.append(_slowest(_times(lambda x=x: run(x), device), axis))
    per_byte = max((took[1] - took[0]) / (LARGE - SMALL), 1e-15)  # a large one may be as fast as a small one
    return Link(max(took[0] - SMALL * per_byte, 0.0), 1 / per_byte)


def _times(work: Callable[[], object], device: torch.device) -> list[float]:
    found = []
    for _ in range(1 + REPEATS):
        begun = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found.append(time.perf_counter() - begun)
    return found[1:]  # the first one sets things up


def _slowest(times: list[float], axis: Axis) -> float:
    median = sorted(times)[len(times) // 2]
    return axis.max_(torch.tensor([median], dtype=torch.float64)).item()
