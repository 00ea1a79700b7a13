"""Rows moved by a GPU's copy engines, which leave its multiprocessors to the products beside them.

Each rank has a room that the others can read and write. A copy between two of them is a cudaMemcpy, which the copy
engines carry out; what takes multiprocessors is a barrier of one small block and, behind a sum, its additions. A room
has two slots, used in turn, so that one barrier an operation is enough: whoever has passed the barrier of operation i
knows that nobody is still in the slot of operation i - 1.

    arriving    x into the own slot; barrier; the others' x out of theirs, one after another
    push        part r into the slot of rank r      pushed: barrier; sum of the own slot, in float32, rounded once

All of it runs on a stream of its own. NCCL beside a product costs more than it hides: its kernels take the
multiprocessors that the product needs (docs/log.md, "Tensor parallelism on four H200s").
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from colonnade.errors import PlanError
from colonnade.parallel.axis import Axis
from colonnade.parallel.overlapped_matmul import Mover, Plain, order
from colonnade.parallel.symmetric_memory import reachable, shared


class Room:
    """Two slots on each rank, of so many bytes each."""

    def __init__(self, axis: Axis, slot_bytes: int, device: torch.device):
        self.slot_bytes, self._turn = slot_bytes, 0
        self._memory, self._handle = shared(axis, 2 * slot_bytes, device)

    def begin(self) -> None:
        """Both slots are free, as after an even number of operations: a replayed graph begins as it was recorded."""
        self.barrier()
        self._turn = 0

    def next(self) -> None:
        """Another operation, in the other slot."""
        self._turn = 1 - self._turn

    def barrier(self) -> None:
        """Of all ranks, on the current stream."""
        self._handle.barrier(channel=0)

    def at(self, r: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Rank ``r``'s slot of this operation."""
        return self._handle.get_buffer(r, shape, dtype, storage_offset=self._turn * self.slot_bytes // dtype.itemsize)


class CopyEngines:
    """A :class:`~colonnade.parallel.overlapped_matmul.Mover` over GPUs of one machine."""

    def __init__(self, axis: Axis, device: torch.device):
        self.axis = axis
        self._stream = torch.cuda.Stream(device, priority=-1)
        self._device = device
        self._rooms: list[Room] = []
        """Never given back: a recorded graph may use any of them."""
        self._now: Room | None = None
        self._sent: list[Tensor] = []
        """Parts on their way: memory of theirs must not be given out again before they have left."""

    def begin(self) -> None:
        """Nobody is in any room."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for room in self._rooms:
                room.begin()

    def _enter(self, part_tD: Tensor) -> Room:
        """The room of an operation on parts like this one, and its next slot."""
        needed = part_tD.nbytes * self.axis.size
        fitting = [room for room in self._rooms if room.slot_bytes >= needed]
        if not fitting:
            fitting = [self._room(-(-needed // 256) * 256)]
            self._rooms += fitting
        self._now = min(fitting, key=lambda room: room.slot_bytes)
        self._now.next()
        return self._now

    def _room(self, slot_bytes: int) -> Room:
        return Room(self.axis, slot_bytes, self._device)

    def arriving(self, x_tD: Tensor, x_TD: Tensor) -> Iterator[int]:
        """Copies go on beside what the caller does with the rows that are there."""
        now, room = torch.cuda.current_stream(), self._enter(x_tD)
        parts, came = x_TD.chunk(self.axis.size), []
        self._stream.wait_stream(now)
        with torch.cuda.stream(self._stream):
            room.at(self.axis.rank, x_tD.shape, x_tD.dtype).copy_(x_tD)
            room.barrier()
            for r in order(self.axis)[:-1]:
                parts[r].copy_(room.at(r, x_tD.shape, x_tD.dtype))
                came.append((r, self._stream.record_event()))
        parts[self.axis.rank].copy_(x_tD)
        yield self.axis.rank
        for r, event in came:
            now.wait_event(event)
            yield r

    def push(self, r: int, part_tD: Tensor) -> None:
        """Beside what the caller does next."""
        ranks = order(self.axis)
        room = self._enter(part_tD) if r == ranks[0] else self._now
        assert room is not None, f"parts are pushed in the order {ranks}"
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            room.at(r, (self.axis.size, *part_tD.shape), part_tD.dtype)[self.axis.rank].copy_(part_tD)
        self._sent.append(part_tD)

    def pushed(self) -> Tensor:
        """The barrier and the sum, beside what the caller does next."""
        assert self._now is not None, "nothing was pushed"
        part_tD = self._sent[-1]
        y_tD = torch.empty_like(part_tD)
        with torch.cuda.stream(self._stream):
            self._now.barrier()
            theirs = self._now.at(self.axis.rank, (self.axis.size, *part_tD.shape), part_tD.dtype)
            return torch.sum(theirs, 0, out=y_tD)

    def join(self, x: Tensor) -> Tensor:
        """Made on the side, used here."""
        torch.cuda.current_stream().wait_stream(self._stream)
        self._sent.clear()
        return x


def mover_of(axis: Axis, device: torch.device) -> Mover:
    """By copy engines on GPUs, by collectives elsewhere.

    Raises :class:`PlanError` on GPUs that do not reach each other's memory.
    """
    if device.type != "cuda":
        return Plain(axis)
    if not reachable(axis, device):
        raise PlanError(
            "tp_overlap copies rows between GPUs of one machine that reach each other's memory, and the "
            f"tp={axis.size} ranks here do not; set --plan.tp_overlap False"
        )
    return CopyEngines(axis, device)
