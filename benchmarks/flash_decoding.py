"""Flash-Decoding on a GPU: the article's table, random shapes, and tuning of the kernels' tiles.

    python benchmarks/flash_decoding.py                    # the table and its plot: two minutes on one H200
    python benchmarks/flash_decoding.py --flex             # adds flex_attention, which compiles for each row
    python benchmarks/flash_decoding.py --fixed-cuts 512   # adds the batch-invariant mode, split at every 512 keys
    python benchmarks/flash_decoding.py --sweep 0 300 --pinned 40    # random shapes against the best peer; prints the
                                                           # worst ten; a dozen fixed tiles for the first 40
    python benchmarks/flash_decoding.py --sweep 0 300 --resume --seconds 200    # further cells for the same record
    python benchmarks/flash_decoding.py --sweep 0 300 --resume --again 93 294   # these cells of it anew
    python benchmarks/flash_decoding.py --tune --widths 128    # measures tiles and costs; writes decode_tiles.json
    python benchmarks/flash_decoding.py --tune-eight       # the same for 8-bit caches
    python benchmarks/flash_decoding.py --shared           # 32 requests sharing a prefix of 32,768 keys
    python benchmarks/flash_decoding.py --chunks           # prompt chunks of 512 to 8192 tokens
    python benchmarks/flash_decoding.py --latents          # latent attention as in DeepSeek-V2
    python benchmarks/flash_decoding.py --eight-bits       # 8-bit caches against bfloat16
    python benchmarks/flash_decoding.py --draw             # redraws the plot from the record; no GPU
    python benchmarks/flash_decoding.py --tiny             # toy sizes, also on a CPU: a smoke test of any mode but
                                                           # tuning; records go into a temporary folder

Each mode prints a row as soon as it is measured, checks all results, and writes a record with its own notes.
FlashInfer is measured if flashinfer-python is installed; its first call compiles its kernels with nvcc.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from colonnade.kernels.attention import decode_tiles
from decoding import chunked_prefill, kv8, latents, shared_prefix, sweep
from decoding.decode_cells import Cell, read_bandwidth
from decoding.peers import best_peer, measure_cell
from decoding.tune import tune, tune_8_bit
from harness.report import ROOT, Headline, folder_of, report
from harness.rows import Rows

TABLE = """Decode attention on the table of the Flash-Decoding article (PyTorch blog, 2023): 16 query heads, 2 key/value
heads, width 128, float16, one new token for each of B requests of S tokens; and a row of 1 GB. Ours reads scattered
pages of 256 tokens. Peers read a contiguous cache: SDPA's backends with grouped heads ("heads as rows": a group's heads
become query rows of one head), eager torch, and with --flex flex_attention. FlashInfer, if installed, reads the same
scattered pages as ours, on CUDA cores and on tensor cores, planned for these lengths alone or ("graph mode") for a CUDA
graph that also serves other lengths. Plans, ours and FlashInfer's, are made before the timing, though a server makes
them in each step. "Fixed cuts" is the batch-invariant mode with fixed splits. Ours is the CUDA C++ kernel; "Triton" is
the kernel for other shapes and GPUs; "loads alone" is the CUDA C++ kernel without its arithmetic, a lower bound of its
time. TB/s count keys and values read once; of_read is their share of the read bandwidth."""
ARTICLE = (
    (256, 256), (128, 512), (64, 1024), (32, 2048), (16, 4096), (8, 8192), (4, 16384), (2, 32768), (1, 65536),
    (1, 131072), (16, 65536),
)  # fmt: skip
TINY = ((4, 64), (1, 300))
A100 = dict(zip(ARTICLE, (63.4, 67.7, 77.7, 58.5, 57, 56.4, 58.2, 60.3, 64.4, 106.6), strict=False))
"""The article's times [µs], on an A100, for the plot."""
MODES = ("sweep", "shared", "chunks", "latents", "eight-bits", "draw", "tune", "tune-eight")
"""What runs instead of the table."""


def table(cells: Sequence[tuple[int, int]], device: str, read: float, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of the article's shapes."""
    rows = []
    for B, S in cells:
        cell = Cell((S,) * B, page=16 if args.tiny else 256)
        rows += measure_cell(cell, device, read, flex=args.flex, chunk=args.fixed_cuts, floor=True)
    return rows


LINE_STYLES: dict[str, Any] = {
    ", heads as rows": ":", ", graph mode": ":", ", fixed cuts": ":", ", loads alone": (0, (1, 4)), ", Triton": "--",
}  # fmt: skip
"""Line styles by variant of a kernel."""


def draw_table(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """The article's plot: time over the length of the context at 65,536 tokens in all, a line per implementation."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 5), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    whole = max(row["B"] * row["S"] for row in rows if row["B"] * row["S"] <= 65_536)
    colours: dict[str, str] = {}
    for who in dict.fromkeys(row["who"] for row in rows):
        at = [(row["S"], row["us"]) for row in rows if row["who"] == who and row["B"] * row["S"] == whole]
        # Variants of a kernel share its colour.
        kernel = next((who.removesuffix(end) for end in LINE_STYLES if who.endswith(end)), who)
        axes.loglog(
            *zip(*at, strict=True), color=colours.setdefault(kernel, f"C{len(colours)}"), marker="o", markersize=3,
            linewidth=2.4 if who == "colonnade" else 1.1, label=who,
            linestyle=LINE_STYLES.get(who.removeprefix(kernel), "-"),
        )  # fmt: skip
    if whole == 65_536:
        theirs = [(S, us) for (B, S), us in A100.items() if whole == B * S]
        axes.loglog(*zip(*theirs, strict=True), "--", color="#9aa5b1", label="Flash-Decoding, A100 (the article)")
    axes.set_xscale("log", base=2)
    axes.set_xlabel(f"tokens per request, {whole:,} in all")
    axes.set_ylabel("µs")
    axes.grid(color="#e4e7eb", linewidth=0.6)
    figure.legend(frameon=False, fontsize=8, loc="outside right upper")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--sweep", nargs=2, type=int, metavar=("SEED", "COUNT"), help="random shapes, not the table")
    what.add_argument("--shared", action="store_true", help="requests with a shared prefix, not the table")
    what.add_argument("--chunks", action="store_true", help="prompt chunks, not the table")
    what.add_argument("--latents", action="store_true", help="latent attention, not the table")
    what.add_argument("--eight-bits", action="store_true", help="8-bit caches, not the table")
    what.add_argument("--draw", action="store_true", help="redraw the plot from the record")
    what.add_argument("--tune", action="store_true", help="measure tiles and costs, not the table")
    what.add_argument("--tune-eight", action="store_true", help="measure tiles for 8-bit caches, not the table")
    parser.add_argument("--pinned", type=int, default=0, help="cells of a sweep that fixed tiles run too")
    parser.add_argument("--seconds", type=float, default=3600, help="time after which a sweep starts no further cell")
    parser.add_argument("--resume", action="store_true", help="keep the cells that an earlier sweep's record has")
    parser.add_argument("--again", nargs="+", type=int, default=[], help="with --resume, cells to measure again")
    parser.add_argument("--most-gb", type=float, default=20, help="largest cache of a random cell")
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 128, 256], help="head widths to tune for")
    parser.add_argument("--tiles", type=Path, default=Path(decode_tiles.__file__).with_name("decode_tiles.json"))
    parser.add_argument("--flex", action="store_true", help="add flex_attention to the table")
    parser.add_argument(
        "--fixed-cuts", type=int, help="add the batch-invariant mode to the table, with this many keys per split"
    )
    parser.add_argument(
        "--picture", type=Path, help="default: docs/assets/flash_decoding.png; with --tiny next to the results"
    )
    parser.add_argument(
        "--out", type=Path, help="folder of the results; default benchmarks/results, with --tiny a temporary one"
    )
    parser.add_argument("--name", default="h200", help="machine name in the result's name")
    parser.add_argument("--tiny", action="store_true", help="toy sizes: a smoke test")
    args = parser.parse_args(argv)
    other = next((f"--{mode}" for mode in MODES if getattr(args, mode.replace("-", "_"))), None)
    if args.resume and not args.sweep:
        parser.error("--resume continues a sweep; add --sweep SEED COUNT")
    if args.again and not args.resume:
        parser.error("--again measures cells of an earlier sweep anew; add --resume")
    if other and (args.flex or args.fixed_cuts):
        parser.error(f"--flex and --fixed-cuts add rows to the table, which {other} does not measure")
    tunes = other in ("--tune", "--tune-eight")
    if args.tiny and tunes:
        parser.error(f"{other} measures a GPU's kernels for good, and has no toy size; remove --tiny")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not (args.tiny or args.draw):
        why = "flash_decoding.py needs a GPU, and this machine has none; --tiny shows that it runs"
        print(f"skipped: {other} measures a GPU's kernels, and this machine has no GPU" if tunes else why)
        return
    if args.flex and device == "cpu":
        parser.error("--flex needs a GPU: on a CPU ours runs alone, as plain torch, and no peer beside it")
    if args.draw and args.tiny and not args.out:
        parser.error("--draw draws what was recorded, and --tiny records into a temporary folder: say --out FOLDER")
    folder, name = folder_of(args.out, toy=args.tiny), "tiny" if args.tiny else args.name
    picture = args.picture or (folder if args.tiny else ROOT / "docs" / "assets") / "flash_decoding.png"
    if args.draw:
        draw_table(json.loads((folder / f"flash_decoding_{name}.json").read_text())["rows"], picture)
        print(picture)
        return
    read = read_bandwidth(device)
    print(f"read bandwidth {read / 1e12:.3g} TB/s", flush=True)
    if args.tune_eight:
        tune_8_bit(args.tiles, args.widths)
        return
    if args.tune:
        tune(read, args.tiles, args.widths)
        return
    record(args, device, read, folder, name, picture)


def record(args: argparse.Namespace, device: str, read: float, folder: Path, name: str, picture: Path) -> None:
    """Measure the selected mode and write its record."""
    heads = list[Headline]()
    if args.sweep:
        part, notes = "_sweep", sweep.__doc__
        rows = Rows(f"flash_decoding_sweep_{name}", folder, resume=args.resume)
        rows.keep(lambda row: row["cell"] not in args.again)
        before = len(rows)
        most = 2**16 if args.tiny else args.most_gb * 1e9
        sweep.sweep(rows, *args.sweep, device, read, most_bytes=most, pinned=args.pinned, most_s=args.seconds)
        notes = f"{notes}\n{len(rows) - before} of {args.sweep[1]} cells fitted into {args.seconds:.0f} s."
        notes += f" {before} are from earlier runs on such a machine." if before else ""
    elif args.chunks:
        part, notes = "_chunks", chunked_prefill.__doc__
        rows = chunked_prefill.rows(chunked_prefill.TINY if args.tiny else chunked_prefill.CELLS, device)
    elif args.latents:
        part, notes = "_latents", latents.__doc__
        rows = latents.rows(latents.TINY if args.tiny else latents.CELLS, device, read)
    elif args.eight_bits:
        part, notes = "_eight", kv8.__doc__
        rows = kv8.rows(kv8.TINY if args.tiny else kv8.CELLS, device, read)
    elif args.shared:
        part, notes = "_shared", shared_prefix.__doc__
        sizes = ((4, 64),) if args.tiny else ((32, 32_768), (32, 8192), (8, 32_768), (128, 4096))
        rows = [row for batch, prefix in sizes for row in shared_prefix.rows(batch, prefix, device, read)]
    else:
        part, notes, rows = "", TABLE, table(TINY if args.tiny else ARTICLE, device, read, args)
        heads = headlines(rows)
        draw_table(rows, picture)
        print(picture)
    how = f"Read bandwidth in this run: {read / 1e12:.3g} TB/s. All results are checked."
    if device == "cuda":
        how += " Calls are replayed as CUDA graphs, on keys that are not in the L2 cache; times are medians. "
        how += "Tile sizes and costs of our kernels were " + measured_on()
    else:
        how += " On a CPU ours is plain torch and no kernel, and times only show that it ran."
    report(f"flash_decoding{part}_{name}", rows, f"{(notes or '').strip()}\n\n{how}", headlines=heads, folder=folder)
    if isinstance(rows, Rows):
        rows.done()


def measured_on() -> str:
    """The origin of the tile table."""
    where = decode_tiles.table()["measured_on"]
    return "estimated, not measured." if where == "none" else f"measured on {where}."


def headlines(rows: Sequence[dict[str, Any]]) -> list[Headline]:
    """Ours against the best peer, for a few shapes."""
    heads = []
    for B, S in ((256, 256), (1, 65_536), (1, 131_072), (16, 65_536)):
        here = [row for row in rows if (row["B"], row["S"]) == (B, S)]
        peer = best_peer(here)
        if here and peer:
            what = f"decode attention, {B} x {S:,} tokens, 16 and 2 heads of 128, float16"
            heads.append(Headline(what, here[0]["us"], "µs", peer["who"], peer["us"]))
    return heads


if __name__ == "__main__":
    main()
