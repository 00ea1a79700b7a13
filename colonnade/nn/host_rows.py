"""Rows of a table in host memory, copied to the device of the computation and back, off the computation's stream.

    read     rows -> pinned buffer -> device, on a stream of its own; an event marks its end
    write    device -> pinned buffer -> rows, after the computation's event

On a CPU both are plain copies. A row is ``width`` weights and one number of optimizer state.
"""

from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class DeviceRows:
    """Copies of some rows on the device; ``weight_UD`` is a leaf whose gradient is theirs."""

    weight_UD: Tensor
    state_U: Tensor
    ready: torch.cuda.Event | None = None
    """Recorded after the copy; None on a CPU."""

    def wait(self, *others: Tensor) -> None:
        """Let the current stream wait for the copy, which it uses with ``others`` of the copy's stream."""
        if self.ready is not None:
            stream = torch.cuda.current_stream(self.state_U.device)
            stream.wait_event(self.ready)
            for each in (self.weight_UD, self.state_U, *others):
                each.record_stream(stream)


class HostRows:
    """``weight_RD`` and ``state_R`` in host memory; one thread at a time calls :meth:`read` and :meth:`write`."""

    def __init__(self, weight_RD: Tensor, state_R: Tensor, device: torch.device):
        self.weight_RD, self.state_R, self.device = weight_RD, state_R, device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._buffers: dict[str, tuple[Tensor, Tensor]] = {}
        self._last: torch.cuda.Event | None = None
        """After it the buffer of reads is free."""

    def context(self) -> "torch.cuda.StreamContext | nullcontext[None]":
        """Operations in it run on the copies' stream."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def read(self, rows_U: Tensor) -> DeviceRows:
        """Copies of these rows; ``rows_U`` is on the device, and the current stream waits for nothing."""
        if self._stream is None:
            return DeviceRows(self.weight_RD.index_select(0, rows_U), self.state_R.index_select(0, rows_U))
        with self.context():
            rows = rows_U.cpu()
            weight_UD, state_U = self._buffer("read", len(rows))
            if self._last is not None:
                self._last.synchronize()
            torch.index_select(self.weight_RD, 0, rows, out=weight_UD)
            torch.index_select(self.state_R, 0, rows, out=state_U)
            copy = DeviceRows(weight_UD.to(self.device, non_blocking=True), state_U.to(self.device, non_blocking=True))
            copy.ready = self._last = self._stream.record_event()
        return copy

    def mark_ready(self, copy: DeviceRows) -> None:
        """Let :meth:`DeviceRows.wait` wait for all that the copies' stream has now."""
        if self._stream is not None:
            copy.ready = self._stream.record_event()

    def mark(self) -> torch.cuda.Event | None:
        """An event of the current stream, for :meth:`write`."""
        return None if self._stream is None else torch.cuda.current_stream(self.device).record_event()

    def write(self, rows_U: Tensor, copy: DeviceRows, after: torch.cuda.Event | None) -> None:
        """Write copies back once ``after`` has happened; returns when they are in host memory."""
        weight_UD, state_U = copy.weight_UD.detach(), copy.state_U
        if self._stream is not None:
            assert after is not None
            with self.context():
                self._stream.wait_event(after)
                stage_UD, stage_U = self._buffer("write", len(rows_U))
                weight_UD = stage_UD.copy_(weight_UD, non_blocking=True)
                state_U = stage_U.copy_(state_U, non_blocking=True)
                rows_U = rows_U.cpu()  # synchronises
        self.weight_RD.index_copy_(0, rows_U, weight_UD)
        self.state_R.index_copy_(0, rows_U, state_U)

    def _buffer(self, name: str, rows: int) -> tuple[Tensor, Tensor]:
        """Pinned memory for so many rows."""
        if name not in self._buffers or len(self._buffers[name][1]) < rows:
            room = 1 << max(rows - 1, 1).bit_length()
            self._buffers[name] = (
                torch.empty(room, self.weight_RD.shape[1], pin_memory=True), torch.empty(room, pin_memory=True)
            )  # fmt: skip
        weight_RD, state_R = self._buffers[name]
        return weight_RD[:rows], state_R[:rows]
