"""Saving while training goes on: the state is copied at once and written by a thread.

    stage     weights and moments of this rank are copied into host memory, where the next step does not move them;
              on a GPU into pinned buffers, behind the step that is still running, so that nobody waits
    write     a thread lets torch.distributed.checkpoint plan, write and commit, over a gloo group of its own:
              its messages must never meet those of training, which come in another order
    settle    training asks at each step whether it is over; a failure is raised there

The buffers are made at the first save and kept: one more copy of what this rank holds.
"""

import datetime
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

LONGEST_WRITE = datetime.timedelta(hours=12)
"""How long ranks that have written wait for one that has not. A rank that dies is noticed at once in any case."""


class AsyncSave:
    """Writes one checkpoint at a time; every rank of the run makes one, for the group is made by all."""

    def __init__(self, device: torch.device):
        group = dist.new_group(backend="gloo", timeout=LONGEST_WRITE)
        assert isinstance(group, dist.ProcessGroup), "every rank is a member"
        self.group = group
        """For the collectives of the writing thread, and of nobody else."""
        self._buffers: dict[str, Tensor] = {}
        self._on_gpu = device.type == "cuda"
        self._thread: threading.Thread | None = None
        self._folder = Path()
        self._failure: Exception | None = None

    def stage(self, local: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies of ``local`` in host memory; they are complete when :meth:`start` begins to write."""
        for name, tensor in local.items():
            if name not in self._buffers:
                self._buffers[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self._on_gpu)
            self._buffers[name].copy_(tensor, non_blocking=True)
        return dict(self._buffers)

    def start(self, folder: Path, write: Callable[[], None]) -> None:
        """Let ``write``, which makes ``folder``, run in a thread; nothing else may be running."""
        assert self._thread is None, "one checkpoint at a time: settle the last one first"
        copied = torch.cuda.current_stream().record_event() if self._on_gpu else None

        def work() -> None:
            try:
                if copied is not None:
                    copied.synchronize()
                write()
            except Exception as failure:  # noqa: BLE001 - raised where the run settles
                self._failure = failure

        # A daemon: a process whose peers are gone must be able to end.
        self._folder, self._failure = folder, None
        self._thread = threading.Thread(target=work, name=f"writes {folder.name}", daemon=True)
        self._thread.start()

    @property
    def running(self) -> bool:
        """Whether a checkpoint was started and not yet settled."""
        return self._thread is not None

    @property
    def over(self) -> bool:
        """Whether this rank's part of it has ended, well or badly."""
        return self._thread is not None and not self._thread.is_alive()

    def settle(self) -> Path:
        """Wait for the checkpoint that was started and return its folder; raises what went wrong with it."""
        assert self._thread is not None
        self._thread.join()
        self._thread, failure = None, self._failure
        if failure is not None:
            raise failure
        return self._folder
