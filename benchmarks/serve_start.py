"""Memory, CPU time and duration of a server's start: SmolLM2-135M-Instruct on a CPU.

    python benchmarks/serve_start.py
    python benchmarks/serve_start.py --compare ../older      # in turns with another checkout of Colonnade
    python benchmarks/serve_start.py --tiny                  # one start: a smoke test

``start_s`` is the time from the command to the line with the address. Memory and CPU time are those of the HTTP process
and of the engines' processes after one request of 8 tokens: resident memory of the largest engine, proportional memory
(pages that processes share are divided among them) and CPU time of all engines. ``import_torch_s`` is the time of a
process that only imports torch, just before: about 2 s on an idle machine, so it shows how busy this one was. Medians
of the rounds; ``least_start_s`` is the shortest start.

Weights in int8 and int4 are packed into a file once (``colonnade.checkpoint.packed_weights``): ``first start`` has no
file yet, and writes it. Compiled kernels exist before the first round.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

from harness.paired_timing import OtherProcesses, run_interleaved
from harness.report import RESULTS, ROOT, Cell, Headline, report
from harness.rows import format_row, round_significant
from harness.served import running_server

Measured = dict[str, float]
ENGINE_MB = 100
"""Child processes that are larger are engines; the others are multiprocessing's."""


def measure_start(root: Path, weights: str, replicas: int, home: Path, *, first: bool) -> Measured:
    """Start the server of the checkout ``root``, send a request, and stop it; ``first``: without packed weights."""
    if first:
        shutil.rmtree(home / ".cache" / "colonnade" / "weights", ignore_errors=True)
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    import_torch_s, began = time.perf_counter() - began, time.perf_counter()
    flags = ("--serve.weights", weights, "--serve.replicas", str(replicas))
    with running_server("smollm2", *flags, root=root, HOME=str(home)) as (url, pid):
        start_s = time.perf_counter() - began
        body = json.dumps({"prompt": "Once upon a time", "max_tokens": 8}).encode()
        request = urllib.request.Request(f"{url}/v1/completions", body, {"content-type": "application/json"})
        with urllib.request.urlopen(request) as reply:
            assert reply.status == 200
        engines = [child for child in children(pid) if rss_mb(child) > ENGINE_MB]
        assert len(engines) == replicas, engines
        return {
            "start_s": start_s,
            "import_torch_s": import_torch_s,
            "http_rss_mb": rss_mb(pid),
            "http_cpu_s": cpu_s(pid),
            "engine_rss_mb": max(map(rss_mb, engines)),
            "engines_pss_mb": sum(map(pss_mb, engines)),
            "engines_cpu_s": sum(map(cpu_s, engines)),
        }


def children(pid: int) -> list[int]:
    """Processes that ``pid`` has started."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def rss_mb(pid: int) -> float:
    """Resident memory [MB]."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def pss_mb(pid: int) -> float:
    """Proportional memory [MB]."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) * 1024 / 1e6


def cpu_s(pid: int) -> float:
    """CPU time of all threads so far [s]."""
    values = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(values[11]) + int(values[12])) / os.sysconf("SC_CLK_TCK")


def measure(
    roots: dict[str, Path], formats: list[str], rounds: int, home: Path
) -> tuple[list[dict[str, Cell]], list[Headline]]:
    rows: list[dict[str, Cell]] = []
    heads = []
    for weights in formats:
        if weights != "stored":  # writes the packed weights
            measure_start(roots["colonnade"], weights, 1, home, first=True)
        for replicas in (1, *((2,) if weights != "stored" else ())):
            sides = {who: (root, False) for who, root in roots.items()}
            if weights != "stored":
                sides["first start"] = (roots["colonnade"], True)
            runs = {
                who: (lambda _, root=root, first=first: measure_start(root, weights, replicas, home, first=first))  # noqa: B023
                for who, (root, first) in reversed(sides.items())
            }
            results = run_interleaved(runs, rounds, warm_up=1 if rounds > 2 else 0)
            for who, each in results.items():
                medians = {key: round_significant(statistics.median(one[key] for one in each)) for key in each[0]}
                least = round_significant(min(one["start_s"] for one in each))
                rows.append({"who": who, "weights": weights, "replicas": replicas, **medians, "least_start_s": least})
                print(format_row(rows[-1]), flush=True)
            if replicas > 1:
                continue
            for key, unit, what in (
                ("engine_rss_mb", "MB", "An engine's memory"),
                ("start_s", "s", "Start of a server"),
            ):
                speed = {row["who"]: float(row[key] or 0) for row in rows if row["weights"] == weights}
                peer = ("the previous version", speed["before"]) if "before" in speed else ("", None)
                heads.append(Headline(f"{what}, SmolLM2-135M, weights {weights}", speed["colonnade"], unit, *peer))
    return rows, heads


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="one start; writes no record")
    parser.add_argument("--compare", type=Path, help="another checkout of Colonnade")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--weights", nargs="+", choices=("stored", "int8", "int4"), default=["stored", "int8", "int4"])
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the JSON file")
    args = parser.parse_args(argv)
    roots = {"colonnade": ROOT} | ({"before": args.compare.resolve()} if args.compare else {})
    around = OtherProcesses()
    with tempfile.TemporaryDirectory() as home:
        compiled = Path("~/.cache/colonnade/kernels").expanduser()
        if compiled.is_dir():
            shutil.copytree(compiled, Path(home, ".cache/colonnade/kernels"))
        formats, rounds = (["stored"], 1) if args.tiny else (args.weights, args.rounds)
        rows, heads = measure(roots, formats, rounds, Path(home))
    if not args.tiny:
        notes = f"medians of {args.rounds} rounds, in turns; {around}, the servers included"
        report("serve_start", rows, notes=notes, headlines=heads, folder=args.out)


if __name__ == "__main__":
    main()
