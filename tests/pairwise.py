"""Few cases that still pair every two values of different parameters, in the place of a full product."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any


def pairwise(*parameters: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
    """Rows of one value per parameter, of which there are at least two; every two values of two parameters are together
    in at least one row.

    Greedy and deterministic: each row is the first one, in the product's order, with the most pairs not seen before.
    """
    assert len(parameters) > 1 and all(parameters), "pairwise needs two parameters or more, each with values"
    rows = list(itertools.product(*(range(len(values)) for values in parameters)))
    pairs = [set(itertools.combinations(enumerate(row), 2)) for row in rows]
    missing = set().union(*pairs)
    while missing:
        best = max(range(len(rows)), key=lambda i: len(pairs[i] & missing))
        missing -= pairs[best]
        yield tuple(values[i] for values, i in zip(parameters, rows[best], strict=True))
