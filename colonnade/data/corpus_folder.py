"""Writes the folder of a corpus atomically: it is built next to its destination and renamed once all of it is on disk.

A corpus that it replaces is deleted only afterwards. A killed build leaves its temporary folder.
"""

import secrets
from pathlib import Path

from colonnade.atomic_rename import rename_folder
from colonnade.config import file_suffix
from colonnade.data.manifest import MANIFEST
from colonnade.errors import DataError


def check_output(out: Path, overwrite: bool) -> None:
    """Raise :class:`DataError` unless a corpus may be written to ``out``."""
    if suffix := file_suffix(out):
        raise DataError(f"{out} names a {suffix} file, but a corpus is a folder; remove the suffix {suffix}")
    if out.is_dir() and not any(out.iterdir()):
        return
    if (out / MANIFEST).is_file():
        if not overwrite:
            raise DataError(f"{out} already has a corpus; choose another folder, or replace it (--overwrite)")
    elif out.exists():
        raise DataError(f"{out} exists and is not a corpus; choose another folder")


def temporary_folder(out: Path) -> Path:
    """The folder to build ``out`` in: next to it, because the last step is a rename; a killed build leaves it."""
    path = out.absolute()
    return path.with_name(f".{path.name}.building-{secrets.token_hex(4)}")


def publish(folder: Path, out: Path) -> None:
    """Rename the finished folder to ``out``; a corpus that it replaces is deleted only afterwards."""
    replaces = (out / MANIFEST).is_file()
    rename_folder(folder, out, old=folder.with_name(f"{folder.name}.old") if replaces else None)
