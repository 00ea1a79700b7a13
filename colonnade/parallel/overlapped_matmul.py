"""Matrix products overlapped with the all-gather or reduce-scatter of sequence parallelism.

    all_gather_matmul        x_tD, W_0, W_1, …    gather(x) W_iᵀ          the first products of a tensor-parallel region
    matmul_reduce_scatter    x_Tz, W_Dz           scatter_sum(x Wᵀ)       its last one

Sequence parallelism gathers rows before a region and scatters a sum after it (Korthikanti et al., arXiv 2205.05198,
section 4.2.2). Done whole, each collective delays a product. Decomposed into the ranks' chunks, only its first chunk
does (Wang et al., "Overlap Communication with Dependent Computation via Decomposition", ASPLOS 2023): the local rows
are multiplied while the next rank's arrive, and partial sums are sent off rank by rank as they are computed. Each
function is the other's backward; the weight gradient needs no communication and fills the gaps.

A :class:`RowTransfer` moves the rows. :class:`CollectiveTransfer` uses blocking collectives: it is the reference, and
what CPUs use. :class:`CopyEngineTransfer` uses the copy engines of GPUs on one machine, which leaves all
multiprocessors to the products: NCCL's kernels cost more than they hide (docs/log.md, "Tensor parallelism on four
H200s"). Each rank has a symmetric buffer that its peers can read and write; a copy between two of them is a cudaMemcpy,
and only a barrier of one small block and the additions of a sum take multiprocessors. A buffer has two slots, used
alternately, so one barrier per operation is enough: a rank that has passed the barrier of operation i can rely on every
peer being done with the slot of operation i - 1.

    gather_chunks     x into the own slot; barrier; copy the peers' x out of their slots, one after another
    send_partial      part r into the slot of rank r
    receive_sum       barrier; sum the own slot in float32, rounded once
"""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import Function

from colonnade.errors import PlanError
from colonnade.parallel import collectives
from colonnade.parallel.axis import Axis
from colonnade.parallel.symmetric_memory import allocate_symmetric, peers_reachable


class RowTransfer(Protocol):
    """Moves equal chunks of rows between the ranks of an axis; all ranks call the same in the same order."""

    axis: Axis

    def reset(self) -> None:
        """Prepare for a new forward pass."""
        ...

    def gather_chunks(self, x_tD: Tensor, x_TD: Tensor) -> Iterator[int]:
        """Fill ``x_TD``; yield each rank as its rows become usable, this rank first."""
        ...

    def send_partial(self, r: int, part_tD: Tensor) -> None:
        """Send rank ``r`` its part of a sum; ranks in :func:`ring_order`."""
        ...

    def receive_sum(self) -> Tensor:
        """Return the sum of the parts sent to this rank; use it only after :meth:`wait`."""
        ...

    def wait(self, x: Tensor) -> Tensor:
        """Wait for ``x`` of :meth:`receive_sum`."""
        ...


def ring_order(axis: Axis) -> list[int]:
    """The order in which a rank serves its peers: the next one first, itself last, so no two send to the same."""
    return [(axis.rank + step) % axis.size for step in range(1, axis.size + 1)]


class CollectiveTransfer:
    """Moves rows by blocking collectives."""

    def __init__(self, axis: Axis):
        self.axis = axis
        self._parts: dict[int, Tensor] = {}

    def reset(self) -> None:
        """Do nothing."""

    def gather_chunks(self, x_tD: Tensor, x_TD: Tensor) -> Iterator[int]:
        """All-gather, then yield the ranks in the order of the copies."""
        x_TD.copy_(collectives.all_gather(x_tD, self.axis.size, self.axis.group))
        yield from [self.axis.rank, *ring_order(self.axis)[:-1]]

    def send_partial(self, r: int, part_tD: Tensor) -> None:
        """Keep the part for :meth:`receive_sum`."""
        self._parts[r] = part_tD

    def receive_sum(self) -> Tensor:
        """Reduce-scatter the parts."""
        y_TD = torch.cat([self._parts.pop(r) for r in range(self.axis.size)])
        return collectives.reduce_scatter(y_TD, self.axis.size, self.axis.group)

    def wait(self, x: Tensor) -> Tensor:
        """Return ``x``, which is complete."""
        return x


class SymmetricBuffer:
    """Two slots of ``slot_bytes`` on each rank."""

    def __init__(self, axis: Axis, slot_bytes: int, device: torch.device):
        self.slot_bytes, self._slot = slot_bytes, 0
        self._memory, self._handle = allocate_symmetric(axis, 2 * slot_bytes, device)

    def reset(self) -> None:
        """Start with the first slot again, so that a CUDA graph replays as it was captured."""
        self.barrier()
        self._slot = 0

    def next_slot(self) -> None:
        """Switch to the other slot for a new operation."""
        self._slot = 1 - self._slot

    def barrier(self) -> None:
        """Synchronise all ranks on the current stream."""
        self._handle.barrier(channel=0)

    def slot(self, r: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Rank ``r``'s slot of the current operation."""
        return self._handle.get_buffer(r, shape, dtype, storage_offset=self._slot * self.slot_bytes // dtype.itemsize)


class CopyEngineTransfer:
    """Moves rows by GPU copy engines on a separate stream, within one machine."""

    def __init__(self, axis: Axis, device: torch.device):
        self.axis = axis
        self._stream = torch.cuda.Stream(device, priority=-1)
        self._device = device
        self._buffers: list[SymmetricBuffer] = []
        """Never freed: a captured CUDA graph may use any of them."""
        self._buffer: SymmetricBuffer | None = None
        self._in_flight: list[Tensor] = []
        """Parts being copied, whose memory must not be reused yet."""

    def reset(self) -> None:
        """Synchronise the ranks and start with every buffer's first slot."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for buffer in self._buffers:
                buffer.reset()

    def _next_buffer(self, part_tD: Tensor) -> SymmetricBuffer:
        """The smallest buffer for an operation on parts of this size, at its next slot."""
        needed = part_tD.nbytes * self.axis.size
        fitting = [buffer for buffer in self._buffers if buffer.slot_bytes >= needed]
        if not fitting:
            fitting = [self._allocate(-(-needed // 256) * 256)]
            self._buffers += fitting
        self._buffer = min(fitting, key=lambda buffer: buffer.slot_bytes)
        self._buffer.next_slot()
        return self._buffer

    def _allocate(self, slot_bytes: int) -> SymmetricBuffer:
        return SymmetricBuffer(self.axis, slot_bytes, self._device)

    def gather_chunks(self, x_tD: Tensor, x_TD: Tensor) -> Iterator[int]:
        """Copy the peers' rows while the caller works on those already yielded."""
        current, buffer = torch.cuda.current_stream(), self._next_buffer(x_tD)
        parts, copied = x_TD.chunk(self.axis.size), []
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            buffer.slot(self.axis.rank, x_tD.shape, x_tD.dtype).copy_(x_tD)
            buffer.barrier()
            for r in ring_order(self.axis)[:-1]:
                parts[r].copy_(buffer.slot(r, x_tD.shape, x_tD.dtype))
                copied.append((r, self._stream.record_event()))
        parts[self.axis.rank].copy_(x_tD)
        yield self.axis.rank
        for r, event in copied:
            current.wait_event(event)
            yield r

    def send_partial(self, r: int, part_tD: Tensor) -> None:
        """Copy the part to rank ``r`` while the caller continues."""
        ranks = ring_order(self.axis)
        buffer = self._next_buffer(part_tD) if r == ranks[0] else self._buffer
        assert buffer is not None, f"parts are sent in the order {ranks}"
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            buffer.slot(r, (self.axis.size, *part_tD.shape), part_tD.dtype)[self.axis.rank].copy_(part_tD)
        self._in_flight.append(part_tD)

    def receive_sum(self) -> Tensor:
        """Sum the received parts while the caller continues."""
        assert self._buffer is not None, "no part was sent"
        part_tD = self._in_flight[-1]
        y_tD = torch.empty_like(part_tD)
        with torch.cuda.stream(self._stream):
            self._buffer.barrier()
            parts = self._buffer.slot(self.axis.rank, (self.axis.size, *part_tD.shape), part_tD.dtype)
            return torch.sum(parts, 0, out=y_tD)

    def wait(self, x: Tensor) -> Tensor:
        """Make the current stream wait for the transfer's."""
        torch.cuda.current_stream().wait_stream(self._stream)
        self._in_flight.clear()
        return x


def make_transfer(axis: Axis, device: torch.device) -> RowTransfer:
    """Return a transfer by copy engines on GPUs, by collectives elsewhere.

    Raises :class:`PlanError` on GPUs that cannot access each other's memory.
    """
    if device.type != "cuda":
        return CollectiveTransfer(axis)
    if not peers_reachable(axis, device):
        raise PlanError(
            "tp_overlap copies rows between GPUs of one machine that reach each other's memory, and the "
            f"tp={axis.size} ranks here do not; set --plan.tp_overlap False"
        )
    return CopyEngineTransfer(axis, device)


@torch.compiler.disable()  # streams, and rows that are written while they are read
def all_gather_matmul(x_tD: Tensor, weights: Sequence[Tensor], transfer: RowTransfer) -> tuple[Tensor, ...]:
    """y_Tz = gather(x_tD) Wᵀ for each of ``weights`` (z × D)."""
    return _AllGatherMatmul.apply(x_tD, transfer, *weights)


@torch.compiler.disable()
def matmul_reduce_scatter(x_Tz: Tensor, weight_Dz: Tensor, transfer: RowTransfer) -> Tensor:
    """y_tD: this rank's rows of the sum of all ranks' products."""
    return _MatmulReduceScatter.apply(x_Tz, weight_Dz, transfer)


class _AllGatherMatmul(Function):
    @staticmethod
    def forward(ctx: Any, x_tD: Tensor, transfer: RowTransfer, *weights: Tensor) -> tuple[Tensor, ...]:
        x_TD, ys = _all_gather_matmul(x_tD, [weight_zD.T for weight_zD in weights], transfer)
        ctx.save_for_backward(x_TD, *weights)
        ctx.transfer = transfer
        return ys

    @staticmethod
    def backward(ctx: Any, *grads: Tensor):
        x_TD, *weights = ctx.saved_tensors
        dx_tD = _matmul_reduce_scatter(grads, weights, ctx.transfer) if ctx.needs_input_grad[0] else None
        gradients = [
            grad_Tz.T @ x_TD if needed else None
            for grad_Tz, needed in zip(grads, ctx.needs_input_grad[2:], strict=True)
        ]
        return dx_tD if dx_tD is None else ctx.transfer.wait(dx_tD), None, *gradients


class _MatmulReduceScatter(Function):
    @staticmethod
    def forward(ctx: Any, x_Tz: Tensor, weight_Dz: Tensor, transfer: RowTransfer) -> Tensor:
        ctx.save_for_backward(x_Tz, weight_Dz)
        ctx.transfer = transfer
        return transfer.wait(_matmul_reduce_scatter([x_Tz], [weight_Dz.T], transfer))

    @staticmethod
    def backward(ctx: Any, grad_tD: Tensor):
        x_Tz, weight_Dz = ctx.saved_tensors
        grad_TD, (dx_Tz,) = _all_gather_matmul(grad_tD, [weight_Dz], ctx.transfer)
        return dx_Tz, grad_TD.T @ x_Tz if ctx.needs_input_grad[1] else None, None


def _all_gather_matmul(
    x_tD: Tensor, matrices: Sequence[Tensor], transfer: RowTransfer
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """(x_TD of all ranks, x_TD w for each w_Dz of ``matrices``), chunk by chunk as the rows arrive."""
    size = transfer.axis.size
    x_TD = x_tD.new_empty(len(x_tD) * size, x_tD.shape[1])
    ys = tuple(x_tD.new_empty(len(x_TD), w_Dz.shape[1]) for w_Dz in matrices)
    for r in transfer.gather_chunks(x_tD.contiguous(), x_TD):
        rows = slice(r * len(x_tD), (r + 1) * len(x_tD))
        for w_Dz, y_Tz in zip(matrices, ys, strict=True):
            torch.mm(x_TD[rows], w_Dz, out=y_Tz[rows])
    return x_TD, ys


def _matmul_reduce_scatter(xs: Sequence[Tensor], matrices: Sequence[Tensor], transfer: RowTransfer) -> Tensor:
    """This rank's rows of the sum, over ranks and over pairs of x_Tz and w_zD, of x w; wait for it before use."""
    chunk = len(xs[0]) // transfer.axis.size
    for r in ring_order(transfer.axis):
        rows = slice(r * chunk, (r + 1) * chunk)
        part_tD = xs[0][rows] @ matrices[0]
        for x_Tz, w_zD in zip(xs[1:], matrices[1:], strict=True):
            part_tD.addmm_(x_Tz[rows], w_zD)
        transfer.send_partial(r, part_tD)
    return transfer.receive_sum()
