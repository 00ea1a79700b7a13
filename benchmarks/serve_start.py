"""Memory, CPU time and duration of a server's start: SmolLM2-135M-Instruct on a CPU.

    python benchmarks/serve_start.py
    python benchmarks/serve_start.py --compare ../older      # in turns with another checkout of Colonnade
    python benchmarks/serve_start.py --tiny                  # one start: a smoke test

``start_s`` is the time from the command to the line with the address. Memory (resident) and CPU time are those
of the HTTP process and of the engine's process after one request of 8 tokens. Medians of the rounds.
"""

import argparse
import json
import os
import statistics
import time
import urllib.request
from pathlib import Path

from harness.paired_timing import Neighbours, turns
from harness.report import RESULTS, ROOT, Cell, Headline, report
from harness.rows import figures, line
from harness.served import served

Measured = dict[str, float]


def started(root: Path, weights: str) -> Measured:
    """Start the server of the checkout ``root``, send a request, and stop it."""
    began = time.perf_counter()
    with served("smollm2", "--serve.weights", weights, root=root) as (url, pid):
        start_s = time.perf_counter() - began
        body = json.dumps({"prompt": "Once upon a time", "max_tokens": 8}).encode()
        request = urllib.request.Request(f"{url}/v1/completions", body, {"content-type": "application/json"})
        with urllib.request.urlopen(request) as reply:
            assert reply.status == 200
        engine = max(children(pid), key=rss_mb)
        return {
            "start_s": start_s,
            "http_rss_mb": rss_mb(pid),
            "http_cpu_s": cpu_s(pid),
            "engine_rss_mb": rss_mb(engine),
            "engine_cpu_s": cpu_s(engine),
        }


def children(pid: int) -> list[int]:
    """Processes that ``pid`` has started."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def rss_mb(pid: int) -> float:
    """Resident memory [MB]."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def cpu_s(pid: int) -> float:
    """CPU time of all threads so far [s]."""
    values = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(values[11]) + int(values[12])) / os.sysconf("SC_CLK_TCK")


def measure(roots: dict[str, Path], formats: list[str], rounds: int) -> tuple[list[dict[str, Cell]], list[Headline]]:
    rows: list[dict[str, Cell]] = []
    heads = []
    for weights in formats:
        runs = {who: (lambda _, root=root, weights=weights: started(root, weights)) for who, root in roots.items()}
        results = turns(runs, rounds, warm_up=1 if rounds > 1 else 0)
        for who, each in results.items():
            medians = {key: figures(statistics.median(one[key] for one in each)) for key in each[0]}
            rows.append({"who": who, "weights": weights, **medians})
            print(line(rows[-1]), flush=True)
        for key, unit, what in (("http_rss_mb", "MB", "HTTP process's memory"), ("start_s", "s", "Start of a server")):
            ours, *others = (float(row[key] or 0) for row in rows if row["weights"] == weights)
            peer = ("the version before", others[0]) if others else ("", None)
            heads.append(Headline(f"{what}, SmolLM2-135M, weights {weights}", ours, unit, *peer))
    return rows, heads


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="one start; writes no record")
    parser.add_argument("--compare", type=Path, help="another checkout of Colonnade")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the JSON file")
    args = parser.parse_args(argv)
    roots = {"colonnade": ROOT} | ({"before": args.compare.resolve()} if args.compare else {})
    around = Neighbours()
    rows, heads = measure(roots, ["stored"] if args.tiny else ["stored", "int4"], 1 if args.tiny else args.rounds)
    if not args.tiny:
        notes = f"medians of {args.rounds} rounds, in turns; {around}, the servers included"
        report("serve_start", rows, notes=notes, headlines=heads, folder=args.out)


if __name__ == "__main__":
    main()
