"""A few steps under torch.profiler: a trace to look at, and a table of where the time went.

The window opens after the first three steps of a session, of which the first compiles and allocates and the third
wakes the profiler up; only the steps within it are slower, and the device is waited for only at its two ends.
"""

import gzip
import json
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from colonnade.config import RunConfig
from colonnade.parallel.mesh import Ground
from colonnade.train.breakdown import Breakdown, breakdown

BEFORE = 3
"""Steps of a session before the traced ones."""


class Profile:
    """Traces train.profile steps into ``runs/NAME/profile/rank-R.json.gz``, for Perfetto or chrome://tracing."""

    def __init__(self, run: RunConfig, ground: Ground):
        self.steps, self.device = run.train.profile, ground.device
        self.path = run.folder / "profile" / f"rank-{ground.rank}.json.gz"
        self._seen = 0
        self._profiler: profile | None = None

    def after_step(self) -> Breakdown | None:
        """A step was taken; where the time of the traced ones went, once the last of them is over."""
        self._seen += 1
        if not self.steps or self._seen > BEFORE + self.steps:
            return None
        if self._seen == BEFORE - 1:
            self._profiler = self._start()
            return None
        if self._profiler is None:
            return None
        if self._seen not in (BEFORE, BEFORE + self.steps):
            self._profiler.step()
            return None
        self._settle()  # so that the device's work of the traced steps is all of it within them
        self._profiler.step()
        if self._seen == BEFORE:
            return None
        self.close()
        with gzip.open(self.path, "rt", encoding="utf-8") as file:
            return breakdown(json.load(file))

    def close(self) -> None:
        """Stop, also in the middle."""
        if self._profiler is not None:
            self._profiler.stop()
            self._profiler = None

    def _start(self) -> profile:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (self.device.type == "cuda")
        profiler = profile(
            activities=activities,
            schedule=schedule(wait=0, warmup=1, active=self.steps, repeat=1),
            on_trace_ready=lambda it: _export(it, self.path),
            acc_events=True,
        )
        profiler.start()
        return profiler

    def _settle(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _export(profiler: profile, path: Path) -> None:
    profiler.export_chrome_trace(str(path))
