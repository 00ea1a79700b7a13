"""MinHash signatures in bands (Broder 1997; Leskovec, Mining of Massive Datasets, section 3.4).

    h_k(x) = (a_k · x + b_k mod 2^64) >> 32        s_k = min over the shingles x of h_k(x)

Two sets of Jaccard similarity J share a band of r hashes with probability J^r, and at least one of b bands with
1 − (1 − J^r)^b: 99% at J = 0.7 for 25 bands of 5. Shingles are already uniform hashes, so multiply and shift suffices.
It is computed in blocks of shingles, so that a text needs 2 MB beside its shingles and not a thousand bytes a shingle.

Band files have the format of datatrove's MinHash stages, so that its bucket stage reads them: for each document with
shingles ``r`` hashes and the document's number, 32 bits each, sorted.
"""

from collections.abc import Iterable
from pathlib import Path

import numpy as np

_BLOCK = 2048
_LARGEST = np.uint64((1 << 32) - 2)  # datatrove reads hashes below 2^32 − 1


class Signer:
    """Computes signatures of ``bands`` × ``rows`` hashes; the same in each process."""

    def __init__(self, bands: int, rows: int):
        self.bands, self.rows = bands, rows
        random = np.random.Generator(np.random.PCG64(1))
        numbers = random.integers(0, 1 << 63, (2, bands * rows, 1), np.uint64)
        self._a, self._b = (numbers << np.uint64(1)) | np.uint64(1)

    def sign(self, shingles: np.ndarray) -> np.ndarray:
        """The signature (bands, rows), uint32, of a non-empty set of shingles."""
        lowest = np.full(self.bands * self.rows, _LARGEST)
        for start in range(0, len(shingles), _BLOCK):
            hashed = self._a * shingles[start : start + _BLOCK]
            hashed += self._b
            np.minimum(lowest, hashed.min(1) >> np.uint64(32), out=lowest)
        return lowest.astype(np.uint32).reshape(self.bands, self.rows)


def write_bands(folder: Path, part: int, signatures: np.ndarray, numbers: np.ndarray) -> None:
    """Write ``signatures`` (documents, bands, rows) of the documents ``numbers`` of part ``part``, a file per band."""
    documents, bands, rows = signatures.shape
    for band in range(bands):
        table = np.empty((documents, rows + 1), "<u4")
        table[:, :rows], table[:, rows] = signatures[:, band], numbers
        table = table[np.lexsort(table.T[::-1])]
        place = folder / f"bucket_{band:03d}"
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{part:05d}.minhash.sig").write_bytes(table.tobytes())


def read_buckets(files: Iterable[Path]) -> list[np.ndarray]:
    """The buckets in datatrove's ``.dups`` files: for each the (part, number) of its documents, (n, 2).

    A file has a pair for each two neighbours of a bucket, so a bucket of n documents is a run of n − 1 linked pairs.
    """
    buckets: list[np.ndarray] = []
    for file in files:
        pairs = np.fromfile(file, "<u4").reshape(-1, 2, 2).astype(np.int64)
        if not len(pairs):
            continue
        linked = (pairs[1:, 0] == pairs[:-1, 1]).all(1)
        runs = np.split(pairs, np.flatnonzero(~linked) + 1)
        buckets += [np.concatenate([run[:1, 0], run[:, 1]]) for run in runs]
    return buckets
