"""Upper bounds of a machine: read bandwidth of its memory, and rates of matrix products, by number of threads.

    bandwidth   bytes of a buffer larger than the caches / time of the fastest torch reduction over it
    products    2 N³ / time of an (N, N) product; int8 is oneDNN's product of uint8 and int8, on a CPU. N is smaller for
                number formats that the processor lacks, because their products are up to a hundred times slower

The best of several runs counts, because other processes can only slow a run down.
"""

import os
import platform
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from colonnade.parallel.device_memory import free_bytes

BUFFER_BYTES = {"cpu": 1 << 29, "cuda": 1 << 32}
"""Size of the buffer that is read: larger than the caches of most machines."""

PRODUCT_SIZE = {"cpu": 2048, "cuda": 8192}
"""N of the measured products, at most."""


class Ceilings(NamedTuple):
    """Bounds with one number of threads."""

    threads: int
    read_bytes_per_s: float
    flops: dict[str, float]
    """Multiplications and additions per second, by number format."""


def measure_ceilings(
    device: str, threads: Iterable[int], budget_s: float, *, buffer_bytes: int = 0, size: int = 0
) -> Iterator[Ceilings]:
    """The bounds for each number of ``threads``, in about ``budget_s`` seconds; on a GPU they do not depend on it."""
    counts = list(threads) if device == "cpu" else [torch.get_num_threads()]
    size = size or PRODUCT_SIZE[device]
    for count in counts:
        with use_threads(count):
            formats = _products(device)
            each_s = budget_s / len(counts) / (len(formats) + 1)
            most = free_bytes(torch.device(device)) // 4
            bandwidth = read_bandwidth(device, buffer_bytes or min(most, BUFFER_BYTES[device]), each_s)
            flops = {name: _rate(make, device, size, each_s) for name, make in formats.items()}
        yield Ceilings(count, bandwidth, flops)


def read_bandwidth(device: str, buffer_bytes: int, budget_s: float = 1.0) -> float:
    """Read bandwidth in bytes/s: the best of several reductions of torch."""
    x = torch.ones(max(1, buffer_bytes >> 16) << 14, device=device)
    rows = x.view(-1, 1 << 14)
    reductions = [x.sum, lambda: torch.dot(x, x), x.amax, lambda: rows.sum(1), lambda: rows.amax(1)]
    return x.nbytes / min(fastest(run, device, budget_s / len(reductions)) for run in reductions)


def fastest(run: Callable[[], object], device: str, budget_s: float) -> float:
    """Seconds of the fastest of at least three runs, after a warm-up run."""
    run()
    best, end = float("inf"), time.perf_counter() + budget_s
    count = 0
    while count < 3 or time.perf_counter() < end:
        best, count = min(best, _seconds(run, device)), count + 1
    return best


def _seconds(run: Callable[[], object], device: str) -> float:
    if device == "cuda":
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        run()
        last.record()
        last.synchronize()
        return first.elapsed_time(last) / 1e3
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def _rate(make: Callable[[int], Callable[[], object]], device: str, size: int, budget_s: float) -> float:
    """Operations per second of the product that ``make`` returns for a size, at most ``size``.

    The size doubles from 256 as long as the next product is expected to take less than ``budget_s``.
    """
    now = min(size, 256)
    best = fastest(make(now), device, 0)
    while now < size and 8 * best < budget_s:
        now = min(size, 2 * now)
        best = fastest(make(now), device, budget_s if now == size else 0)
    return 2 * now**3 / best


def _products(device: str) -> dict[str, Callable[[int], Callable[[], object]]]:
    """By number format that the device has: a function that makes the (N, N) product for N."""

    def product(dtype: torch.dtype, size: int) -> Callable[[], object]:
        a = torch.randn(size, size, device=device).to(dtype)
        return lambda: a @ a

    def int8(size: int) -> Callable[[], object]:
        x = torch.randint(0, 255, (size, size), dtype=torch.uint8)
        return int8_product(x, torch.randn(size, size).to(torch.int8))

    formats: dict[str, Callable[[int], Callable[[], object]]] = {"bfloat16": partial(product, torch.bfloat16)}
    if device == "cpu":
        formats = {"float32": partial(product, torch.float32), **formats}
        if hasattr(torch.ops.onednn, "qlinear_prepack"):
            formats["int8"] = int8
    return formats


def int8_product(x_TD: torch.Tensor, weight_FD: torch.Tensor) -> Callable[[], torch.Tensor]:
    """The product of activations of uint8 and weights of int8, exact in float32 while the sums are below 2²⁴.

    Processors without VNNI add products in pairs of 16 bits, which saturate if activations are over 128.
    """
    packed = torch.ops.onednn.qlinear_prepack(weight_FD, list(x_TD.shape))
    outputs = len(weight_FD)
    scales, zeros = torch.ones(outputs), torch.zeros(outputs, dtype=torch.int64)
    return lambda: torch.ops.onednn.qlinear_pointwise(
        x_TD, 1.0, 0, packed, scales, zeros, None, 1.0, 0, torch.float32, "none", [], "none"
    )


def thread_counts(most: int) -> list[int]:
    """1, 2, 4, … and ``most``."""
    return sorted({*(1 << i for i in range(most.bit_length())), most})


@contextmanager
def use_threads(count: int) -> Iterator[None]:
    """Context manager: operations in the block use ``count`` threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def machine_name(device: str) -> str:
    """The GPU's or the processor's name; the architecture, where the system does not report it."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    info = Path("/proc/cpuinfo")
    for text in info.read_text().splitlines() if info.exists() else ():
        if text.startswith("model name"):
            return text.split(":", 1)[1].strip()
    return platform.processor() or platform.machine() or os.name
