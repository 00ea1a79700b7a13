"""Row assignment and padded size of a decode batch."""

import heapq

from colonnade.serve.request import Request


def padded_batch_size(requests: int, most: int) -> int:
    """Round a batch size up to one of four sizes per power of two, at most ``most``.

    Padding adds less than 25%. A CUDA graph is captured for each size (:mod:`colonnade.serve.cuda_graph_runner`).
    """
    step = 1 << max(0, requests.bit_length() - 3)
    return min(most, -(-requests // step) * step)


class BatchRows:
    """Assigns rows of a padded decode batch to at most ``most`` requests.

    A request keeps its row while it decodes, and the row of a finished one is padding until the next request takes it:
    split plans made for the rows then stay valid while requests come and go. Rows are compacted only if that allows a
    smaller batch.
    """

    def __init__(self, most: int):
        self.most = most
        self._rows: list[Request | None] = []
        self._free: list[int] = []
        """Free rows, a heap."""

    @property
    def rows(self) -> list[Request | None]:
        """The request of each row; None for a free row."""
        return list(self._rows)

    def add(self, request: Request) -> None:
        """Assign ``request`` the lowest free row."""
        if self._free:
            request.batch_row = heapq.heappop(self._free)
            self._rows[request.batch_row] = request
        else:
            request.batch_row = len(self._rows)
            self._rows.append(request)

    def remove(self, request: Request) -> None:
        """Free the row of ``request``, if it has one."""
        if request.batch_row < 0:
            return
        self._rows[request.batch_row] = None
        heapq.heappush(self._free, request.batch_row)
        request.batch_row = -1
        used = len(self._rows) - len(self._free)
        if padded_batch_size(used, self.most) < padded_batch_size(len(self._rows), self.most):
            self._compact()

    def _compact(self) -> None:
        """Move the requests of the highest rows into the free ones."""
        requests = [request for request in self._rows if request is not None]
        free = [row for row in sorted(self._free) if row < len(requests)]
        for row, request in zip(free, [r for r in requests if r.batch_row >= len(requests)], strict=True):
            request.batch_row = row
        requests.sort(key=lambda request: request.batch_row)
        self._rows[:], self._free = requests, []
