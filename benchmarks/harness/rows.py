"""Rows of a benchmark that are on disk as soon as they are measured: a run that ends early keeps what it had.

rows = Rows("expert_parallel_h200", folder)
rows.add({"ranks": 4, …})           # printed for people, and a line of NAME.partial.jsonl
rows.done()                         # the whole record is written: the partial one goes
"""

import json
import time
from collections.abc import Mapping
from pathlib import Path

from harness.report import Cell

Row = dict[str, Cell]


def figures(x: float, count: int = 4) -> float:
    """``x`` to so many figures, however small it is."""
    return float(f"{x:.{count}g}")


def line(row: Mapping[str, Cell]) -> str:
    """A row as people read it: ``B 4  S 64  who colonnade  us 26.9``; what was not measured is left out."""
    return "  ".join(f"{key} {value}" for key, value in row.items() if value is not None)


class Rows(list[Row]):
    """A list of rows that are written one by one."""

    def __init__(self, name: str, folder: Path) -> None:
        super().__init__()
        folder.mkdir(parents=True, exist_ok=True)
        self.path, self.began = folder / f"{name}.partial.jsonl", time.perf_counter()
        self.path.write_text("", encoding="utf-8")

    def add(self, row: Row) -> None:
        """Print a row with the seconds since the beginning, and keep it."""
        self.append(row)
        print(f"{time.perf_counter() - self.began:6.1f} s  {line(row)}", flush=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")

    def done(self) -> None:
        """Remove the partial record, which the whole one replaces."""
        self.path.unlink(missing_ok=True)
