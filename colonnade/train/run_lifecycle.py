"""Stopping when asked: a signal is noted, the step is finished, all ranks agree, the run saves and ends.

Ctrl-C reaches every process of a terminal's group, a scheduler's SIGTERM perhaps only one, and never at the same
moment of a step. So a handler only notes the signal, and after each step the ranks take the maximum of what they
noted: they stop after the same step or not at all. The numbers travel over gloo on the CPU, so a GPU's queue of work
is not waited for.

The lock of a run's folder, held by rank 0 for all ranks, who go on or end together.
"""

import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

import torch

from colonnade.checkpoint.file_lock import Lock
from colonnade.errors import CheckpointError
from colonnade.parallel.axis import Axis
from colonnade.parallel.config_check import first_says
from colonnade.parallel.launch import ASKED, Interrupted, job


class StopSignal:
    """Used as a context: inside, SIGTERM and SIGINT no longer end the process at once (SIGKILL still does)."""

    def __init__(self, world: Axis):
        self.world = world
        self._noted = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        # Python runs handlers in the main thread only, and lets no other thread set them.
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in ASKED}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._noted = number

    def asked(self) -> Interrupted | None:
        """What to raise once all is saved, the same on all ranks, when any of them was sent a signal."""
        number = int(self.world.max_(torch.tensor(self._noted)).item())
        return Interrupted(number) if number else None


class RunLock:
    """Used as a context around all that writes to the folder ``run``.

    Entering raises :class:`CheckpointError`, on all ranks alike, when another run has the folder.
    """

    def __init__(self, run: Path, world: Axis):
        self._lock, self._world = Lock(run, job()), world

    def __enter__(self) -> Self:
        self._together(self._lock.acquire)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._lock.release()

    def check(self) -> None:
        """Raise :class:`CheckpointError`, on all ranks alike, when another run has taken the folder over."""
        self._together(self._lock.check)

    def _together(self, act: Callable[[], None]) -> None:
        failure = ""
        if self._world.rank == 0:
            try:
                act()
            except CheckpointError as error:
                failure = str(error)
        if failure := first_says(failure, self._world):
            raise CheckpointError(failure)
