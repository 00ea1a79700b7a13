"""Which of several similar documents stay.

Documents are visited by (rank of their source, hash of their text). One leaves if its similarity to a document that
stays is over the threshold, and stays otherwise. So no two documents that stay are similar, and each one that leaves
has a twin that stays. Connected components, the usual rule, would also remove C where A is similar to B and B to C but
C not to A.

Only documents that share a bucket are compared, and each comparison is exact. The components of the bucket graph are
independent, so they may be decided in parallel.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from colonnade.data.refine.shingles import jaccard


class NearCopy(NamedTuple):
    """A document that leaves."""

    document: int
    twin: int
    """The document that stays."""
    similarity: float


def components(buckets: Sequence[np.ndarray]) -> list[list[int]]:
    """Numbers of the buckets of each connected component; buckets with a document in common are connected."""
    parent: dict[int, int] = {}

    def root(document: int) -> int:
        top = document
        while (above := parent.setdefault(top, top)) != top:
            top = above
        while parent[document] != top:
            parent[document], document = top, parent[document]
        return top

    for bucket in buckets:
        first = root(int(bucket[0]))
        for document in bucket[1:]:
            other = root(int(document))
            first, other = min(first, other), max(first, other)
            parent[other] = first
    groups: dict[int, list[int]] = {}
    for number, bucket in enumerate(buckets):
        groups.setdefault(root(int(bucket[0])), []).append(number)
    return [groups[top] for top in sorted(groups)]


def near_copies(
    buckets: Iterable[Iterable[int]],
    shingles_of: Callable[[int], np.ndarray],
    threshold: float,
    order: Callable[[int], Any] = lambda document: document,
) -> list[NearCopy]:
    """The documents of ``buckets`` that leave, visited in the order of the key ``order``."""
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
