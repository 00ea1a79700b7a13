"""All-gather and reduce-scatter by copy engines, which leave the multiprocessors to the products beside them.

Each rank has a buffer that the others can read and write (torch's symmetric memory, over NVLink). A copy between two of
them is a cudaMemcpy, which a GPU's copy engines carry out; what takes multiprocessors is a barrier of one small block
and, after a scatter, the sum. Two slots are used in turn, so that one barrier an operation is enough: whoever has
passed the barrier of operation i knows that nobody is still in the slot of operation i - 1.

    gather        x into the own slot; barrier; the others' x out of theirs
    scatter_sum   part r into slot of rank r; barrier; sum of the own slot        (in float32, rounded once)

All of it runs on the stream that is current, and every rank must ask for the same operations in the same order.
:class:`Plain` is the same by plain collectives: over gloo on a CPU, where the tests run, or NCCL.
"""

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed import _symmetric_memory as symmetric

from _parallelized import allow_symmetric_memory
from colonnade.parallel import collectives
from colonnade.parallel.axis import Axis


class Mover(Protocol):
    """Moves rows between the ranks of an axis; parts are equal."""

    axis: Axis
    stream: torch.cuda.Stream | None
    """On which all copies are made; None where there are no streams."""

    def begin(self) -> None:
        """A step begins: nobody is in any slot."""
        ...

    def gather(self, x_tD: Tensor) -> Tensor:
        """x_TD."""
        ...

    def scatter_sum(self, y_TD: Tensor) -> Tensor:
        """This rank's part of the sum over ranks."""
        ...

    def arriving(self, x_tD: Tensor, x_TD: Tensor) -> Iterator[int]:
        """Fill ``x_TD`` and tell whose rows may be used from now on: first the own, then the others' as they come."""
        ...

    def push(self, r: int, part_tD: Tensor) -> None:
        """Send rank ``r`` its part of a sum; own last."""
        ...

    def pushed(self) -> Tensor:
        """The sum of what was sent here, which may be used after :meth:`join`."""
        ...

    def join(self, x: Tensor) -> Tensor:
        """``x``, when what was begun on :attr:`stream` before is over."""
        ...

    @property
    def order(self) -> list[int]:
        """Ranks in the order of the pushes."""
        ...


class Plain:
    """By collectives that are over when the call is."""

    def __init__(self, axis: Axis):
        self.axis = axis
        self.stream: torch.cuda.Stream | None = None
        self._parts: dict[int, Tensor] = {}

    def begin(self) -> None:
        """Nothing to do."""

    def gather(self, x_tD: Tensor) -> Tensor:
        """x_TD."""
        return collectives.all_gather(x_tD, self.axis.size, self.axis.group)

    def scatter_sum(self, y_TD: Tensor) -> Tensor:
        """This rank's part of the sum."""
        return collectives.reduce_scatter(y_TD, self.axis.size, self.axis.group)

    def arriving(self, x_tD: Tensor, x_TD: Tensor) -> Iterator[int]:
        """All at once, told in the order in which copies would come; what has not come yet is not a number."""
        came = self.gather(x_tD).chunk(self.axis.size)
        x_TD.fill_(torch.nan)
        for r in [self.axis.rank, *self.order[:-1]]:
            x_TD.chunk(self.axis.size)[r].copy_(came[r])
            yield r

    def push(self, r: int, part_tD: Tensor) -> None:
        """Keep it."""
        self._parts[r] = part_tD

    def pushed(self) -> Tensor:
        """The sum, of parts in the ranks' order."""
        y_TD = torch.cat([self._parts.pop(r) for r in range(self.axis.size)])
        return self.scatter_sum(y_TD)

    def join(self, x: Tensor) -> Tensor:
        """There already."""
        return x

    @property
    def order(self) -> list[int]:
        """The next rank first, the own last."""
        return [(self.axis.rank + step) % self.axis.size for step in range(1, self.axis.size + 1)]


class CopyEngines(Plain):
    """Over symmetric memory."""

    def __init__(self, axis: Axis, most: int, dtype: torch.dtype, device: torch.device):
        """``most`` numbers are the largest whole that is gathered or scattered."""
        super().__init__(axis)
        self.stream = torch.cuda.Stream(device, priority=-1)
        allow_symmetric_memory(axis.group)
        self._buffer = symmetric.empty(2 * most, dtype=dtype, device=device)
        self._handle = symmetric.rendezvous(self._buffer, axis.group)
        self._most, self._turn = most, 0

    def begin(self) -> None:
        """Both slots are free, as after an even number of operations: a replayed graph begins as it was recorded."""
        assert self.stream is not None
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            self._handle.barrier(channel=0)
        self._turn = 0

    def _next(self) -> None:
        self._turn = 1 - self._turn

    def _at(self, r: int, *shape: int) -> Tensor:
        """Rank r's slot of this operation."""
        return self._handle.get_buffer(r, shape, self._buffer.dtype, storage_offset=self._turn * self._most)

    def gather(self, x_tD: Tensor) -> Tensor:
        """x_TD."""
        self._next()
        x_tD = x_tD.contiguous()
        self._at(self.axis.rank, *x_tD.shape).copy_(x_tD)
        self._handle.barrier(channel=0)
        x_TD = x_tD.new_empty(len(x_tD) * self.axis.size, x_tD.shape[1])
        parts = x_TD.chunk(self.axis.size)
        for r in self.order[:-1]:
            parts[r].copy_(self._at(r, *x_tD.shape))
        parts[self.axis.rank].copy_(x_tD)
        return x_TD

    def scatter_sum(self, y_TD: Tensor) -> Tensor:
        """This rank's part of the sum."""
        self._next()
        parts, size = y_TD.contiguous().chunk(self.axis.size), self.axis.size
        for r in self.order:
            self._at(r, size, *parts[r].shape)[self.axis.rank].copy_(parts[r])
        self._handle.barrier(channel=0)
        return self._at(self.axis.rank, size, *parts[0].shape).sum(0)

    def arriving(self, x_tD: Tensor, x_TD: Tensor) -> Iterator[int]:
        """Copies go on beside what the caller does with the rows that are there."""
        self._next()
        now, stream = torch.cuda.current_stream(), self.stream
        assert stream is not None
        x_tD = x_tD.contiguous()
        parts, came = x_TD.chunk(self.axis.size), []
        stream.wait_stream(now)
        with torch.cuda.stream(stream):
            self._at(self.axis.rank, *x_tD.shape).copy_(x_tD)
            self._handle.barrier(channel=0)
            for r in self.order[:-1]:
                parts[r].copy_(self._at(r, *x_tD.shape))
                came.append((r, stream.record_event()))
        for x in (x_tD, x_TD):
            x.record_stream(stream)
        parts[self.axis.rank].copy_(x_tD)
        yield self.axis.rank
        for r, event in came:
            now.wait_event(event)
            yield r

    def push(self, r: int, part_tD: Tensor) -> None:
        """Beside what the caller does next."""
        stream = self.stream
        assert stream is not None
        if r == self.order[0]:
            self._next()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._at(r, self.axis.size, *part_tD.shape)[self.axis.rank].copy_(part_tD)
        part_tD.record_stream(stream)
        self._shape = part_tD.shape

    def pushed(self) -> Tensor:
        """The barrier and the sum, beside what the caller does next."""
        assert self.stream is not None
        with torch.cuda.stream(self.stream):
            self._handle.barrier(channel=0)
            return self._at(self.axis.rank, self.axis.size, *self._shape).sum(0)

    def join(self, x: Tensor) -> Tensor:
        """Made on the side, used here."""
        assert self.stream is not None
        now = torch.cuda.current_stream()
        now.wait_stream(self.stream)
        x.record_stream(now)
        return x


def mover_of(axis: Axis, most: int, dtype: torch.dtype, device: torch.device) -> Mover:
    """By copy engines on GPUs, by collectives elsewhere."""
    return CopyEngines(axis, most, dtype, device) if device.type == "cuda" else Plain(axis)
