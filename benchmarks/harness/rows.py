"""Benchmark rows that are written to disk as soon as they are measured, in case a run ends early.

rows = Rows("expert_parallel_h200", folder)
rows.add({"ranks": 4, …})           # printed, and appended to NAME.partial.jsonl
rows.done()                         # the complete record is written: remove the partial one
"""

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from harness.report import Cell

Row = dict[str, Cell]


def round_significant(x: float, count: int = 4) -> float:
    """``x`` rounded to ``count`` significant figures."""
    return float(f"{x:.{count}g}")


def format_row(row: Mapping[str, Cell]) -> str:
    """A row as text: ``B 4  S 64  who colonnade  us 26.9``; cells of None are omitted."""
    return "  ".join(f"{key} {value}" for key, value in row.items() if value is not None)


class Rows(list[Row]):
    """A list of rows that are written one by one; with ``resume`` it begins with those of an earlier run, if any."""

    def __init__(self, name: str, folder: Path, *, resume: bool = False) -> None:
        super().__init__()
        folder.mkdir(parents=True, exist_ok=True)
        self.path, self.began = folder / f"{name}.partial.jsonl", time.perf_counter()
        record = folder / f"{name}.json"
        if resume and self.path.exists():
            self.extend(json.loads(line) for line in self.path.read_text(encoding="utf-8").splitlines())
        elif resume and record.exists():
            self.extend(json.loads(record.read_text(encoding="utf-8"))["rows"])
        self.keep(lambda _: True)

    def keep(self, chosen: Callable[[Row], bool]) -> None:
        """Drop all rows but the chosen ones, also on disk."""
        self[:] = filter(chosen, self)
        self.path.write_text("".join(map(_json_line, self)), encoding="utf-8")

    def add(self, row: Row) -> None:
        """Append a row, print it with the elapsed seconds, and write it to disk."""
        self.append(row)
        print(f"{time.perf_counter() - self.began:6.1f} s  {format_row(row)}", flush=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(_json_line(row))

    def done(self) -> None:
        """Remove the partial record."""
        self.path.unlink(missing_ok=True)


def _json_line(row: Row) -> str:
    return json.dumps(row, ensure_ascii=False) + "\n"
