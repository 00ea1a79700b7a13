"""Selects which of several similar documents to keep.

Documents are visited by (rank of their source, hash of their text). A document is removed if its similarity to a kept
document exceeds the threshold, and kept otherwise. So no two kept documents are similar, and each removed one has a
kept twin. Connected components, the usual rule, would also remove C where A is similar to B and B to C but C not to A.

Only documents that share a bucket are compared, and each comparison is exact. The components of the bucket graph are
independent, so they are decided in parallel.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from colonnade.data.refine.shingles import jaccard

BucketTable = tuple[np.ndarray, np.ndarray]
"""Sizes of buckets, and the documents of each bucket, one bucket after the other."""


class NearCopy(NamedTuple):
    """A removed document."""

    document: int
    twin: int
    """The kept document that it resembles."""
    similarity: float


def label_components(labels: np.ndarray, chunks: Callable[[], Iterable[BucketTable]]) -> None:
    """Set the label of each document to the lowest document of its connected component.

    ``labels`` is ``arange(documents)`` and may be a file in memory; ``chunks()`` reads the buckets again for each
    round. A round gives every document of a bucket the lowest label in it, and then each label its own label, which
    halves paths, so that rounds grow with the logarithm of the longest path.
    """
    changed = True
    while changed:
        changed = False
        for sizes, documents in chunks():
            if not len(sizes):
                continue
            own = labels[documents]
            lowest = np.repeat(np.minimum.reduceat(own, np.cumsum(sizes) - sizes), sizes)
            differ = own != lowest
            changed |= bool(differ.any())
            np.minimum.at(labels, documents[differ], lowest[differ])
            np.minimum.at(labels, own[differ], lowest[differ])
        for start in range(0, len(labels), 1 << 20):
            labels[start : start + (1 << 20)] = labels[labels[start : start + (1 << 20)]]


def split_buckets(sizes: np.ndarray, documents: np.ndarray) -> Iterator[np.ndarray]:
    """The documents of each bucket, without duplicate buckets."""
    ends = np.cumsum(sizes)
    whole = {documents[end - size : end].tobytes() for end, size in zip(ends, sizes, strict=True)}
    return (np.frombuffer(each, documents.dtype) for each in sorted(whole))


def near_copies(
    buckets: Iterable[Iterable[int]],
    shingles_of: Callable[[int], np.ndarray],
    threshold: float,
    order: Callable[[int], Any] = lambda document: document,
) -> list[NearCopy]:
    """The documents of ``buckets`` to remove, visited in the order of the key ``order``."""
    neighbours: dict[int, list[int]] = {}
    lists = [[int(document) for document in bucket] for bucket in buckets]
    for number, bucket in enumerate(lists):
        for document in bucket:
            neighbours.setdefault(document, []).append(number)
    kept_in: list[list[int]] = [[] for _ in lists]
    leaving: list[NearCopy] = []
    for document in sorted(neighbours, key=order):
        candidates = {other for number in neighbours[document] for other in kept_in[number]}
        mine = shingles_of(document)
        for other in sorted(candidates, key=order):
            theirs = shingles_of(other)
            # |A ∩ B| / |A ∪ B| is at most the ratio of the sizes.
            if min(len(mine), len(theirs)) <= threshold * max(len(mine), len(theirs)):
                continue
            if (similarity := jaccard(mine, theirs)) > threshold:
                leaving.append(NearCopy(document, other, similarity))
                break
        else:
            for number in neighbours[document]:
                kept_in[number].append(document)
    return leaving
