"""Flash-Decoding on a GPU: the seed's table, random cells, and the sizes that the kernels are cut into.

    python benchmarks/flash_decoding.py                    # the table and its plot: two minutes of one H200
    python benchmarks/flash_decoding.py --flex             # flex_attention too, which compiles for each row
    python benchmarks/flash_decoding.py --sweep 0 300 --pinned 40    # random cells against the best peer; the worst
                                                           # ten; the first 40 also by a dozen configurations of ours
    python benchmarks/flash_decoding.py --tune --widths 128    # measures candidates and costs; decode_tiles.json
    python benchmarks/flash_decoding.py --shared           # 32 requests that share a prefix of 32,768 keys
    python benchmarks/flash_decoding.py --chunks           # chunks of prompts of 512 to 8192 tokens
    python benchmarks/flash_decoding.py --latents          # latent attention as in DeepSeek-V2
    python benchmarks/flash_decoding.py --eight-bits       # caches of 8 bits beside those of 16
    python benchmarks/flash_decoding.py --draw             # the plot again, from the record; no GPU
    python benchmarks/flash_decoding.py --tiny             # toy sizes, on a CPU too: that it runs

The table is that of the Flash-Decoding article (PyTorch blog, 2023): 16 query heads, 2 key/value heads, width 128,
float16, one new token for each of B requests of S tokens, and a row of 1 GB. Ours reads pages of 256 tokens that lie
scattered; peers read a contiguous cache: SDPA's backends with grouped heads and with a group's heads as rows of one
head, whichever they do better, eager torch, and flex_attention. Calls are replayed as graphs with cold caches, times
are medians; TB/s counts keys and values read once, set against the read bandwidth measured in the same run. That all
compute the same is checked. ``--fixed-cuts N`` adds the batch-invariant mode with cuts at every N keys.
"""

import argparse
import concurrent.futures
import dataclasses
import json
import math
import multiprocessing
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import _chunks
import _eight
import _latents
import _shared
from _decode import Cell, Tensors, error, exact, ours, peers, read_bandwidth, seconds
from _decode_tune import CANDIDATES, too_much, tune, tune_eight
from _report import RESULTS, ROOT, Headline, report
from _rows import Rows
from colonnade.kernels.attention import decode_tiles

SEED = (
    (256, 256), (128, 512), (64, 1024), (32, 2048), (16, 4096), (8, 8192), (4, 16384), (2, 32768), (1, 65536),
    (1, 131072), (16, 65536),
)  # fmt: skip
TINY = ((4, 64), (1, 300))
A100 = dict(zip(SEED, (63.4, 67.7, 77.7, 58.5, 57, 56.4, 58.2, 60.3, 64.4, 106.6), strict=False))
"""The article's own times [µs], on another GPU, for the plot."""
TOLERANCE, PINNED = 6e-4, 12
COMPILERS = 14
"""Processes that compile a sweep's kernels before it, which would otherwise take most of its time."""


def measured(cell: Cell, device: str, read: float, *, flex: bool, chunk: int | None = None) -> list[dict[str, Any]]:
    """Rows of one cell: ours and all peers that run."""
    tensors = Tensors(cell, device)
    right = exact(tensors)
    # Scattered pages are other keys than the peers', so what is checked is the same call on pages in order.
    mistake = error(ours(tensors, in_order=True), right)
    # Plain torch on a CPU rounds on the way, too.
    assert mistake < TOLERANCE * (1 if device == "cuda" else 3), f"{cell.name}: ours is {mistake:.1e} off"
    who = [("colonnade", ours(tensors))]
    if chunk:
        who.append(("colonnade, fixed cuts", ours(tensors, chunk=chunk)))
    rows = []
    for name, run in [*who, *(peers(tensors, flex=flex) if device == "cuda" else [])]:
        try:
            if not name.startswith("colonnade") and error(run, right) > 10 * TOLERANCE:
                print(f"{cell.name} {name}: computes something else", flush=True)
                continue
            took = seconds(run, tensors)
        except (RuntimeError, torch.OutOfMemoryError) as why:
            print(f"{cell.name} {name}: {str(why).splitlines()[0][:90]}", flush=True)
            continue
        rows.append(
            {
                "B": len(cell.lengths), "S": max(cell.lengths), "lengths": cell.kind, "kv_heads": cell.K,
                "group": cell.group, "width": cell.H, "page": cell.page, "who": name, "us": round(took * 1e6, 2),
                "tb_per_s": round(cell.bytes / took / 1e12, 3), "of_read": round(cell.bytes / took / read, 3),
            }
        )  # fmt: skip
        print(rows[-1], flush=True)
    return rows


def best_peer(rows: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    return min((row for row in rows if not row["who"].startswith("colonnade")), key=lambda row: row["us"], default=None)


def ahead(rows: Sequence[dict[str, Any]]) -> float | None:
    """The best peer's time over ours; None where no peer ran."""
    peer = best_peer(rows)
    us = next(row["us"] for row in rows if row["who"] == "colonnade")
    return round(peer["us"] / us, 3) if peer else None


def random_cell(draw: torch.Generator, most_bytes: float) -> Cell:
    """One of the cells that the sweep is over."""

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


def table(cells: Sequence[tuple[int, int]], device: str, read: float, args: argparse.Namespace) -> list[dict[str, Any]]:
    """The seed's rows."""
    rows = []
    for B, S in cells:
        cell = Cell((S,) * B, page=16 if args.tiny else 256)
        rows += measured(cell, device, read, flex=args.flex, chunk=args.fixed_cuts)
    return rows


def sweep(seed: int, count: int, device: str, read: float, args: argparse.Namespace, rows: Rows) -> Rows:
    """Ours against the best peer on random cells, into ``rows``: those that fit into the time given."""
    draw = torch.Generator().manual_seed(seed)
    cells = [random_cell(draw, 2**16 if args.tiny else args.most_gb * 1e9) for _ in range(count)]
    if device == "cuda":
        with concurrent.futures.ProcessPoolExecutor(COMPILERS, multiprocessing.get_context("spawn")) as pool:
            list(pool.map(compiled, cells, [i < args.pinned for i in range(count)]))
        print(f"compiled in {time.perf_counter() - rows.began:.0f} s", flush=True)
    for i, cell in enumerate(cells):
        if time.perf_counter() - rows.began > args.seconds:
            break
        here = measured(cell, device, read, flex=False)
        peer, row = best_peer(here), next(row for row in here if row["who"] == "colonnade")
        best_us = pinned_us(cell, device) if i < args.pinned else None
        rows.add(
            {
                **row,
                "peer": peer["who"] if peer else None,
                "peer_us": peer["us"] if peer else None,
                "ahead": ahead(here),
                "pinned_us": best_us,
                "of_pinned": round(best_us / row["us"], 3) if best_us else None,
            }
        )
    rows.sort(key=lambda row: row["ahead"] or math.inf)
    print(f"{len(rows)} of {count} cells; worst ten:", *rows[:10], sep="\n  ", flush=True)
    return rows


def compiled(cell: Cell, pinned: bool) -> None:
    """Have the kernels that a cell needs in the cache on disk: the same cell with few keys."""
    few = tuple(min(length, 2 * cell.page) for length in cell.lengths)
    tensors = Tensors(dataclasses.replace(cell, lengths=few), "cuda", copies=1)
    for tiles in (None, *(CANDIDATES[:PINNED] if pinned else ())):
        decode_tiles.CHOSEN[:] = [] if tiles is None else [tiles]
        try:
            ours(tensors)(0)
        except (RuntimeError, torch.OutOfMemoryError, *too_much()) as why:
            print(f"{cell.name} {tiles}: {str(why).splitlines()[0][:90]}", flush=True)
        finally:
            decode_tiles.CHOSEN.clear()


def pinned_us(cell: Cell, device: str) -> float | None:
    """The best of a dozen configurations that are told to the kernel instead of looked up [µs]; of those that fit."""
    tensors, times = Tensors(cell, device), list[float]()
    for tiles in CANDIDATES[:PINNED]:
        decode_tiles.CHOSEN[:] = [tiles]
        try:
            times.append(round(seconds(ours(tensors), tensors) * 1e6, 2))
        except (RuntimeError, torch.OutOfMemoryError, *too_much()) as why:
            print(f"{cell.name} {tuple(tiles)}: {str(why).splitlines()[0][:90]}", flush=True)
        finally:
            decode_tiles.CHOSEN.clear()
    return min(times, default=None)


def draw_table(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """The article's plot: time over the length of the context at 65,536 tokens in all, who by who."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    whole = max(row["B"] * row["S"] for row in rows if row["B"] * row["S"] <= 65_536)
    for who in dict.fromkeys(row["who"] for row in rows):
        at = [(row["S"], row["us"]) for row in rows if row["who"] == who and row["B"] * row["S"] == whole]
        wide = who.startswith("colonnade")
        axes.loglog(*zip(*at, strict=True), marker="o", markersize=3, linewidth=2.4 if wide else 1.1, label=who)
    if whole == 65_536:
        theirs = [(S, us) for (B, S), us in A100.items() if whole == B * S]
        axes.loglog(*zip(*theirs, strict=True), "--", color="#9aa5b1", label="Flash-Decoding, A100 (the article)")
    axes.set_xscale("log", base=2)
    axes.set_xlabel(f"tokens a request, {whole:,} in all")
    axes.set_ylabel("µs")
    axes.grid(color="#e4e7eb", linewidth=0.6)
    axes.legend(frameon=False, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def main(argv: list[str] | None = None) -> None:
    """Measure, draw and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", nargs=2, type=int, metavar=("SEED", "COUNT"), help="random cells, not the table")
    parser.add_argument("--pinned", type=int, default=0, help="cells of a sweep that pinned configurations run, too")
    parser.add_argument("--seconds", type=float, default=3600, help="after which a sweep begins no further cell")
    parser.add_argument("--most-gb", type=float, default=20, help="largest cache of a random cell")
    parser.add_argument("--shared", action="store_true", help="requests that share a prefix, not the table")
    parser.add_argument("--chunks", action="store_true", help="chunks of prompts, not the table")
    parser.add_argument("--latents", action="store_true", help="latent attention, not the table")
    parser.add_argument("--eight-bits", action="store_true", help="caches of 8 bits, not the table")
    parser.add_argument("--draw", action="store_true", help="the picture again from what was recorded")
    parser.add_argument("--tune", action="store_true", help="measure tiles and costs, not the table")
    parser.add_argument("--tune-eight", action="store_true", help="measure tiles of caches of 8 bits")
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 128, 256], help="heads to tune for")
    parser.add_argument("--tiles", type=Path, default=Path(decode_tiles.__file__).with_name("decode_tiles.json"))
    parser.add_argument("--flex", action="store_true", help="flex_attention too")
    parser.add_argument("--fixed-cuts", type=int, help="the batch-invariant mode too, cut at so many keys")
    parser.add_argument("--picture", type=Path, help="docs/assets/flash_decoding.png; with --tiny beside the results")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where results go")
    parser.add_argument("--name", default="h200", help="of the machine, in the result's name")
    parser.add_argument("--tiny", action="store_true", help="toy sizes, to see that it runs")
    args = parser.parse_args(argv)
    name = "tiny" if args.tiny else args.name
    assets = args.out if args.tiny else ROOT / "docs" / "assets"
    picture = args.picture or assets / "flash_decoding.png"
    if args.draw:
        draw_table(json.loads((args.out / f"flash_decoding_{name}.json").read_text())["rows"], picture)
        return
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and (not args.tiny or args.tune or args.tune_eight):
        print("flash_decoding.py needs a GPU, and this machine has none; --tiny shows that it runs")
        return
    read = read_bandwidth(device)
    print(f"read bandwidth {read / 1e12:.2f} TB/s", flush=True)
    if args.tune_eight:
        tune_eight(args.tiles, args.widths)
        return
    if args.tune:
        tune(read, args.tiles, args.widths)
        return
    notes = (
        f"{__doc__} Read bandwidth in this run {read / 1e12:.2f} TB/s; tiles of {decode_tiles.table()['measured_on']}."
    )
    if args.sweep:
        kept = Rows(f"flash_decoding_sweep_{name}", args.out)
        rows = sweep(*args.sweep, device, read, args, kept)
        notes = f"{notes} {len(rows)} of {args.sweep[1]} cells fitted into {args.seconds:.0f} s."
        report(f"flash_decoding_sweep_{name}", rows, notes, folder=args.out)
        kept.done()
        return
    if args.chunks:
        rows = _chunks.rows(_chunks.TINY if args.tiny else _chunks.CELLS, device)
        report(f"flash_decoding_chunks_{name}", rows, f"{_chunks.__doc__} {notes}", folder=args.out)
        return
    if args.latents:
        rows = _latents.rows(_latents.TINY if args.tiny else _latents.CELLS, device, read)
        report(f"flash_decoding_latents_{name}", rows, f"{_latents.__doc__} {notes}", folder=args.out)
        return
    if args.eight_bits:
        rows = _eight.rows(_eight.TINY if args.tiny else _eight.CELLS, device, read)
        report(f"flash_decoding_eight_{name}", rows, f"{_eight.__doc__} {notes}", folder=args.out)
        return
    if args.shared:
        sizes = ((4, 64),) if args.tiny else ((32, 32_768), (32, 8192), (8, 32_768), (128, 4096))
        rows = [row for batch, prefix in sizes for row in _shared.rows(batch, prefix, device, read)]
        report(f"flash_decoding_shared_{name}", rows, f"{_shared.__doc__} {notes}", folder=args.out)
        return
    rows = table(TINY if args.tiny else SEED, device, read, args)
    draw_table(rows, picture)
    heads = []
    for B, S in ((256, 256), (1, 65_536), (1, 131_072), (16, 65_536)):
        here = [row for row in rows if (row["B"], row["S"]) == (B, S)]
        peer = best_peer(here)
        if here and peer:
            what = f"decode attention, {B} x {S:,} tokens, 16 and 2 heads of 128, float16"
            heads.append(Headline(what, here[0]["us"], "µs", peer["who"], peer["us"]))
    report(f"flash_decoding_{name}", rows, notes, headlines=heads, folder=args.out)


if __name__ == "__main__":
    main()
