"""A folder that appears whole or not at all, and that can prove it is undamaged.

Everything is written into a hidden sibling (``.step-200.partial``), flushed to the disk, listed with size and SHA-256
in ``manifest.json`` (written last), and then renamed: POSIX makes a rename within a file system atomic, so that a
process killed at any moment leaves either no ``step-200`` or a complete one, and every earlier folder as it was.
(A folder that is overwritten is first moved aside, to ``.step-200.old``, and deleted when its successor stands.)

Which checkpoints of a run stay, and whether there is room for the next.

Old ones go only after a newer one is complete and in its place, so the disk must hold one more than are kept. What is
not complete (it lost files) neither counts nor is deleted: somebody may want to look at it.
"""

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from pydantic import Field
from safetensors.torch import save_file
from torch import Tensor

from colonnade.config import Config, file_suffix
from colonnade.errors import CapacityError, CheckpointError, ConfigError

MANIFEST = "manifest.json"
FORMAT = "colonnade"
VERSION = 1
FULL = (errno.ENOSPC, errno.EDQUOT)
"""The operating system's words for a full disk: no space left, quota exceeded."""


class Digest(Config):
    """What a file must be."""

    bytes: int = Field(ge=0)
    """Its size."""
    sha256: str = Field(pattern="[0-9a-f]{64}")
    """Its checksum."""


class Manifest(Config):
    """Every other file of a folder, by its path within it."""

    format: str
    """Always "colonnade"."""
    version: int = Field(ge=1)
    """Of the folder's arrangement."""
    files: dict[str, Digest]
    """What each must be."""

    @staticmethod
    def read(folder: Path) -> "Manifest":
        """The manifest of a checkpoint; raises :class:`CheckpointError` for a folder that is none, or not ours."""
        path = folder / MANIFEST
        if not path.is_file():
            hint = " (it looks like a Hugging Face model)" if (folder / "config.json").is_file() else ""
            what = "is not a Colonnade checkpoint: it has no manifest.json" if folder.is_dir() else "does not exist"
            raise CheckpointError(f"{folder} {what}{hint}; give a folder such as runs/NAME/step-N")
        try:
            manifest = Manifest(**read_json(path))
        except ConfigError as why:
            raise CheckpointError(
                f"{path} is damaged or foreign: {why}; restore it or use another checkpoint"
            ) from None
        if manifest.format != FORMAT or manifest.version > VERSION:
            raise CheckpointError(
                f"{path} has format '{manifest.format}' version {manifest.version}, and this Colonnade reads "
                f"'{FORMAT}' up to {VERSION}; upgrade Colonnade"
            )
        for name in manifest.files:
            if Path(name).is_absolute() or ".." in Path(name).parts:
                raise CheckpointError(f"{path} names '{name}', outside its folder; do not use this checkpoint")
        return manifest

    def check_sizes(self, folder: Path) -> None:
        """Raise :class:`CheckpointError` for a missing file or one of another size (cheap: reads no contents)."""
        for name, digest in self.files.items():
            path = folder / name
            if not path.is_file():
                raise CheckpointError(f"{path} is missing; restore it or use another checkpoint")
            if (size := path.stat().st_size) != digest.bytes:
                raise CheckpointError(
                    f"{path} has {size} bytes instead of {digest.bytes}; restore it or use another checkpoint"
                )

    def check_contents(self, folder: Path, names: Iterable[str]) -> None:
        """Raise :class:`CheckpointError` for a file whose contents differ from what was written."""

        def check(name: str) -> None:
            if name not in self.files:
                raise CheckpointError(f"{folder / name} is not in {MANIFEST}; use another checkpoint")
            if digest_of(folder / name) != self.files[name]:
                raise CheckpointError(
                    f"{folder / name} differs from its checksum in {MANIFEST}: it is damaged or was changed; "
                    "restore it or use another checkpoint"
                )

        # hashlib lets go of the interpreter lock, so that threads use all cores.
        with ThreadPoolExecutor(max_workers=4) as pool:
            list(pool.map(check, names))


def digest_of(path: Path) -> Digest:
    """Size and SHA-256 of a file."""
    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    return Digest(bytes=path.stat().st_size, sha256=sha256)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; raises :class:`CheckpointError` when the file is anything else."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as why:
        raise CheckpointError(f"{path} cannot be read: {why}; restore it or use another checkpoint") from None
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} holds no JSON object; restore it or use another checkpoint")
    return values


def write_json(path: Path, values: Any) -> None:
    """Write ``values`` for people and programs to read."""
    path.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file into a folder, as readable as the folder is: safetensors makes it its owner's alone."""
    save_file(dict(tensors), path, metadata=metadata)
    path.chmod(path.parent.stat().st_mode & 0o666)


def partial(folder: Path) -> Path:
    """Where a folder is written before it appears."""
    return folder.with_name(f".{folder.name}.partial")


def begin(folder: Path, overwrite: bool = False) -> None:
    """Make an empty place for ``folder`` to be written into (:func:`partial`); see :func:`refuse_existing`."""
    refuse_existing(folder, overwrite)
    discard(folder)
    partial(folder).mkdir(parents=True)


def refuse_existing(folder: Path, overwrite: bool = False) -> None:
    """Raise :class:`CheckpointError` when ``folder`` exists, unless it is a model and ``overwrite`` lets it go, and for
    a name that means one file.
    """
    if suffix := file_suffix(folder):
        raise CheckpointError(
            f"{folder} names one {suffix} file, which cannot be written: the formats hf and colonnade are folders; "
            f"leave {suffix} out"
        )
    if folder.exists() and not overwrite:
        raise CheckpointError(f"{folder} exists already; choose another name, or replace it (--overwrite)")
    if folder.exists() and not any((folder / name).is_file() for name in (MANIFEST, "config.json")):
        raise CheckpointError(f"{folder} exists and is no model, so that it is not overwritten; choose another name")


def discard(folder: Path) -> None:
    """Remove what an interrupted write of ``folder`` left behind."""
    if partial(folder).exists():
        shutil.rmtree(partial(folder))


def discard_all(run: Path) -> None:
    """Remove what interrupted writes of any step of a run left behind (while nobody writes there)."""
    for path in run.glob(".step-*.partial"):
        shutil.rmtree(path)


def commit(folder: Path, known: dict[str, Digest]) -> None:
    """Let ``folder`` appear with a manifest: list its files (``known`` ones are not read again), flush everything."""
    place = partial(folder)
    names = sorted(path.relative_to(place).as_posix() for path in place.rglob("*") if path.is_file())
    files = {name: known.get(name) or digest_of(place / name) for name in names}
    write_json(place / MANIFEST, Manifest(format=FORMAT, version=VERSION, files=files).model_dump())
    for name in (*names, MANIFEST):
        if name not in known:
            flush(place / name)
    appear(folder)


def appear(folder: Path) -> None:
    """Rename what was written and flushed to ``folder``; what it replaces is deleted when it stands there."""
    place, aside = partial(folder), folder.with_name(f".{folder.name}.old")
    for path in (place, *(path for path in place.rglob("*") if path.is_dir())):
        flush(path)
    if replaced := folder.exists():
        if aside.exists():  # of a process that was killed just before it deleted this
            shutil.rmtree(aside)
        folder.rename(aside)
    try:
        place.rename(folder)
    except OSError:
        if replaced:
            aside.rename(folder)
        raise
    flush(folder.parent)
    if replaced:
        shutil.rmtree(aside)


def flush(path: Path) -> None:
    """Wait until a file or folder is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def complete(folder: Path) -> bool:
    """Whether a checkpoint has lost nothing since it was written, as far as sizes tell."""
    try:
        Manifest.read(folder).check_sizes(folder)
    except CheckpointError:
        return False
    return True


def steps(run: Path) -> list[tuple[int, Path]]:
    """(N, folder) for each ``step-N`` of a run, the newest first."""
    found = [(int(match[1]), path) for path in run.glob("step-*") if (match := re.fullmatch(r"step-(\d+)", path.name))]
    return sorted(found, reverse=True)


def prune(run: Path, keep: int | None, keep_every: int | None = None) -> list[Path]:
    """Delete all but the newest ``keep`` complete checkpoints of ``run``, and those of every ``keep_every``-th step.

    ``keep`` None deletes nothing. Returns what was deleted; raises :class:`CheckpointError` for what cannot be.
    """
    if keep is None:
        return []
    old = [(step, folder) for step, folder in steps(run) if complete(folder)][keep:]
    gone = [folder for step, folder in old if keep_every is None or step % keep_every]
    for folder in gone:
        try:
            # Renamed first: a process killed halfway must not leave a folder that looks like a damaged checkpoint.
            discard(folder)
            folder.rename(partial(folder))
            discard(folder)
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
