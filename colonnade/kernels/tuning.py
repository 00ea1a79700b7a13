"""Tuning tables: measured tile sizes, in JSON files next to the kernels that use them.

A table is read once and never changed while a model runs; benchmarks measure and rewrite it.
"""

import functools
import json
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


@functools.cache
def load(module_file: str, name: str) -> dict[str, Any]:
    """The contents of the table ``name`` in the folder of ``module_file`` (a module's ``__file__``)."""
    return json.loads(Path(module_file).with_name(name).read_text(encoding="utf-8"))


def nearest(entries: Iterable[T], sizes: Sequence[int], sizes_of: Callable[[T], Sequence[int]]) -> T:
    """The entry whose sizes are nearest by ratio, that is of least Σ |log2(a / b)|; the first of equals."""

    def distance(entry: T) -> float:
        return sum(abs(math.log2(max(a, 1) / max(b, 1))) for a, b in zip(sizes_of(entry), sizes, strict=True))

    return min(entries, key=distance)


def first_fitting(entries: Iterable[tuple[int | None, T]], value: float) -> T:
    """The first entry whose upper bound is at least ``value``; a bound of None fits everything."""
    return next(entry for bound, entry in entries if bound is None or value <= bound)
