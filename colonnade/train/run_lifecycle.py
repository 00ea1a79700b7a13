"""Start and end of a run: the lock on its folder, and the graceful stop after a signal.

Ctrl-C reaches every process of a terminal's group, a scheduler's SIGTERM perhaps only one, and never at the same point
of a step. So a handler only records the signal, and after each step the ranks take the maximum of what they recorded:
all stop after the same step, or none does. This reduction runs over gloo on the CPU, so it does not wait for the GPU.
"""

import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

import torch

from colonnade.checkpoint.file_lock import FileLock
from colonnade.errors import CheckpointError
from colonnade.parallel.axis import Axis
from colonnade.parallel.launch import STOP_SIGNALS, Interrupted, slurm_job
from colonnade.parallel.rendezvous import broadcast_text


class RunLock:
    """Context manager: rank 0 locks the folder of a run on behalf of all ranks.

    Entering raises :class:`CheckpointError` on all ranks when another run has locked the folder.
    """

    def __init__(self, folder: Path, world: Axis):
        self._lock, self._world = FileLock(folder, slurm_job()), world

    def __enter__(self) -> Self:
        self._on_rank_0(self._lock.acquire)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._lock.release()

    def check(self) -> None:
        """Raise :class:`CheckpointError` on all ranks when another run has taken over the folder."""
        self._on_rank_0(self._lock.check)

    def _on_rank_0(self, action: Callable[[], None]) -> None:
        """Run ``action`` on rank 0 and raise its error on all ranks."""
        failure = ""
        if self._world.rank == 0:
            try:
                action()
            except CheckpointError as error:
                failure = str(error)
        if failure := broadcast_text(failure, self._world):
            raise CheckpointError(failure)


class StopSignal:
    """Context manager: SIGTERM and SIGINT are recorded instead of ending the process."""

    def __init__(self, world: Axis):
        self.world = world
        self._signal = 0
        self._previous_handlers: dict[int, Any] = {}

    def __enter__(self) -> Self:
        # Python runs signal handlers in the main thread only, and only that thread may set them.
        if threading.current_thread() is threading.main_thread():
            self._previous_handlers = {number: signal.signal(number, self._record) for number in STOP_SIGNALS}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)

    def _record(self, number: int, frame: FrameType | None) -> None:
        self._signal = number

    def received(self) -> Interrupted | None:
        """The exception to raise after saving, the same on all ranks, if any rank received a signal."""
        number = int(self.world.max_(torch.tensor(self._signal)).item())
        return Interrupted(number) if number else None
