"""Cleaning with one and with more workers, and the memory of a worker as the corpus grows.

    python benchmarks/corpus_workers.py [--copies 8 32] [--workers 1 2 4]

The first size is cleaned with each number of workers, in turns (the median counts), other sizes with the last one.
Copies of the passages of speeches in which a quarter of the words differ, so that they are no near copies. Give it an
idle core for each worker: the times are wall times. The row ``independent`` is the machine's own limit: as many
processes at once, each cleaning its own corpus with one worker. Memory is the highest resident set of a process
that datatrove's tasks run in, without the files that it maps.
"""

import argparse
import json
import tempfile
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import accumulate, pairwise
from multiprocessing import forkserver, get_context
from pathlib import Path
from typing import Any

import numpy as np

from colonnade.config import Recipe, plural
from colonnade.data.readers import sotu_documents
from colonnade.data.refine.run import Executor, run
from harness.report import Cell, Headline, folder_of, report

WORDS = 250


def write_corpus(path: Path, copies: int, count: int | None) -> int:
    """Write the first ``count`` passages ``copies`` times, each time with other words replaced; returns the text's
    size.
    """
    passages = list[list[str]]()
    for _, speech in sotu_documents():
        words = speech.split(" ")
        passages += [words[i : i + WORDS] for i in range(0, len(words), WORDS)]
    passages = passages[:count]
    flat, size = np.array([word for words in passages for word in words], dtype=object), 0
    vocabulary, ends = np.unique(flat), [0, *accumulate(map(len, passages))]
    with path.open("w", encoding="utf-8") as file:
        for copy in range(copies):
            choose = np.random.default_rng(copy)
            words = np.where(choose.random(len(flat)) > 0.25, flat, choose.choice(vocabulary, len(flat))).tolist()
            for start, end in pairwise(ends):
                text = " ".join(words[start:end])
                size += len(text.encode())
                file.write(json.dumps({"text": text}) + "\n")
    return size


class Peak(threading.Thread):
    """The largest ``RssAnon`` of the processes of the pool [bytes]."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.size_bytes, self._ended = 0, threading.Event()

    def run(self) -> None:
        while not self._ended.wait(0.1):
            for status in Path("/proc").glob("[0-9]*/status"):
                self.size_bytes = max(self.size_bytes, _anonymous_bytes(status))

    def end(self) -> int:
        """Stop, and return the result."""
        self._ended.set()
        self.join()
        return self.size_bytes


def _anonymous_bytes(status: Path) -> int:
    """The memory of a process of the pool: a child of the fork server; 0 for others."""
    server = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    try:
        lines = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
    except OSError:  # it has ended
        return 0
    if not server or int(lines.get("PPid", 0)) != server or "RssAnon" not in lines:  # one that ends has no memory
        return 0
    return int(lines["RssAnon"].split()[0]) << 10


def measure(copies: int, workers: int, count: int | None) -> dict[str, Cell]:
    """One cleaning, in a temporary folder (``TMPDIR`` chooses the disk)."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        size = write_corpus(folder / "in.jsonl", copies, count)
        peak = Peak()
        peak.start()
        started_s = time.perf_counter()
        cleaned = run([folder / "in.jsonl"], folder / "out", Recipe(min_tokens=64), Executor(workers=workers))
        took_s = time.perf_counter() - started_s
    assert cleaned is not None
    return {
        "workers": workers, "megabytes": round(size / 1e6, 1), "seconds": round(took_s, 2),
        "mb_per_s": round(size / 1e6 / took_s, 2), "peak_worker_mb": round(peak.end() / 1e6) or None,
        "documents": cleaned.read, "stay": cleaned.documents,
    }  # fmt: skip


def measure_independent(copies: int, processes: int, count: int | None) -> dict[str, Cell]:
    """As many cleanings at once as there are ``processes``, each with one worker."""
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        rows = list(pool.map(measure, [copies] * processes, [1] * processes, [count] * processes))
    seconds = max(float(row["seconds"] or 0) for row in rows)
    size = sum(float(row["megabytes"] or 0) for row in rows)
    return {
        **rows[0], "workers": f"{processes} independent", "megabytes": round(size, 1), "seconds": seconds,
        "mb_per_s": round(size / seconds, 2),
    }  # fmt: skip


def main(argv: list[str] | None = None) -> Any:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--copies", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    rows = list[dict[str, Cell]]()
    path, folder = None, folder_of(args.out, toy=args.tiny)
    count, first = 50 if args.tiny else None, args.copies[0]
    measures = [partial(measure, first, workers, count) for workers in args.workers]
    if args.workers[-1] > 1:
        measures.append(partial(measure_independent, first, args.workers[-1], count))
    turns: list[list[dict[str, Cell]]] = [[] for _ in measures]
    for _ in range(args.turns):
        for each, own in zip(measures, turns, strict=True):
            own.append(each())
            print(own[-1], flush=True)
        rows = [sorted(own, key=lambda row: float(row["seconds"] or 0))[len(own) // 2] for own in turns]
        path = _write(rows, args.workers, folder)  # what is measured stays if the benchmark is stopped
    for copies in args.copies[1:]:
        rows.append(measure(copies, args.workers[-1], count))
        print(rows[-1], flush=True)
        path = _write(rows, args.workers, folder)
    return path


def _write(rows: list[dict[str, Cell]], workers: list[int], folder: Path) -> Path:
    one, *more = rows[: len(workers)]
    heads = [
        Headline(f"Cleaning {row['megabytes']} MB of text, {row['workers']} workers", float(row["mb_per_s"] or 0),
                 "MB/s", plural(workers[0], "worker"), float(one["mb_per_s"] or 0))
        for row in more
    ]  # fmt: skip
    notes = "wall time, cores of their own; memory without mapped files"
    return report("corpus_workers_cpu", rows, notes, headlines=heads, folder=folder)


if __name__ == "__main__":
    main()
