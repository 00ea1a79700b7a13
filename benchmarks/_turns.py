"""Paired measurement: the things compared run in turns, so that a pair stands in the same moment of the machine."""

import os
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

T = TypeVar("T")


def turns(runs: Mapping[str, Callable[[int], T]], rounds: int, warm_up: int = 1) -> dict[str, list[T]]:
    """Call every run with the round's number, in one order and then in the other; what they returned, by name.

    The first ``warm_up`` rounds are not kept: they allocate, and make threads and kernels.
    """
    kept: dict[str, list[T]] = {name: [] for name in runs}
    for i in range(warm_up + rounds):
        for name in list(runs)[:: 1 if i % 2 else -1]:
            result = runs[name](i)
            if i >= warm_up:
                kept[name].append(result)
    return kept


def timed(run: Callable[[int], Any]) -> Callable[[int], float]:
    """``run`` as the seconds it took on the wall's clock."""

    def seconds(i: int) -> float:
        began = time.perf_counter()
        run(i)
        return time.perf_counter() - began

    return seconds


def load() -> float:
    """How many processes wanted a processor during the last minute, on average, to be noted with a result."""
    return round(os.getloadavg()[0], 2)
