"""Where metrics go. A tracker is two methods; JSON Lines and TensorBoard are two trackers, yours is a third.

Only rank 0 tracks. A resumed run forgets what was tracked after the checkpoint that it resumes from, so that each
step stands once.
"""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

METRICS = "metrics.jsonl"


class Tracker(Protocol):
    """Anything that wants the numbers of a run."""

    def record(self, step: int, values: Mapping[str, float]) -> None:
        """Note ``values`` after ``step`` optimizer steps; names may differ from call to call."""
        ...

    def close(self) -> None:
        """The run is over (or stops for now)."""
        ...


OpenTracker = Callable[[Path, int], Tracker]
"""Makes a tracker on rank 0, from the run's folder and the steps taken before a resume (0 for a new run)."""


class JsonLines:
    """One JSON object a line in ``metrics.jsonl``: easy to read with anything."""

    def __init__(self, folder: Path, resumed_step: int):
        self.path = folder / METRICS
        kept = [row for row in read_rows(folder) if row["step"] <= resumed_step]
        fresh = self.path.with_suffix(".partial")
        fresh.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
        fresh.replace(self.path)
        self._file = self.path.open("a", encoding="utf-8")

    def record(self, step: int, values: Mapping[str, float]) -> None:
        """Append a line."""
        self._file.write(json.dumps({"step": step, **values}) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Flush to the disk."""
        os.fsync(self._file.fileno())
        self._file.close()


class TensorBoard:
    """Event files in ``tensorboard/``: ``tensorboard --logdir runs`` shows all runs beside each other."""

    def __init__(self, folder: Path, resumed_step: int):
        from torch.utils.tensorboard import SummaryWriter  # slow to import; rank 0 alone pays

        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=resumed_step + 1)

    def record(self, step: int, values: Mapping[str, float]) -> None:
        """Add one scalar a name."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush to the disk."""
        self._writer.close()


def read_rows(folder: Path) -> list[dict[str, float]]:
    """The rows of a run's ``metrics.jsonl``; a last line that a kill cut off is dropped."""
    path = folder / METRICS
    rows: list[dict[str, float]] = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            rows.append(json.loads(line))
        except ValueError:
            break
    return rows
