"""Which row of a step of fixed shape is whose (:mod:`~colonnade.serve.cuda_graph_runner`).

A request keeps its row for as long as it decodes, and who ends leaves a row that pads the step until the next request
comes: what was planned for the rows then holds from step to step, while requests come and go. Only where fewer rows are
a step of a smaller size are the gaps filled, from the end.
"""

import heapq
from typing import Protocol


def padded(requests: int, most: int) -> int:
    """The size of a step of so many requests: less than a quarter more, four sizes a doubling; at most ``most``."""
    step = 1 << max(0, requests.bit_length() - 3)
    return min(most, -(-requests // step) * step)


class Placed(Protocol):
    """Who has a row."""

    place: int
    """Its number; negative for none."""


class BatchSlots:
    """Rows of steps of at most so many."""

    def __init__(self, most: int):
        self.most = most
        self._rows: list[Placed | None] = []
        self._gaps: list[int] = []
        """A heap."""

    @property
    def rows(self) -> list[Placed | None]:
        """Who has which; None for a gap."""
        return list(self._rows)

    def join(self, it: Placed) -> None:
        """Give ``it`` the lowest row that is free."""
        if self._gaps:
            it.place = heapq.heappop(self._gaps)
            self._rows[it.place] = it
        else:
            it.place = len(self._rows)
            self._rows.append(it)

    def leave(self, it: Placed) -> None:
        """Take its row from ``it``, if it has one."""
        if it.place < 0:
            return
        self._rows[it.place] = None
        heapq.heappush(self._gaps, it.place)
        it.place = -1
        held = len(self._rows) - len(self._gaps)
        if padded(held, self.most) < padded(len(self._rows), self.most):
            self._close()

    def _close(self) -> None:
        """Fill the gaps with those of the highest rows."""
        there = [each for each in self._rows if each is not None]
        gaps = [place for place in sorted(self._gaps) if place < len(there)]
        movers = [each for each in there if each.place >= len(there)]
        for place, each in zip(gaps, movers, strict=True):
            each.place = place
        there.sort(key=lambda each: each.place)
        self._rows, self._gaps = list(there), []
