"""Which checkpoints of a run stay, and whether there is room for the next.

Old ones go only after a newer one is complete and in its place, so the disk must hold one more than are kept. What is
not complete (it lost files) neither counts nor is deleted: somebody may want to look at it.
"""

import shutil
from pathlib import Path

from colonnade.checkpoint import folder as folders
from colonnade.errors import CapacityError, CheckpointError


def prune(run: Path, keep: int | None, keep_every: int | None = None) -> list[Path]:
    """Delete all but the newest ``keep`` complete checkpoints of ``run``, and those of every ``keep_every``-th step.

    ``keep`` None deletes nothing. Returns what was deleted; raises :class:`CheckpointError` for what cannot be.
    """
    if keep is None:
        return []
    old = [(step, folder) for step, folder in folders.steps(run) if folders.complete(folder)][keep:]
    gone = [folder for step, folder in old if keep_every is None or step % keep_every]
    for folder in gone:
        try:
            # Renamed first: a process killed halfway must not leave a folder that looks like a damaged checkpoint.
            folders.discard(folder)
            folder.rename(folders.partial(folder))
            folders.discard(folder)
        except OSError as why:
            raise CheckpointError(
                f"{folder} cannot be deleted: {why.strerror}; delete it, or leave train.keep out"
            ) from why
    return gone


def check_room(folder: Path, needs_bytes: int) -> None:
    """Raise :class:`CapacityError` when the disk where ``folder`` will be has less than ``needs_bytes`` free."""
    place = folder.absolute()
    while not place.exists():
        place = place.parent
    free_bytes = shutil.disk_usage(place).free
    if free_bytes < needs_bytes:
        raise CapacityError(
            f"{folder} needs {needs_bytes:,} bytes and the disk has {free_bytes:,} bytes free; nothing was written: "
            "free some space (train.keep keeps fewer checkpoints)"
        )
