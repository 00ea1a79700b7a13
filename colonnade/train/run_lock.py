"""The lock of a run's folder, held by rank 0 for all ranks, who go on or end together."""

from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from colonnade.checkpoint.file_lock import Lock
from colonnade.errors import CheckpointError
from colonnade.parallel.axis import Axis
from colonnade.parallel.launch import slurm_job
from colonnade.parallel.rendezvous import broadcast_text


class RunLock:
    """Used as a context around all that writes to the folder ``run``.

    Entering raises :class:`CheckpointError`, on all ranks alike, when another run has the folder.
    """

    def __init__(self, run: Path, world: Axis):
        self._lock, self._world = Lock(run, slurm_job()), world

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
        if failure := broadcast_text(failure, self._world):
            raise CheckpointError(failure)
