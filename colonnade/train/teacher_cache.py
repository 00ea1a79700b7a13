"""A folder with a teacher's outputs, the most likely tokens of each sample, so that it runs once per sample.

    cache.json      the source of the outputs: teacher, temperature, sizes
    part-….bin      records of one process, appended: key, checksum, ids (S, k) int32, log-probabilities (S, k) float32

For a classifier S is 1 and k the number of classes. A record's key is a digest of the sample's tokens: any run over the
same samples finds it, in any order and layout. Each process appends to its own file. A record that is torn or
damaged fails its checksum and is computed again.
"""

import hashlib
import json
import os
import uuid
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from colonnade.errors import ConfigError, DataError
from colonnade.model.distill_top import TopTokens

META, KEY_BYTES = "cache.json", 16


class TeacherCache:
    """The records of a folder."""

    def __init__(self, folder: Path, identity: Mapping[str, Any], sequence: int, k: int):
        """Opens or creates ``folder``; raises :class:`ConfigError` if it belongs to anything other than
        ``identity``.
        """
        self.folder, self.sequence, self.k = folder, sequence, k
        self._record = np.dtype([("key", f"V{KEY_BYTES}"), ("crc", "<u4"), ("body", "<i4", (2, sequence, k))])
        meta = {**identity, "sequence": sequence, "tokens": k}
        self._open(meta)
        self._places: dict[bytes, list[tuple[Path, int]]] = {}
        """The records of each key: several after a damaged one was computed again."""
        self._scanned: dict[Path, int] = {}
        """Records of each file that are known."""
        self._own = folder / f"part-{uuid.uuid4().hex}.bin"
        self.scan()

    def __len__(self) -> int:
        """The number of samples."""
        return len(self._places)

    def scan(self) -> None:
        """Find the records that other processes have added."""
        for path in sorted({*self.folder.glob("part-*.bin")} - {self._own}):
            known, count = self._scanned.get(path, 0), path.stat().st_size // self._record.itemsize
            with path.open("rb") as file:
                for number in range(known, count):
                    file.seek(number * self._record.itemsize)
                    self._places.setdefault(file.read(KEY_BYTES), []).append((path, number))
            self._scanned[path] = max(known, count)

    def key(self, tokens_S: Tensor) -> bytes:
        """The key of a sample."""
        return hashlib.blake2b(tokens_S.cpu().numpy().astype("<i8").tobytes(), digest_size=KEY_BYTES).digest()

    def find(self, key: bytes) -> TopTokens | None:
        """The record, if it is there and whole."""
        whole = (record for place in self._places.get(key, ()) if (record := self._read(key, *place)) is not None)
        return next(whole, None)

    def _read(self, key: bytes, path: Path, number: int) -> TopTokens | None:
        with path.open("rb") as file:
            file.seek(number * self._record.itemsize)
            raw = file.read(self._record.itemsize)
        if len(raw) < self._record.itemsize:
            return None
        record = np.frombuffer(raw, self._record)[0]
        if bytes(record["key"]) != key or zlib.crc32(record["body"].tobytes()) != record["crc"]:
            return None
        ids, logp = record["body"].copy()
        return TopTokens(torch.from_numpy(ids), torch.from_numpy(logp.view("<f4")))

    def add(self, key: bytes, top: TopTokens) -> None:
        """Append a sample's record."""
        record = np.zeros((), self._record)
        record["key"] = np.void(key)
        record["body"][0] = top.ids_Tk.cpu().numpy()
        record["body"][1] = top.logp_Tk.float().cpu().numpy().view("<i4")
        record["crc"] = zlib.crc32(record["body"].tobytes())
        try:
            with self._own.open("ab") as file:
                number = file.tell() // self._record.itemsize
                file.write(record.tobytes())
        except OSError as why:
            raise DataError(
                f"distill.cache {self.folder} cannot be written: {why.strerror}; free some space, or unset "
                "distill.cache"
            ) from None
        self._places.setdefault(key, []).append((self._own, number))

    def _open(self, meta: dict[str, Any]) -> None:
        path = self.folder / META
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if not path.exists():  # of several processes each writes the same
                partial = path.with_name(f".{META}.{os.getpid()}")
                partial.write_text(json.dumps(meta, indent=2) + "\n", "utf-8")
                partial.replace(path)
            there = json.loads(path.read_text("utf-8"))
        except (OSError, ValueError) as why:
            raise ConfigError(
                f"distill.cache {self.folder} is not a usable cache of teacher outputs ({why}); use another folder"
            ) from None
        if not isinstance(there, dict):
            raise ConfigError(
                f"distill.cache {self.folder} is not a usable cache of teacher outputs ({META} holds a JSON value that "
                "is not an object); use another folder"
            )
        if there != meta:
            keys = there.keys() | meta.keys()
            differ = ", ".join(sorted(key for key in keys if there.get(key) != meta.get(key)))
            raise ConfigError(
                f"distill.cache {self.folder} belongs to another run: it differs in {differ}; use another folder"
            )


def fingerprint(model: Path) -> str:
    """A digest of a model's files: their names, sizes and contents."""
    digest = hashlib.sha256()
    files = [model] if model.is_file() else sorted(path for path in model.rglob("*") if path.is_file())
    for path in files:
        name = path.name if model.is_file() else path.relative_to(model).as_posix()
        with path.open("rb") as file:
            content = hashlib.file_digest(file, "sha256").hexdigest()
        digest.update(f"{name} {path.stat().st_size} {content}\n".encode())
    return digest.hexdigest()
