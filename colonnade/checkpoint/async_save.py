"""Asynchronous checkpointing: the state is copied to host memory and written by a background thread.

    stage    copies this rank's weights and moments to host memory before the next step changes them; on a GPU to
             pinned buffers and on the current stream, so that the CPU does not wait
    start    a thread lets torch.distributed.checkpoint plan, write and commit over its own gloo group: its
             collectives must not interleave with those of training, which run in a different order
    wait     training polls ``finished`` each step, then waits; a failure of the thread is raised there

The buffers are allocated by the first save and reused: they cost one more copy of this rank's state.
"""

import datetime
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

WRITE_TIMEOUT = datetime.timedelta(hours=12)
"""How long a rank that has written waits for a slower one. The death of a rank is always noticed immediately."""


class AsyncSave:
    """Writes one checkpoint at a time. Every rank constructs one, because creating the group is a collective."""

    def __init__(self, device: torch.device):
        group = dist.new_group(backend="gloo", timeout=WRITE_TIMEOUT)
        assert isinstance(group, dist.ProcessGroup), "every rank is a member"
        self.group = group
        """For the collectives of the writing thread only."""
        self._buffers: dict[str, Tensor] = {}
        self._on_gpu = device.type == "cuda"
        self._thread: threading.Thread | None = None
        self._folder = Path()
        self._failure: Exception | None = None

    def stage(self, local: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies ``local`` to host memory; the copies are complete when the thread of :meth:`start` begins to write."""
        for name, tensor in local.items():
            if name not in self._buffers:
                self._buffers[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self._on_gpu)
            self._buffers[name].copy_(tensor, non_blocking=True)
        return dict(self._buffers)

    def start(self, folder: Path, write: Callable[[], None]) -> None:
        """Runs ``write``, which creates ``folder``, in a thread; the previous save must have been waited for."""
        assert self._thread is None, "one checkpoint at a time: wait for the last one first"
        copied = torch.cuda.current_stream().record_event() if self._on_gpu else None

        def work() -> None:
            try:
                if copied is not None:
                    copied.synchronize()
                write()
            except Exception as failure:  # noqa: BLE001 - raised by wait()
                self._failure = failure

        # A daemon thread, so that a process whose peers have died can exit.
        self._folder, self._failure = folder, None
        self._thread = threading.Thread(target=work, name=f"writes {folder.name}", daemon=True)
        self._thread.start()

    @property
    def running(self) -> bool:
        """Whether a save was started and not yet waited for."""
        return self._thread is not None

    @property
    def finished(self) -> bool:
        """Whether this rank's thread has ended, with or without a failure."""
        return self._thread is not None and not self._thread.is_alive()

    def wait(self) -> Path:
        """Waits for the save and returns its folder; raises the failure of the writing thread."""
        assert self._thread is not None
        self._thread.join()
        self._thread, failure = None, self._failure
        if failure is not None:
            raise failure
        return self._folder
