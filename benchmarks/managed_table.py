"""Managed-collision tables: share of hits, ids/s, and how much of the reads from host memory prefetch hides.

    python benchmarks/managed_table.py --device cpu
    python benchmarks/managed_table.py --device cuda

Hits: 200,000 ids by Zipf's law (exponent 1.1) on 20,032 rows, after 50 batches of 20,000; the best possible are those
of the most frequent ids; Compared with TorchRec's managed collisions, if it is installed. Speed: look-ups of ids that
mostly have rows, one process. Prefetch: a table in host memory (on a GPU 8.6 GB, of which it holds the rows of two
batches), samples of 16 ids by Zipf's law (1.0) whose rows are the input of three layers, bfloat16 on a GPU; seconds of
a step without host work (rows stay on the device), with look-ups, reads and write-backs but no prefetch, and with
prefetch: hidden = (plain − prefetch) / (plain − none). The times of look-up, read and write-back are of each alone.
"""

import argparse
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn

from colonnade.nn.managed_table import BUCKETS, ManagedTable
from colonnade.nn.table_prefetch import prefetched
from harness.report import Cell, Headline, folder_of, report
from harness.rows import format_row

IDS, ROWS, BATCH, EVERY = 200_000, 20_032, 20_000, 5
"""Of the measurement of hits: ids, rows of the table, ids in a batch, steps between evictions."""


class Sizes(NamedTuple):
    """Of the measurement of prefetch."""

    rows: int
    width: int
    samples: int
    features: int
    """Ids of a sample."""
    hidden: int
    ids: int
    steps: int
    rounds: int


SIZES = {
    "toy": Sizes(64 * 64, 8, 64, 4, 32, 10_000, 10, 1),
    "cpu": Sizes(1 << 20, 64, 2048, 16, 512, 1 << 22, 30, 3),
    "cuda": Sizes(1 << 23, 256, 8192, 16, 8192, 1 << 25, 60, 5),
}
WARM_STEPS = 6


def zipf(ids: int, batch: int, count: int, seed: int = 0, exponent: float = 1.1) -> list[Tensor]:
    random = np.random.default_rng(seed)
    weights = 1 / np.arange(1, ids + 1) ** exponent
    cumulative = np.cumsum(weights / weights.sum())
    return [torch.from_numpy(np.searchsorted(cumulative, random.random(batch)) * 7919) for _ in range(count)]


def hit_rate() -> dict[str, Cell]:
    table = ManagedTable(ROWS, 2, every=EVERY)
    spent: list[float] = []
    for step, batch in enumerate(zipf(IDS, BATCH, 60)):
        if step == 50:
            table.looked_up = table.hits = 0
        began = time.thread_time()
        found = table.look_up(batch)
        spent.append(time.thread_time() - began)
        table.use(table.read(found))
        table.step(0.0)
    return {"what": "hits", **_row(table.hits / table.looked_up, ROWS - BUCKETS, spent)}


def torchrec_hits() -> dict[str, Cell] | None:
    """As :func:`hit_rate`, with TorchRec's managed collisions, where that is installed."""
    try:
        from torchrec.modules.mc_modules import (  # pyrefly: ignore[missing-import] - a peer
            LFU_EvictionPolicy,
            MCHManagedCollisionModule,
        )
        from torchrec.sparse.jagged_tensor import JaggedTensor  # pyrefly: ignore[missing-import]
    except (ImportError, OSError) as why:  # OSError: its library is for another torch
        print(f"without TorchRec: {why}")
        return None
    table = MCHManagedCollisionModule(ROWS, torch.device("cpu"), LFU_EvictionPolicy(), eviction_interval=EVERY)
    looked_up = found = 0
    spent: list[float] = []
    for step, batch in enumerate(zipf(IDS, BATCH, 60)):
        ids = {"ids": JaggedTensor(batch, lengths=torch.ones(len(batch), dtype=torch.int64))}
        began = time.thread_time()
        slots = table(ids)["ids"].values()
        spent.append(time.thread_time() - began)
        if step >= 50:
            looked_up, found = looked_up + len(batch), found + int((slots != ROWS - 1).sum())
    return {"what": "hits, TorchRec", **_row(found / looked_up, ROWS - 1, spent)}


def _row(share: float, own_rows: int, spent: list[float]) -> dict[str, Cell]:
    weights = 1 / np.arange(1, IDS + 1) ** 1.1
    best = float((weights / weights.sum())[:own_rows].sum())
    return {"share": round(share, 4), "best": round(best, 4), "of_best": round(share / best, 4),
            "ids_per_s": round(BATCH / float(np.median(spent[50:])))}  # fmt: skip


class Net(nn.Module):
    """The rows of each sample side by side, through three layers; in bfloat16 on a GPU."""

    def __init__(self, sizes: Sizes, device: str):
        super().__init__()
        inputs, wide, self.samples = sizes.width * sizes.features, sizes.hidden, sizes.samples
        self.layers = nn.Sequential(
            nn.Linear(inputs, wide), nn.ReLU(), nn.Linear(wide, wide), nn.ReLU(), nn.Linear(wide, 1)
        ).to(device)
        self.device = device

    def train_on(self, x_ND: Tensor) -> None:
        with torch.autocast(self.device, torch.bfloat16, enabled=self.device == "cuda"):
            y_S1 = self.layers(x_ND.view(self.samples, -1))
        y_S1.float().square().mean().backward()


def hidden(sizes: Sizes, device: str) -> dict[str, Cell]:
    """A step without reads, with them, and with prefetch, in seconds; the share of the reads' time that it hides."""
    data = zipf(sizes.ids, sizes.samples * sizes.features, sizes.steps, exponent=1.0)
    net = Net(sizes, device)
    table = ManagedTable(sizes.rows, sizes.width, every=1 << 40, device=device)
    fill(table)

    def settle() -> float:
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def seconds(pairs: Iterable[tuple[object, Tensor]]) -> float:
        """Of a step; nothing waits for the device between the first and the last measured step."""
        began = 0.0
        for number, (_, x_ND) in enumerate(pairs):
            if number == WARM_STEPS:
                began = settle()
            net.train_on(x_ND)
            table.step(0.01)
        return (settle() - began) / (sizes.steps - WARM_STEPS)

    def resident() -> Iterator[tuple[object, Tensor]]:
        """Batches whose rows stay on the device."""
        held = [table.read(table.look_up(ids)) for ids in data[:4]]
        for number in range(sizes.steps):
            yield None, table.use(held[number % 4])

    rounds: dict[str, list[float]] = {"none_s": [], "plain_s": [], "prefetch_s": []}
    for _ in range(sizes.rounds):
        with mock.patch.object(table, "_write"):
            rounds["none_s"].append(seconds(resident()))
        rounds["plain_s"].append(seconds((ids, table(ids)) for ids in data))
        rounds["prefetch_s"].append(seconds(prefetched(table, data, lambda ids: ids)))
    none_s, plain_s, prefetch_s = (float(np.median(each)) for each in rounds.values())
    parts = [_parts(table, ids, settle) for ids in data[:8]]
    unique, *times = (float(np.median(each)) for each in zip(*parts, strict=True))
    return {
        "what": "prefetch", "device": device, "table_gb": round(sizes.rows * sizes.width * 4e-9, 2),
        "ids": sizes.samples * sizes.features, "rows": round(unique), "read_mb": round(unique * sizes.width * 4e-6, 1),
        **{f"{name}_s": round(each, 5) for name, each in zip(("look_up", "read", "write"), times, strict=True)},
        "none_s": round(none_s, 5), "plain_s": round(plain_s, 5), "prefetch_s": round(prefetch_s, 5),
        "hidden": round((plain_s - prefetch_s) / (plain_s - none_s), 3),
    }  # fmt: skip


def fill(table: ManagedTable) -> None:
    """Give rows to the most frequent ids."""
    every, table.every = table.every, 1
    with torch.no_grad():
        table(torch.arange(BUCKETS * table.per_bucket) * 7919)
    table.step(0.0)
    table.every = every


def _parts(table: ManagedTable, ids: Tensor, settle: Callable[[], float]) -> tuple[float, ...]:
    """(rows, seconds of look-up, read, write-back), each on its own."""
    times = [settle()]
    found = table.look_up(ids)
    times.append(settle())
    table.read(found)
    times.append(settle())
    assert found.rows_U is not None
    table._write(found)
    times.append(settle())
    return len(found.rows_U), *np.diff(times)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--out", type=Path, help="folder of the JSON file")
    args = parser.parse_args(argv)
    peer = torchrec_hits()
    rows = [hit_rate(), *([peer] if peer else []), hidden(SIZES["toy" if args.toy else args.device], args.device)]
    for row in rows:
        print(format_row(row), flush=True)
    ours, theirs = (float(each["of_best"] or 0) if each else None for each in (rows[0], peer))
    heads = [
        Headline(
            "Managed table: hits relative to an optimal table", ours or 0.0, "", "TorchRec" if peer else "", theirs
        ),
        Headline("Managed table: share of the host's work that prefetch hides", float(rows[-1]["hidden"] or 0), ""),
    ]
    name = f"managed_table_{'cpu' if args.device == 'cpu' else 'gpu'}"
    report(name, rows, notes=__doc__ or "", headlines=heads, folder=folder_of(args.out, toy=args.toy))


if __name__ == "__main__":
    main()
