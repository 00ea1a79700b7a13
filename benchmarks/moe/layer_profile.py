"""What one pass of a layer of experts spends its time on, kernel by kernel, in the order in which they ran."""

from collections.abc import Callable, Iterable

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

PRODUCTS = {
    "few_tokens_up_kernel": [2], "few_tokens_down_kernel": [1], "up_kernel": [2], "down_kernel": [1, 2],
    "hidden_dgrad_kernel": [1], "wgrad_kernel": [2, 1],
}  # fmt: skip
"""How many products of 2RDF operations each of our kernels does, in the order of its calls, of a gated layer."""
LIBRARYS = ("gemm", "cutlass", "nvjet")
"""Parts of the names of torch's products, each one of 2RDF."""


def timeline(run: Callable[[], object], *, gpu: bool) -> list[tuple[str, float, float]]:
    """(name, start, duration) in µs of each kernel of one run, after two to warm up; of each operator on a CPU.

    A kernel that stands ready while the one before it runs begins when that ends.
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
    return after_each_other(kernels)


def after_each_other(kernels: Iterable[tuple[str, float, float]]) -> list[tuple[str, float, float]]:
    """In the order in which they began, without the time in which the one before was still there."""
    found, end = [], 0.0
    for name, start, took in sorted(kernels, key=lambda it: it[1]):
        begun = max(start, end)
        end = max(end, start + took)
        found.append((name, begun, end - begun))
    return found


def lines(kernels: list[tuple[str, float, float]], product_flops: float, dense_flops: float) -> list[str]:
    """A line for each kernel: its time, its share, and a product's rate beside a dense one's; then what is between."""
    if not kernels:
        return ["nothing ran"]
    whole = max(start + took for _, start, took in kernels) - kernels[0][1]
    calls: dict[str, int] = {}
    found = []
    for name, _, took in kernels:
        call = calls[name] = calls.get(name, -1) + 1
        count = PRODUCTS.get(name, [])[call : call + 1] or [1 if any(it in name.lower() for it in LIBRARYS) else 0]
        rate = count[0] * product_flops / max(took, 1e-3) * 1e6
        said = f"  {rate / 1e12:6.1f} TFLOP/s, {rate / dense_flops:5.1%} of dense" if count[0] else ""
        found.append(f"{took:10.1f} us {took / whole:6.1%}  {name[:60]:60}{said}")
    busy = sum(took for _, _, took in kernels)
    return [*found, f"{whole:10.1f} us in all, {len(kernels)} kernels, {whole - busy:.1f} us between them"]
