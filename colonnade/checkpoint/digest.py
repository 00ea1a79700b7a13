"""Checksums of files; imports no torch, so that they can be computed while torch is imported."""

import hashlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pydantic import Field

from colonnade.config import Config


class Digest(Config):
    """Size and checksum of a file."""

    bytes: int = Field(ge=0)
    sha256: str = Field(pattern="[0-9a-f]{64}")


def digest_of(path: Path) -> Digest:
    """Returns the size and SHA-256 of a file."""
    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    return Digest(bytes=path.stat().st_size, sha256=sha256)


class BackgroundDigests:
    """:func:`digest_of` of all files of a folder, computed by threads in the background."""

    def __init__(self, folder: Path):
        self._pool = ThreadPoolExecutor(max_workers=2)
        paths = [path for path in folder.rglob("*") if path.is_file()]
        paths.sort(key=lambda path: -path.stat().st_size)
        self._digests = {path: self._pool.submit(digest_of, path) for path in paths}
        self._pool.shutdown(wait=False)

    def __call__(self, path: Path) -> Digest:
        """The digest of a file; waits until it is computed."""
        return self._digests[path].result() if path in self._digests else digest_of(path)
