"""Attention of prompt chunks against the cached tokens of their requests (benchmarks/flash_decoding.py).

Ours reads the pages in place. SDPA gets gathered pages, with a mask if there are cached tokens, as in serving without
our kernel. TFLOP/s count visible scores only.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from colonnade.kernels.attention import reference, sdpa, triton_decode
from colonnade.kernels.attention.decode_plan import KernelLayout
from colonnade.kernels.attention.decode_tiles import Tiles
from colonnade.kernels.attention.page_table import PageTable
from decoding import decode_cells
from harness.rows import format_row, round_significant

TOLERANCE = 6e-4
CANDIDATES = [
    Tiles(tile, warps, stages, 1, 64, 32)
    for tile, warps, stages in ((64, 8, 3), (64, 8, 2), (64, 8, 4), (128, 8, 2), (128, 8, 3), (64, 4, 3), (32, 8, 4))
]


@dataclass(frozen=True)
class Chunks:
    """``requests`` requests with ``new`` tokens each, after ``known`` cached ones."""

    requests: int
    new: int
    known: int
    K: int = 8
    group: int = 4
    H: int = 128
    page: int = 64

    @property
    def flops(self) -> float:
        """FLOPs of the two GEMMs over visible scores."""
        seen = self.requests * (self.new * self.known + self.new * (self.new + 1) / 2)
        return 4 * seen * self.K * self.group * self.H


CELLS = (Chunks(1, 512, 0), Chunks(1, 8192, 0), Chunks(8, 1024, 0), Chunks(1, 512, 32_768), Chunks(4, 512, 4096))
TINY = (Chunks(1, 20, 0, 1, 2, 16), Chunks(2, 9, 30, 1, 2, 16))


def make_tensors(cell: Chunks, device: str) -> tuple[Any, ...]:
    """(q_TNH, k_PpKH, v_PpKH, table), pages in random order."""
    draw = torch.Generator(device).manual_seed(0)
    length = cell.known + cell.new
    pages = -(-length // cell.page)
    P = cell.requests * pages

    def drawn(*shape: int) -> torch.Tensor:
        return torch.empty(shape, device=device, dtype=torch.float16).normal_(generator=draw)

    q = drawn(cell.requests * cell.new, cell.K * cell.group, cell.H)
    k, v = (drawn(P, cell.page, cell.K, cell.H) for _ in range(2))
    pages_RP = torch.randperm(P, device=device, generator=draw).int().view(cell.requests, pages)
    cu = torch.arange(cell.requests + 1, device=device, dtype=torch.int32) * cell.new
    lengths = torch.full((cell.requests,), length, device=device, dtype=torch.int32)
    return q, k, v, PageTable(pages_RP, cu, lengths, cell.page, cell.new, length)


def ours(q: Any, k: Any, v: Any, table: PageTable) -> Callable[[], Any]:
    """Our kernel; on a CPU the plain executor of the same plan."""
    layout = KernelLayout.for_prefill(q, k)
    new, lengths = table.host_lengths
    plan = layout.plan(lengths, new)
    if q.device.type == "cpu":
        return lambda: reference.run_plan(plan, layout.shape, q, k, v, table).o
    ready = layout.prepare(plan, q.device)
    return lambda: triton_decode.attend(q, k, v, table, ready).o


def seconds(run: Callable[[], Any]) -> float:
    """Seconds per call, in a replayed CUDA graph."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return decode_cells.graph_seconds(lambda _: run(), 1, device, rounds=7)


def rows(cells: Sequence[Chunks], device: str) -> list[dict[str, Any]]:
    """Rows of ours and SDPA."""
    found = []
    for cell in cells:
        tensors = make_tensors(cell, device)
        mine = ours(*tensors)

        def theirs(tensors: tuple[Any, ...] = tensors) -> Any:
            return sdpa.paged(*tensors)

        right = sdpa.paged(*(x.float() for x in tensors[:3]), tensors[3])
        for name, run in (("colonnade", mine), ("sdpa, gathered", theirs)):
            error = float((run().float() - right).norm() / right.norm())
            assert error < TOLERANCE * (1 if device == "cuda" else 3), f"{name} {cell}: {error:.1e} off"
            took = seconds(run)
            found.append(
                {
                    "requests": cell.requests, "new": cell.new, "known": cell.known, "who": name,
                    "us": round(took * 1e6, 1), "tflop_per_s": round_significant(cell.flops / took / 1e12),
                }
            )  # fmt: skip
            print(format_row(found[-1]), flush=True)
    return found


def mean_s(tensors: Sequence[tuple[Chunks, tuple[Any, ...]]]) -> float:
    """The geometric mean of our times; infinite if tiles do not fit."""
    from triton.runtime.errors import OutOfResources

    try:
        return math.exp(sum(math.log(seconds(ours(*x))) for _, x in tensors) / len(tensors))
    except OutOfResources:
        return math.inf
