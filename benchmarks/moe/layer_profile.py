"""Kernels of one pass of a layer of experts with their times, in order of execution."""

from collections.abc import Callable, Iterable

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

PRODUCTS = {
    "few_tokens_up_kernel": [2], "few_tokens_down_kernel": [1], "up_kernel": [2], "down_kernel": [1, 2],
    "hidden_dgrad_kernel": [1], "wgrad_kernel": [2, 1],
}  # fmt: skip
"""Number of GEMMs of 2RDF FLOPs in each call of our kernels, in order, for a gated layer."""
LIBRARY_NAMES = ("gemm", "cutlass", "nvjet")
"""Parts of the names of torch's GEMM kernels, each one GEMM of 2RDF FLOPs."""


def timeline(run: Callable[[], object], *, gpu: bool) -> list[tuple[str, float, float]]:
    """(name, start, duration) in µs of each kernel (on a CPU: operator) of one run, after two warm-up runs.

    A kernel that overlaps the previous one (programmatic dependent launch) counts from the end of that.
    """
    for _ in range(2):
        run()
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if gpu else [])]
    with profile(activities=kinds) as record:
        run()
        if gpu:
            torch.cuda.synchronize()
    kernels = [
        (str(e.name), float(e.time_range.start), float(e.time_range.elapsed_us()))
        for e in record.events() or []
        if (e.device_type == DeviceType.CUDA if gpu else e.cpu_parent is None)
    ]
    return without_overlap(kernels)


def without_overlap(kernels: Iterable[tuple[str, float, float]]) -> list[tuple[str, float, float]]:
    """Kernels by start time, without their overlap with the previous one."""
    found, end = [], 0.0
    for name, start, took in sorted(kernels, key=lambda it: it[1]):
        begun = max(start, end)
        end = max(end, start + took)
        found.append((name, begun, end - begun))
    return found


def lines(kernels: list[tuple[str, float, float]], product_flops: float, dense_flops: float) -> list[str]:
    """A line per kernel with time, share and, for a GEMM, its rate over a dense one; then the time between kernels."""
    if not kernels:
        return ["nothing ran"]
    whole = max(start + took for _, start, took in kernels) - kernels[0][1]
    calls: dict[str, int] = {}
    found = []
    for name, _, took in kernels:
        call = calls[name] = calls.get(name, -1) + 1
        count = PRODUCTS.get(name, [])[call : call + 1] or [1 if any(it in name.lower() for it in LIBRARY_NAMES) else 0]
        rate = count[0] * product_flops / max(took, 1e-3) * 1e6
        rate_text = f"  {rate / 1e12:6.1f} TFLOP/s, {rate / dense_flops:5.1%} of dense" if count[0] else ""
        found.append(f"{took:10.1f} us {took / whole:6.1%}  {name[:60]:60}{rate_text}")
    busy = sum(took for _, _, took in kernels)
    return [*found, f"{whole:10.1f} us in all, {len(kernels)} kernels, {whole - busy:.1f} us between them"]
