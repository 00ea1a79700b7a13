"""Hierarchical (two-step) all-to-all: within each node, then between ranks of the same index on all nodes.

    rank (n, l): rows for all (n', l')   --intra-node-->   (n, l'): rows of all (n, ·) for all (·, l')
                                         --inter-node-->   (n', l'): rows of all (·, ·) for (n', l')

Every message between machines is then larger by the number of ranks of a machine, which suits slow links (2DH, Tutel,
arXiv 2206.03382, section 4.2; here for uneven sizes). The rows arrive in the same order as from one all-to-all, bit for
bit.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from colonnade.parallel.axis import Axis, PendingExchange

PendingRows = tuple[Tensor, PendingExchange | None]
"""Rows in flight."""


@dataclass(frozen=True)
class ExchangeSizes:
    """Row counts of one exchange; ranks are numbered (inter_node, intra_node)."""

    send: list[int]
    receive: list[int]
    intermediate: list[list[int]] | None = None
    """In two steps, [l][n']: rows received from neighbour l that go on to node n'."""


@dataclass(frozen=True)
class HierarchicalAllToAll:
    """An all-to-all of rows over ``all``, in one step, or in two where ``intra_node`` and ``inter_node`` are given."""

    all: Axis
    intra_node: Axis | None = None
    inter_node: Axis | None = None

    def exchange_counts(self, mine: Tensor) -> tuple[Tensor, Tensor | None]:
        """Exchange one row of counts with every rank.

        Returns the received rows and, in two steps, the intermediate ones, (l, n', …): from neighbour l for node n'.
        """
        if self.intra_node is None or self.inter_node is None:
            ones = [1] * self.all.size
            return self.all.exchange(mine, ones, ones), None
        N, L = self.inter_node.size, self.intra_node.size
        rest = mine.shape[1:]
        by_local_rank = mine.view(N, L, *rest).transpose(0, 1).flatten(0, 1)
        intermediate = self.intra_node.exchange(by_local_rank, [N] * L, [N] * L).view(L, N, *rest)
        theirs = self.inter_node.exchange(intermediate.transpose(0, 1).flatten(0, 1), [L] * N, [L] * N)
        return theirs, intermediate

    def intermediate_counts(self, *counts: list[int]) -> list[list[list[int]]]:
        """Flat intermediate counts in the form of :class:`ExchangeSizes`; an empty list in one step."""
        if self.inter_node is None:
            return []
        N = self.inter_node.size
        return [[rows[i : i + N] for i in range(0, len(rows), N)] for rows in counts]

    def begin(self, x: Tensor, sizes: ExchangeSizes) -> PendingRows:
        """Send the rows of ``x``, ordered by destination rank; :meth:`finish` returns what is received."""
        if sizes.intermediate is None or self.intra_node is None or self.inter_node is None:
            return self.all.begin_exchange(x, sizes.send, sizes.receive)
        intra_node, _ = self._step_counts(sizes)
        by_local_rank = _transpose_blocks(x, sizes.send, self.inter_node.size, self.intra_node.size)
        return self.intra_node.begin_exchange(by_local_rank, *intra_node)

    def finish(self, pending: PendingRows, sizes: ExchangeSizes) -> Tensor:
        """Return the received rows, ordered by source rank."""
        if sizes.intermediate is None or self.intra_node is None or self.inter_node is None:
            return self.all.finish_exchange(*pending)
        _, inter_node = self._step_counts(sizes)
        rows = self.intra_node.finish_exchange(*pending)
        blocks = [n for row in sizes.intermediate for n in row]
        return self.inter_node.exchange(
            _transpose_blocks(rows, blocks, self.intra_node.size, self.inter_node.size), *inter_node
        )

    def begin_return(self, y: Tensor, sizes: ExchangeSizes) -> PendingRows:
        """Send rows back where :meth:`finish` had them from; ``sizes`` are those of the way there."""
        if sizes.intermediate is None or self.intra_node is None or self.inter_node is None:
            return self.all.begin_exchange(y, sizes.receive, sizes.send)
        _, (sent, received) = self._step_counts(sizes)
        return self.inter_node.begin_exchange(y, received, sent)

    def finish_return(self, pending: PendingRows, sizes: ExchangeSizes) -> Tensor:
        """Return the rows that :meth:`begin` sent, in their order."""
        if sizes.intermediate is None or self.intra_node is None or self.inter_node is None:
            return self.all.finish_exchange(*pending)
        N, L = self.inter_node.size, self.intra_node.size
        (sent, received), _ = self._step_counts(sizes)
        rows = self.inter_node.finish_exchange(*pending)
        by_local_rank = _transpose_blocks(rows, [sizes.intermediate[i][n] for n in range(N) for i in range(L)], N, L)
        back = self.intra_node.exchange(by_local_rank, received, sent)
        return _transpose_blocks(back, [sizes.send[n * L + i] for i in range(L) for n in range(N)], L, N)

    def _step_counts(self, sizes: ExchangeSizes) -> tuple[tuple[list[int], list[int]], tuple[list[int], list[int]]]:
        """(sent, received) rows of the step among neighbours, and of the step between nodes."""
        assert sizes.intermediate is not None
        assert self.intra_node is not None
        assert self.inter_node is not None
        N, L = self.inter_node.size, self.intra_node.size
        intra_node = [sum(sizes.send[i::L]) for i in range(L)], [sum(row) for row in sizes.intermediate]
        inter_node = [sum(row[n] for row in sizes.intermediate) for n in range(N)]
        return intra_node, (inter_node, [sum(sizes.receive[n * L : (n + 1) * L]) for n in range(N)])


def _transpose_blocks(x: Tensor, sizes: Sequence[int], rows: int, columns: int) -> Tensor:
    """Reorder the blocks of ``x``, of ``sizes`` rows each, from (rows, columns) to (columns, rows) order."""
    blocks = x.split(list(sizes))
    return torch.cat([blocks[r * columns + c] for c in range(columns) for r in range(rows)])
