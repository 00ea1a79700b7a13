"""Checks of decode kernels that run many times or alongside other work; ``made`` is a case's tensors and plan."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def same(made: Any, tolerance: float) -> None:
    """Compare output and log-sum-exp by norm; memory starts as NaN, so that unwritten elements show."""
    for what, got, right in zip(("o", "lse"), made.run(), made.exact(), strict=True):
        seen = right.isfinite()
        assert torch.equal(got.isfinite(), seen), what
        error = float((got.double() - right)[seen].norm() / right[seen].norm().clamp(min=1e-9))
        assert error < tolerance, (what, error)


def launch_often(cell: Callable[[int], Any], cells: int, check: Callable[[Any], object]) -> None:
    """Launch ``cell(0)``, ``cell(1)``, … five times each; the outputs are the same, and no memory leaks.

    ``check`` gets every 20th cell. The largest is among the first 20.
    """
    before = 0
    for i in range(cells):
        made = cell(i)
        states = [made.run() for _ in range(5)]
        assert all(torch.equal(state.o, states[0].o) for state in states[1:]), i
        if i % 20 == 0:
            check(made)
        del made, states
        if i == 20:
            before = torch.cuda.memory_allocated()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before + 2**20


def launch_beside_full_gpu(launches: Sequence[Callable[[], Tensor]], alone: Sequence[Tensor]) -> None:
    """Two launches, each in a stream of its own, give ``alone`` while products in a third stream fill the GPU.

    Blocks that wait for each other's states are co-resident, so nothing deadlocks.
    """
    x = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    streams = [torch.cuda.Stream(priority=priority) for priority in (0, -1, 0)]
    torch.cuda.synchronize()
    outputs: list[Tensor] = []
    for _ in range(50):
        with torch.cuda.stream(streams[2]):
            for _ in range(3):
                torch.mm(x, x)
        for launch, stream in zip(launches, streams, strict=False):
            with torch.cuda.stream(stream):
                outputs += [launch() for _ in range(4)]
    torch.cuda.synchronize()
    assert len(outputs) == 400
    for i, o in enumerate(outputs):
        assert torch.equal(o, alone[i // 4 % 2])
