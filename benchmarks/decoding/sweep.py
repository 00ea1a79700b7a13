"""Decode attention on random shapes against the best peer, worst first (benchmarks/flash_decoding.py).

1 to 256 requests of up to 131,072 tokens, each order of magnitude as likely as another, of even, ragged or Zipf's
lengths; 1 to 128 query heads in groups of 1 to 16 for a key/value head, heads of 64, 128 or 256; pages of 16 to 256
tokens. ``ahead`` is the best peer's time over ours. Peers read contiguous keys, padded to the longest request; ours
reads scattered pages, as does FlashInfer if installed, on CUDA cores and on tensor cores. Peers that take over 2.5
times as long as ours are replayed once. Plans are made before the timing, ours and FlashInfer's. ``pinned_us``, with
--pinned, is our best time over a dozen fixed tiles instead of the table's.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import math
import multiprocessing
import os
import time
from collections.abc import Sequence
from typing import Any

import torch

from colonnade.kernels.attention import cuda_decode, decode_tiles
from decoding.decode_cells import Cell, Tensors, cell_seconds, ours
from decoding.peers import best_peer, measure_cell, speedup
from decoding.tune import CANDIDATES, out_of_resources
from harness.report import commit
from harness.rows import Rows, format_row, round_significant

PINNED_TILES = 12
MAX_PEER_RATIO = 2.5
"""Peers that take so many times as long as ours are replayed once."""
ROUNDS = 7
"""Replays of a graph; ours and a peer that is close are measured once more, 15 times."""
COMPILERS = max(1, min(48, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 4))
"""Processes that compile a sweep's kernels in advance, which would otherwise take most of its time."""


def random_cell(draw: torch.Generator, most_bytes: float) -> Cell:
    """A random cell of at most ``most_bytes``."""

    def one(of: Sequence[Any]) -> Any:
        return of[int(torch.randint(len(of), (), generator=draw))]

    def between(most: int) -> int:
        """1 to ``most``, each order of magnitude as likely as another."""
        return min(most, int(2 ** (float(torch.rand((), generator=draw)) * math.log2(most + 1))))

    while True:
        batch, context, group = between(256), between(131_072), one((1, 2, 4, 5, 7, 8, 16))
        K, kind = max(1, between(128) // group), one(("uniform", "uniform", "ragged", "zipf"))
        lengths = [context] * batch
        if kind == "ragged":
            lengths = torch.randint(1, context + 1, (batch,), generator=draw).tolist()
        elif kind == "zipf":
            ranks = torch.randperm(batch, generator=draw) + 1
            lengths = (context / ranks).ceil().long().tolist()
        cell = Cell(tuple(lengths), K, group, one((64, 128, 256)), one((16, 32, 64, 128, 256)), kind=kind)
        if cell.held_bytes <= most_bytes:
            return cell


def random_cells(seed: int, count: int, most_bytes: float) -> list[Cell]:
    draw = torch.Generator().manual_seed(seed)
    return [random_cell(draw, most_bytes) for _ in range(count)]


def compile_all(cells: Sequence[Cell], pinned: int = 0) -> None:
    """Compile the kernels of all cells into the disk cache, in several processes; needs a GPU, but hardly uses it."""
    began = time.perf_counter()
    with concurrent.futures.ProcessPoolExecutor(COMPILERS, multiprocessing.get_context("spawn")) as pool:
        list(pool.map(compile_cell, cells, [i < pinned for i in range(len(cells))]))
    print(f"compiled in {time.perf_counter() - began:.0f} s", flush=True)


def sweep(
    rows: Rows, seed: int, count: int, device: str, read: float, *, most_bytes: float, pinned: int, most_s: float
) -> Rows:
    """Measure random cells on all GPUs until the time is over; adds rows of ours against the best peer.

    Cells that ``rows`` has from an earlier run are skipped.
    """
    until, gpus = time.time() + most_s, torch.cuda.device_count()
    cells, done = random_cells(seed, count, most_bytes), {row["cell"] for row in rows}
    measured_commit = commit()
    if device == "cuda":
        compile_all([cell for i, cell in enumerate(cells) if i not in done], pinned)
    measure = functools.partial(measure_against_peers, device=device, read=read, until=until)
    tasks = [(i, cell, i < pinned) for i, cell in enumerate(cells) if i not in done]
    with contextlib.ExitStack() as ends:
        found = map(measure, tasks)
        if gpus > 1:  # each GPU runs one cell at a time
            spawn = multiprocessing.get_context("spawn")
            free = spawn.SimpleQueue()
            for gpu in os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(gpus)))).split(","):
                free.put(gpu)
            found = ends.enter_context(spawn.Pool(gpus, _claim_gpu, (free,))).imap_unordered(measure, tasks)
        for row in found:
            if row is not None:
                rows.add({**row, "commit": measured_commit})
    rows.sort(key=lambda row: row["ahead"] or math.inf)
    print(f"{len(rows)} of {count} cells; worst ten:", *map(format_row, rows[:10]), sep="\n  ", flush=True)
    return rows


def _claim_gpu(free: Any) -> None:
    """Restrict this process to one GPU before CUDA starts."""
    os.environ["CUDA_VISIBLE_DEVICES"] = free.get()


def measure_against_peers(
    task: tuple[int, Cell, bool], device: str, read: float, until: float
) -> dict[str, Any] | None:
    """The row of one (number, cell, pinned); None if the time is over."""
    number, cell, pinned = task
    if time.time() > until:
        return None
    here = measure_cell(cell, device, read, flex=False, far=MAX_PEER_RATIO, rounds=ROUNDS)
    peer, row = best_peer(here), next(row for row in here if row["who"] == "colonnade")
    extra: dict[str, Any] = {}
    if pinned:
        best_us = pinned_us(cell, device)
        extra = {"pinned_us": best_us, "of_pinned": round_significant(best_us / row["us"]) if best_us else None}
    return {
        "cell": number,
        **row,
        "peer": peer["who"] if peer else None,
        "peer_us": peer["us"] if peer else None,
        "ahead": speedup(here),
        **extra,
    }


def compile_cell(cell: Cell, pinned: bool) -> None:
    """Compile a cell's kernels into the disk cache, by running it with few keys."""
    # Not so few that another kernel runs.
    most = max(2 * cell.page, cuda_decode.SHORT_KEYS + 1)
    few = tuple(min(length, most) for length in cell.lengths)
    tensors = Tensors(dataclasses.replace(cell, lengths=few), "cuda", copies=1)
    for tiles in (None, *(CANDIDATES[:PINNED_TILES] if pinned else ())):
        decode_tiles.OVERRIDE[:] = [] if tiles is None else [tiles]
        try:
            ours(tensors)(0)
        except (RuntimeError, *out_of_resources()) as why:
            print(f"{cell.name} {tiles}: {str(why).splitlines()[0][:90]}", flush=True)
        finally:
            decode_tiles.OVERRIDE.clear()


def pinned_us(cell: Cell, device: str) -> float | None:
    """Our best time [µs] over a dozen fixed tiles instead of the table's, of those that fit."""
    tensors, times = Tensors(cell, device), list[float]()
    for tiles in CANDIDATES[:PINNED_TILES]:
        decode_tiles.OVERRIDE[:] = [tiles]
        try:
            times.append(round(cell_seconds(ours(tensors), tensors) * 1e6, 2))
        except (RuntimeError, *out_of_resources()) as why:
            print(f"{cell.name} {tuple(tiles)}: {str(why).splitlines()[0][:90]}", flush=True)
        finally:
            decode_tiles.OVERRIDE.clear()
    return min(times, default=None)
