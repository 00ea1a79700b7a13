"""Stopping when asked: a signal is noted, the step is finished, all ranks agree, the run saves and ends.

Ctrl-C reaches every process of a terminal's group, a scheduler's SIGTERM perhaps only one, and never at the same
moment of a step. So a handler only notes the signal, and after each step the ranks take the maximum of what they
noted: they stop after the same step or not at all. The numbers travel over gloo on the CPU, so a GPU's queue of work
is not waited for.
"""

import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self

import torch

from colonnade.parallel.axis import Axis
from colonnade.parallel.launch import STOP_SIGNALS, Interrupted


class StopSignal:
    """Used as a context: inside, SIGTERM and SIGINT no longer end the process at once (SIGKILL still does)."""

    def __init__(self, world: Axis):
        self.world = world
        self._noted = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        # Python runs handlers in the main thread only, and lets no other thread set them.
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in STOP_SIGNALS}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._noted = number

    def asked(self) -> Interrupted | None:
        """What to raise once all is saved, the same on all ranks, when any of them was sent a signal."""
        number = int(self.world.max_(torch.tensor(self._noted)).item())
        return Interrupted(number) if number else None
