"""Moves a folder that was built next to its destination there by a rename.

A process that is killed at any moment leaves the replaced folder or the new one, whole.
"""

import os
import shutil
from pathlib import Path


def fsync(path: Path) -> None:
    """Waits until a file or folder is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def rename_folder(built: Path, folder: Path, *, old: Path | None) -> None:
    """Rename ``built``, whose files are flushed, to ``folder``.

    ``old``: the name of the folder that it replaces until that is deleted, after the rename; None if there is none.
    """
    if old is not None:
        folder.rename(old)
    try:
        built.rename(folder)
    except OSError:
        if old is not None:
            old.rename(folder)
        raise
    if hasattr(os, "O_DIRECTORY"):  # where directories can be opened
        fsync(folder.parent)
    if old is not None:
        shutil.rmtree(old)
