r"""MinHash signatures in bands (Broder 1997; Leskovec, Mining of Massive Datasets, section 3.4).

    h_k(x) = a_k · x + b_k mod 2^32        s_k = min over the shingles x of h_k(x)

Two sets of Jaccard similarity J share a band of r hashes with probability J^r, and at least one of b bands with 1 − (1
− J^r)^b: 99% at J = 0.7 for 25 bands of 5. Shingles are already uniform hashes, so multiplying their upper 32 bits by
an odd number suffices. It is computed in blocks of shingles, so that a text needs 1 MB in addition to its shingles
instead of a thousand bytes per shingle.

Band files have the format of datatrove's MinHash stages: for each document with shingles ``r`` hashes and the
document's number, 32 bits each, sorted. datatrove's bucket stage reads them and finds the same buckets, but it keeps
every file open, and its loop over documents takes ten times as long.
"""

import math
from bisect import bisect_left
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np

from colonnade.data.refine.storage import write_bytes

_BLOCK = 1024
_LARGEST = np.uint32((1 << 32) - 2)  # datatrove reads hashes below 2^32 − 1
_CHUNK_ROWS = 1 << 20
"""Approximate number of documents whose signatures are in memory at once."""
_SAMPLES = 1 << 16


class Signer:
    """Computes signatures of ``bands`` × ``rows`` hashes; the same in each process."""

    def __init__(self, bands: int, rows: int):
        self.bands, self.rows = bands, rows
        random = np.random.Generator(np.random.PCG64(1))
        self._a, self._b = random.integers(0, 1 << 32, (2, bands * rows, 1), np.uint32) | np.uint32(1)

    def sign(self, shingles: np.ndarray) -> np.ndarray:
        """The signature (bands, rows), uint32, of a non-empty set of shingles."""
        upper = (shingles >> np.uint64(32)).astype(np.uint32)
        lowest = np.full(self.bands * self.rows, _LARGEST)
        for start in range(0, len(upper), _BLOCK):
            hashed = self._a * upper[start : start + _BLOCK]
            hashed += self._b
            np.minimum(lowest, hashed.min(1), out=lowest)
        return lowest.reshape(self.bands, self.rows)


def write_bands(folder: Path, part: int, signatures: np.ndarray, numbers: np.ndarray) -> None:
    """Write ``signatures`` (documents, bands, rows) of the documents ``numbers`` of part ``part``, a file per band."""
    documents, bands, rows = signatures.shape
    for band in range(bands):
        table = np.empty((documents, rows + 1), "<u4")
        table[:, :rows], table[:, rows] = signatures[:, band], numbers
        table = table[np.lexsort(table.T[::-1])]
        write_bytes(folder / f"bucket_{band:03d}" / f"{part:05d}.minhash.sig", table.tobytes())


def sorted_rows(file: Path, dtype: str, columns: int, low: int, high: float) -> np.ndarray:
    """The rows of a sorted table whose first number is from ``low`` to below ``high``; the file is not kept open."""
    if not file.stat().st_size:
        return np.empty((0, columns), dtype)
    table = np.memmap(file, dtype, "r").reshape(-1, columns)
    start = bisect_left(table[:, 0], low)
    return np.array(table[start : bisect_left(table[:, 0], high, start)])


def band_buckets(folder: Path, rows: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(sizes, documents) of the buckets in the files of a band: documents with equal signatures, one bucket after
    the other. A document is part << 32 | number. Hashes are taken in ranges, so that memory does not grow with files.
    """
    files = sorted(folder.glob("*.minhash.sig"))
    total = sum(file.stat().st_size for file in files) // (4 * (rows + 1))
    sample = np.sort(np.concatenate([_first_hashes(file, rows, total) for file in files] or [np.empty(0, np.uint32)]))
    ranges = math.ceil(total / _CHUNK_ROWS)
    bounds: list[float] = [0, *sorted({int(sample[len(sample) * i // ranges]) for i in range(1, ranges)}), math.inf]
    for low, high in pairwise(bounds):
        tables = [sorted_rows(file, "<u4", rows + 1, int(low), high) for file in files]
        parts = np.repeat([int(file.name.split(".")[0]) for file in files], [len(table) for table in tables])
        table = np.concatenate([*tables, np.empty((0, rows + 1), "<u4")])
        documents = (parts.astype(np.int64) << 32) | table[:, rows]
        order = np.lexsort(table[:, :rows].T[::-1])  # stable: documents of a bucket ascend
        table, documents = table[order, :rows], documents[order]
        begins = np.flatnonzero(np.r_[True, (table[1:] != table[:-1]).any(1)]) if len(table) else np.empty(0, np.int64)
        sizes = np.diff(np.r_[begins, len(table)])
        yield sizes[sizes > 1], documents[np.repeat(sizes > 1, sizes)]


def _first_hashes(file: Path, rows: int, total: int) -> np.ndarray:
    """The first hash of some documents of ``file``, evenly spaced."""
    if not file.stat().st_size:
        return np.empty(0, np.uint32)
    return np.array(np.memmap(file, "<u4", "r").reshape(-1, rows + 1)[:: math.ceil(total / _SAMPLES), 0])
