"""Rows of a benchmark that are on disk as soon as they are measured: a run that ends early keeps what it had.

rows = Rows("expert_parallel_h200", folder)
rows.add({"ranks": 4, …})           # printed, and a line of NAME.partial.jsonl
rows.done()                         # the whole record is written: the partial one goes
"""

import json
import time
from pathlib import Path

from _report import Cell

Row = dict[str, Cell]


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
        line = json.dumps(row, ensure_ascii=False)
        print(f"{time.perf_counter() - self.began:6.1f} s  {line}", flush=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def done(self) -> None:
        """Remove the partial record, which the whole one replaces."""
        self.path.unlink(missing_ok=True)
