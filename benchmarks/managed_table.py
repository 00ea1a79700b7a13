"""Managed-collision tables: share of hits, ids/s, and how much of the reads from host memory prefetch hides.

    python benchmarks/managed_table.py --device cpu
    python benchmarks/managed_table.py --device cuda

Hits: 200,000 ids by Zipf's law (exponent 1.1) on 20,032 rows, after 50 batches of 20,000; the best possible are those
of the most frequent ids; TorchRec's managed collisions beside, where it is installed. Speed: look-ups of ids that
mostly have rows, one process. Prefetch: batches of ids, a network of three layers as the computation; hidden = (time
without − time with prefetch) / time of the reads alone, per step.
"""

import argparse
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from colonnade.nn.managed_table import BUCKETS, ManagedTable
from colonnade.nn.table_prefetch import prefetched
from harness.report import Cell, Headline, folder_of, report
from harness.rows import line

IDS, ROWS, BATCH, EVERY = 200_000, 20_032, 20_000, 5
"""Of the measurement of hits: ids, rows of the table, ids in a batch, steps between evictions."""


def zipf(ids: int, batch: int, count: int, seed: int = 0) -> list[Tensor]:
    random = np.random.default_rng(seed)
    weights = 1 / np.arange(1, ids + 1) ** 1.1
    cumulative = np.cumsum(weights / weights.sum())
    return [torch.from_numpy(np.searchsorted(cumulative, random.random(batch)) * 7919) for _ in range(count)]


def hits() -> dict[str, Cell]:
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
    """As :func:`hits`, with TorchRec's managed collisions, where that is installed."""
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


def hidden(device: str, *, toy: bool) -> dict[str, Cell]:
    width, batch, rows = (8, 500, 1024) if toy else (64, 60_000, 1 << 20)
    steps = 6 if toy else 24
    data = zipf(4 * rows, batch, steps)
    wide = 64 if toy else 1024
    net = nn.Sequential(nn.Linear(width, wide), nn.ReLU(), nn.Linear(wide, wide), nn.ReLU(), nn.Linear(wide, 1)).to(
        device
    )

    def settle() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    def run(*, prefetch: bool) -> float:
        table = ManagedTable(rows, width, every=10_000, device=device)
        pairs = prefetched(table, data, lambda ids: ids) if prefetch else ((ids, table(ids)) for ids in data)
        times = [time.perf_counter()]
        for _, x_ND in pairs:
            net(x_ND).sum().backward()
            table.step(0.01)
            settle()
            times.append(time.perf_counter())
        return float(np.median(np.diff(times)[2:]))

    table = ManagedTable(rows, width, device=device)
    reads = []
    for ids in data:
        found = table.look_up(ids)
        began = time.perf_counter()
        table.read(found)
        settle()
        reads.append(time.perf_counter() - began)
    run(prefetch=False)
    plain_s, ahead_s, read_s = run(prefetch=False), run(prefetch=True), float(np.median(reads))
    return {"what": "prefetch", "device": device, "plain_s": round(plain_s, 5), "prefetch_s": round(ahead_s, 5),
            "read_s": round(read_s, 5), "hidden": round((plain_s - ahead_s) / read_s, 3)}  # fmt: skip


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--out", type=Path, help="folder of the JSON file")
    args = parser.parse_args(argv)
    peer = torchrec_hits()
    rows = [hits(), *([peer] if peer else []), hidden(args.device, toy=args.toy)]
    for row in rows:
        print(line(row), flush=True)
    ours, theirs = (float(each["of_best"] or 0) if each else None for each in (rows[0], peer))
    head = Headline("Managed table: hits of the best possible", ours or 0.0, "", "TorchRec" if peer else "", theirs)
    name = f"managed_table_{'cpu' if args.device == 'cpu' else 'gpu'}"
    report(name, rows, notes=__doc__ or "", headlines=[head], folder=folder_of(args.out, toy=args.toy))


if __name__ == "__main__":
    main()
