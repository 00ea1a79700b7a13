"""Rows of a table in host memory, copied to the device of the computation and back, off the computation's stream.

On a GPU two high-priority streams run concurrently with the computation's: one for look-ups, one for copies, whose
kernels read and write mapped host memory (:mod:`colonnade.kernels.triton_host_rows`). The host waits for neither. On a
CPU all of it is plain copies. A row is ``width`` weights and one number of optimizer state.
"""

import weakref
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from colonnade.errors import CapacityError
from colonnade.kernels.host_rows import map_memory, unmap_memory
from colonnade.kernels.registry import choose


@dataclass
class DeviceRows:
    """Copies of some rows on the device; ``weight_UD`` is a leaf whose gradient is theirs."""

    weight_UD: Tensor
    state_U1: Tensor
    ready: torch.cuda.Event | None = None
    """Recorded after the copy; None on a CPU."""

    def wait(self, *others: Tensor) -> None:
        """Let the current stream wait for the copy, which it uses with ``others`` of the side streams."""
        if self.ready is not None:
            stream = torch.cuda.current_stream(self.state_U1.device)
            stream.wait_event(self.ready)
            for each in (self.weight_UD, self.state_U1, *others):
                each.record_stream(stream)


class HostRows:
    """``weight_RD`` and ``state_R1`` in host memory, which is locked while this object exists if ``device`` is a GPU.

    Raises :class:`CapacityError` if it cannot be locked.
    """

    def __init__(self, weight_RD: Tensor, state_R1: Tensor, device: torch.device):
        self.weight_RD, self.state_R1, self.device = weight_RD, state_R1, device
        self._copy = choose("host_rows", device.type, weight_RD.dtype)
        self._look_ups = self._copies = None
        if device.type == "cuda":
            for x in (weight_RD, state_R1):
                if failure := map_memory(x):
                    raise CapacityError(
                        f"{x.numel() * x.element_size() / 1e9:.1f} GB of host memory for the table could not be locked "
                        f"({failure}); use fewer rows or narrower ones, or raise `ulimit -l`"
                    )
                weakref.finalize(self, unmap_memory, x.data_ptr(), device)
            self._look_ups, self._copies = (torch.cuda.Stream(device, priority=-1) for _ in range(2))

    def look_ups(self) -> "torch.cuda.StreamContext | nullcontext[None]":
        """Operations in it run on the look-ups' stream."""
        return nullcontext() if self._look_ups is None else torch.cuda.stream(self._look_ups)

    def read(self, rows_U: Tensor) -> DeviceRows:
        """Copies of these rows, which the look-ups' stream computed, after all writes so far."""
        if self._copies is not None:
            assert self._look_ups is not None
            self._copies.wait_stream(self._look_ups)
        with nullcontext() if self._copies is None else torch.cuda.stream(self._copies):
            copy = DeviceRows(
                torch.empty(len(rows_U), self.weight_RD.shape[1], device=self.device),
                torch.empty(len(rows_U), 1, device=self.device),
            )
            self._move(rows_U, copy, write=False)
            if self._copies is not None:
                copy.ready = torch.cuda.Event()
                copy.ready.record(self._copies)
        return copy

    def write(self, rows_U: Tensor, copy: DeviceRows) -> None:
        """Write copies back, after the work now on the current stream."""
        if self._copies is None:
            return self._move(rows_U, copy, write=True)
        self._copies.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._copies):
            return self._move(rows_U, copy, write=True)

    def synchronise(self) -> None:
        """Wait until all writes have reached host memory."""
        if self._copies is not None:
            self._copies.synchronize()

    def _move(self, rows_U: Tensor, copy: DeviceRows, *, write: bool) -> None:
        self._copy(self.weight_RD, rows_U, copy.weight_UD.detach(), write=write)
        self._copy(self.state_R1, rows_U, copy.state_U1, write=write)
        if self._copies is not None:
            rows_U.record_stream(self._copies)
