"""Checkpoint folders: written atomically, verified by a manifest, and pruned.

Files are written to a hidden sibling (``.step-200.partial``), flushed with fsync, listed with size and SHA-256 in
``manifest.json`` (written last), and the folder is then renamed. POSIX makes a rename within a file system atomic, so a
process killed at any moment leaves either no ``step-200`` or a complete one, and all earlier folders untouched. (A
folder that is overwritten is first renamed to ``.step-200.old``, and deleted after its successor is in place.)

:func:`prune` deletes old checkpoints of a run only after a newer one is complete, so the disk must hold one more than
are kept. Incomplete checkpoints (with missing files) are neither counted nor deleted, so that they can be inspected.
"""

import errno
import json
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from pydantic import Field
from safetensors.torch import save_file
from torch import Tensor

from colonnade.atomic_rename import fsync, rename_folder
from colonnade.checkpoint.digest import Digest, digest_of
from colonnade.config import Config, file_suffix
from colonnade.errors import CapacityError, CheckpointError, ConfigError

MANIFEST = "manifest.json"
FORMAT = "colonnade"
VERSION = 1
DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT)
"""No space left on the device, and quota exceeded."""


class Manifest(Config):
    """``manifest.json``: the size and checksum of every other file of a folder."""

    format: str
    """Always "colonnade"."""
    version: int = Field(ge=1)
    """Version of the folder format."""
    files: dict[str, Digest]
    """By path relative to the folder."""

    @staticmethod
    def read(folder: Path) -> "Manifest":
        """Reads the manifest of ``folder``; raises :class:`CheckpointError` when it is not a Colonnade checkpoint."""
        path = folder / MANIFEST
        if not path.is_file():
            hint = " (it looks like a Hugging Face model)" if (folder / "config.json").is_file() else ""
            problem = "is not a Colonnade checkpoint: it has no manifest.json" if folder.is_dir() else "does not exist"
            raise CheckpointError(f"{folder} {problem}{hint}; use a folder such as runs/NAME/step-N")
        try:
            manifest = Manifest(**read_json(path))
        except ConfigError as why:
            raise CheckpointError(
                f"{path} is damaged, or was not written by Colonnade: {why}; restore it or use another checkpoint"
            ) from None
        if manifest.format != FORMAT or manifest.version > VERSION:
            raise CheckpointError(
                f"{path} has format '{manifest.format}' version {manifest.version}, but this Colonnade reads "
                f"'{FORMAT}' up to version {VERSION}; upgrade Colonnade"
            )
        for name in manifest.files:
            if Path(name).is_absolute() or ".." in Path(name).parts:
                raise CheckpointError(f"{path} lists '{name}', which is outside its folder; do not use this checkpoint")
        return manifest

    def check_sizes(self, folder: Path) -> None:
        """Raises :class:`CheckpointError` for a missing file or a wrong size (cheap: reads no contents)."""
        for name, digest in self.files.items():
            path = folder / name
            if not path.is_file():
                raise CheckpointError(f"{path} is missing; restore it or use another checkpoint")
            if (size := path.stat().st_size) != digest.bytes:
                raise CheckpointError(
                    f"{path} has {size} bytes instead of {digest.bytes}; restore it or use another checkpoint"
                )

    def check_contents(self, folder: Path, names: Iterable[str], digest: Callable[[Path], Digest] = digest_of) -> None:
        """Raises :class:`CheckpointError` when a file does not match its checksum, which ``digest`` computes."""

        def check(name: str) -> None:
            if name not in self.files:
                raise CheckpointError(f"{folder / name} is not in {MANIFEST}; use another checkpoint")
            if digest(folder / name) != self.files[name]:
                raise CheckpointError(
                    f"{folder / name} does not match its checksum in {MANIFEST}: it is damaged or was modified; "
                    "restore it or use another checkpoint"
                )

        # hashlib releases the GIL, so threads run in parallel.
        with ThreadPoolExecutor(max_workers=4) as pool:
            list(pool.map(check, names))


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object; raises :class:`CheckpointError` when the file contains anything else."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as why:
        raise CheckpointError(f"{path} cannot be read: {why}; restore it or use another checkpoint") from None
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} is not a JSON object; restore it or use another checkpoint")
    return values


def write_json(path: Path, values: Any) -> None:
    """Writes ``values`` as indented JSON."""
    path.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Writes a safetensors file with the folder's read permissions (safetensors creates it owner-only)."""
    save_file(dict(tensors), path, metadata=metadata)
    path.chmod(path.parent.stat().st_mode & 0o666)


def partial_path(folder: Path) -> Path:
    """The hidden sibling in which ``folder`` is written before it is renamed."""
    return folder.with_name(f".{folder.name}.partial")


def create_partial(folder: Path, overwrite: bool = False) -> None:
    """Creates an empty :func:`partial_path` for ``folder``; raises like :func:`refuse_existing`."""
    refuse_existing(folder, overwrite)
    remove_partial(folder)
    partial_path(folder).mkdir(parents=True)


def refuse_existing(folder: Path, overwrite: bool = False) -> None:
    """Raises :class:`CheckpointError` when ``folder`` must not be written.

    That is when it exists (with ``overwrite``: when it exists and is not a model), or when its name is that of a single
    file.
    """
    if suffix := file_suffix(folder):
        raise CheckpointError(
            f"{folder} is the name of one {suffix} file, which cannot be written: the formats hf and colonnade are "
            f"folders; remove the suffix {suffix}"
        )
    if folder.exists() and not overwrite:
        raise CheckpointError(f"{folder} already exists; choose another name, or replace it (--overwrite)")
    if folder.exists() and not any(
        (folder / name).is_file() for name in (MANIFEST, "config.json", "adapter_config.json")
    ):
        raise CheckpointError(f"{folder} exists and is not a model, so it is not overwritten; choose another name")


def remove_partial(folder: Path) -> None:
    """Removes the leftovers of an interrupted write of ``folder``."""
    if partial_path(folder).exists():
        shutil.rmtree(partial_path(folder))


def remove_partials(run: Path) -> None:
    """Removes the leftovers of all interrupted writes of a run; no process may be writing there."""
    for path in run.glob(".step-*.partial"):
        shutil.rmtree(path)


def commit(folder: Path, known: dict[str, Digest]) -> None:
    """Writes the manifest, flushes all files and renames the folder; ``known`` files are flushed and not read again."""
    partial = partial_path(folder)
    names = sorted(path.relative_to(partial).as_posix() for path in partial.rglob("*") if path.is_file())
    files = {name: known.get(name) or digest_of(partial / name) for name in names}
    write_json(partial / MANIFEST, Manifest(format=FORMAT, version=VERSION, files=files).model_dump())
    for name in (*names, MANIFEST):
        if name not in known:
            fsync(partial / name)
    rename_into_place(folder)


def rename_into_place(folder: Path) -> None:
    """Renames :func:`partial_path`, whose files are flushed, to ``folder``; deletes the folder that it replaces."""
    partial, old = partial_path(folder), folder.with_name(f".{folder.name}.old")
    for path in (partial, *(path for path in partial.rglob("*") if path.is_dir())):
        fsync(path)
    replaced = folder.exists()
    if replaced and old.exists():  # left by a process that was killed before it could delete it
        shutil.rmtree(old)
    rename_folder(partial, folder, old=old if replaced else None)


def is_complete(folder: Path) -> bool:
    """Whether ``folder`` is a checkpoint with all its files at their recorded sizes."""
    try:
        Manifest.read(folder).check_sizes(folder)
    except CheckpointError:
        return False
    return True


def list_steps(run: Path) -> list[tuple[int, Path]]:
    """(N, folder) for each ``step-N`` of a run, the newest first."""
    steps = [(int(match[1]), path) for path in run.glob("step-*") if (match := re.fullmatch(r"step-(\d+)", path.name))]
    return sorted(steps, reverse=True)


def prune(run: Path, keep: int | None, keep_every: int | None = None) -> list[Path]:
    """Deletes all but the newest ``keep`` complete checkpoints of ``run``, and those of every ``keep_every``-th step.

    ``keep`` None deletes nothing. Returns the deleted folders; raises :class:`CheckpointError` when one cannot be
    deleted.
    """
    if keep is None:
        return []
    old = [(step, folder) for step, folder in list_steps(run) if is_complete(folder)][keep:]
    deleted = [folder for step, folder in old if keep_every is None or step % keep_every]
    for folder in deleted:
        try:
            # Renamed first: a process killed halfway must not leave a folder that looks like a damaged checkpoint.
            remove_partial(folder)
            folder.rename(partial_path(folder))
            remove_partial(folder)
        except OSError as why:
            raise CheckpointError(
                f"{folder} cannot be deleted: {why.strerror}; delete it, or unset train.keep"
            ) from why
    return deleted


def check_disk_space(folder: Path, needs_bytes: int) -> None:
    """Raises :class:`CapacityError` when the disk of ``folder`` has less than ``needs_bytes`` free."""
    existing = folder.absolute()
    while not existing.exists():
        existing = existing.parent
    free_bytes = shutil.disk_usage(existing).free
    if free_bytes < needs_bytes:
        raise CapacityError(
            f"{folder} needs {needs_bytes:,} bytes and the disk has {free_bytes:,} bytes free; nothing was written: "
            "free some space (train.keep keeps fewer checkpoints)"
        )
