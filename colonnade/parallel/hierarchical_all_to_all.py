"""An all-to-all in two steps: among neighbours, then among those of the same place in each neighbourhood.

    rank (n, l): rows for all (n', l')   --near-->   (n, l'): rows of all (n, ·) for all (·, l')
                                         --far--->   (n', l'): rows of all (·, ·) for (n', l')

Across machines every message is then as many times larger as a machine has ranks, which is what slow links want (2DH,
Tutel, arXiv 2206.03382, section 4.2; here for uneven sizes). The rows arrive in the same order as from one all-to-all,
bit for bit.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from colonnade.parallel.axis import Axis, Journey

Begun = tuple[Tensor, Journey | None]
"""Rows under way."""


@dataclass(frozen=True)
class Sizes:
    """How many rows go where in an exchange; ranks are numbered (far, near)."""

    send: list[int]
    receive: list[int]
    between: list[list[int]] | None = None
    """[l][n']: in two steps, the rows that neighbour l hands over for neighbourhood n' and this rank's place in it."""


@dataclass(frozen=True)
class HierarchicalAllToAll:
    """Ranks that exchange rows: all at once, or in two steps where ``near`` is given."""

    all: Axis
    near: Axis | None = None
    far: Axis | None = None

    def counts(self, mine: Tensor) -> tuple[Tensor, Tensor | None]:
        """What every rank says to this one, row by row as ``mine`` says it to them; and in two steps what lies between:
        [l, n'], from neighbour l for neighbourhood n'.
        """
        if self.near is None or self.far is None:
            ones = [1] * self.all.size
            return self.all.exchange(mine, ones, ones), None
        N, L = self.far.size, self.near.size
        rest = mine.shape[1:]
        by_near = mine.view(N, L, *rest).transpose(0, 1).flatten(0, 1)
        between = self.near.exchange(by_near, [N] * L, [N] * L).view(L, N, *rest)
        theirs = self.far.exchange(between.transpose(0, 1).flatten(0, 1), [L] * N, [L] * N)
        return theirs, between

    def between(self, *counts: list[int]) -> list[list[list[int]]]:
        """The counts of what lies between as :class:`Sizes` takes them: nothing, where nothing does."""
        if self.far is None:
            return []
        N = self.far.size
        return [[rows[i : i + N] for i in range(0, len(rows), N)] for rows in counts]

    def begin(self, x: Tensor, sizes: Sizes) -> Begun:
        """Send the rows of ``x``, those for rank 0 first; :meth:`finish` has what comes."""
        if sizes.between is None or self.near is None or self.far is None:
            return self.all.begin_exchange(x, sizes.send, sizes.receive)
        N, L = self.far.size, self.near.size
        by_near = _turned(x, sizes.send, N, L)
        sent = [sum(sizes.send[n * L + place] for n in range(N)) for place in range(L)]
        return self.near.begin_exchange(by_near, sent, [sum(row) for row in sizes.between])

    def finish(self, begun: Begun, sizes: Sizes) -> Tensor:
        """The rows from all ranks, those of rank 0 first."""
        if sizes.between is None or self.near is None or self.far is None:
            return self.all.finish_exchange(*begun)
        N, L = self.far.size, self.near.size
        came = self.near.finish_exchange(*begun)
        by_far = _turned(came, [n for row in sizes.between for n in row], L, N)
        sent = [sum(row[n] for row in sizes.between) for n in range(N)]
        return self.far.exchange(by_far, sent, [sum(sizes.receive[n * L : (n + 1) * L]) for n in range(N)])

    def begin_back(self, y: Tensor, sizes: Sizes) -> Begun:
        """Send rows back to where :meth:`finish` had them from; ``sizes`` are those of the way there."""
        if sizes.between is None or self.near is None or self.far is None:
            return self.all.begin_exchange(y, sizes.receive, sizes.send)
        N, L = self.far.size, self.near.size
        received = [sum(sizes.receive[n * L : (n + 1) * L]) for n in range(N)]
        return self.far.begin_exchange(y, received, [sum(row[n] for row in sizes.between) for n in range(N)])

    def finish_back(self, begun: Begun, sizes: Sizes) -> Tensor:
        """The rows that were sent, in their order."""
        if sizes.between is None or self.near is None or self.far is None:
            return self.all.finish_exchange(*begun)
        N, L = self.far.size, self.near.size
        came = self.far.finish_exchange(*begun)
        by_near = _turned(came, [sizes.between[place][n] for n in range(N) for place in range(L)], N, L)
        sent = [sum(sizes.send[n * L + place] for n in range(N)) for place in range(L)]
        back = self.near.exchange(by_near, [sum(row) for row in sizes.between], sent)
        return _turned(back, [sizes.send[n * L + place] for place in range(L) for n in range(N)], L, N)


def _turned(x: Tensor, sizes: Sequence[int], rows: int, columns: int) -> Tensor:
    """Blocks of so many rows of ``x`` that stand (rows, columns), put (columns, rows)."""
    blocks = x.split(list(sizes))
    return torch.cat([blocks[r * columns + c] for c in range(columns) for r in range(rows)])
