"""Rewards in worker processes, each call with a time limit.

    reward(prompt: str, answer: str, row: dict) -> float

A reward fails if it raises, ends its process, does not return a finite number, or exceeds the time limit: its sample is
skipped, the process is replaced, and the run continues. Messages are JSON, so nothing from a worker is unpickled.
"""

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any, NamedTuple, Self

from colonnade.errors import DataError

START_S = 120.0
"""Time limit for a worker to import its function [s]."""


class Scored(NamedTuple):
    """The reward of a completion, or the reason why it is missing."""

    reward: float | None
    failure: str = ""


class Answer(NamedTuple):
    """A sample to score."""

    prompt: str
    answer: str
    row: Mapping[str, Any]


class RewardPool:
    """Context manager: ``workers`` processes that call one reward function."""

    def __init__(self, name: str, workers: int = 2, limit_s: float = 10.0):
        self._name, self._limit_s, self._count = name, limit_s, workers
        self._workers: list[_Worker] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End all workers."""
        for worker in self._workers:
            worker.kill()
        self._workers.clear()

    def score(self, answers: Sequence[Answer]) -> list[Scored]:
        """The rewards of ``answers``, in order; raises :class:`DataError` if a worker cannot start."""
        results: list[Scored | None] = [None] * len(answers)
        todo = list(reversed(range(len(answers))))
        while len(self._workers) < min(self._count, len(answers)):
            self._workers.append(_Worker(self._name))
        busy: dict[Connection, tuple[int, int, float]] = {}
        for slot, worker in enumerate(self._workers):
            self._begin(slot, worker, todo, answers, busy)
        while busy:
            timeout = max(0.0, min(deadline for _, _, deadline in busy.values()) - time.monotonic())
            ready = wait(list(busy), timeout)
            now = time.monotonic()
            for pipe, (slot, number, deadline) in list(busy.items()):
                if pipe not in ready and now < deadline:
                    continue
                del busy[pipe]
                late = pipe not in ready
                results[number] = Scored(None, f"{TIMED_OUT} {self._limit_s:g} s") if late else _receive(pipe)
                if late or results[number] == DIED:
                    self._workers[slot].kill()
                    self._workers[slot] = _Worker(self._name)
                self._begin(slot, self._workers[slot], todo, answers, busy)
        return [result for result in results if result is not None]

    def _begin(
        self,
        slot: int,
        worker: "_Worker",
        todo: list[int],
        answers: Sequence[Answer],
        busy: dict[Connection, tuple[int, int, float]],
    ) -> None:
        if todo:
            number = todo.pop()
            worker.send(answers[number])
            busy[worker.pipe] = slot, number, time.monotonic() + self._limit_s


TIMED_OUT = "took longer than"
DIED = Scored(None, "ended its process")


def _receive(pipe: Connection) -> Scored:
    try:
        message = json.loads(pipe.recv_bytes())
    except (EOFError, OSError, ValueError):
        return DIED
    if "failure" in message:
        return Scored(None, str(message["failure"])[:200])
    reward = message.get("reward")
    if isinstance(reward, bool | int | float):
        with suppress(OverflowError):  # of an int
            if math.isfinite(value := float(reward)):
                return Scored(value)
    return Scored(None, f"returned {reward!r:.80}, which is not a finite number")


START = "import json, sys; sys.path[:] = json.loads(sys.argv[4]); import colonnade.reward_worker as w; w.main()"
"""Starts a new interpreter: multiprocessing would run the user's script again, and daemon processes cannot use it."""


class _Worker:
    def __init__(self, name: str):
        self.pipe, theirs = Pipe()
        arguments = [str(theirs.fileno()), name, str(os.getpid()), json.dumps(sys.path)]
        self._process = subprocess.Popen(
            [sys.executable, "-c", START, *arguments], pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL
        )
        theirs.close()
        if not self.pipe.poll(START_S) or _receive(self.pipe) != Scored(0.0):
            self.kill()
            raise DataError(
                f"the worker process for tune.reward {name} did not start; import it in Python to see the error"
            )

    def send(self, answer: Answer) -> None:
        """Begin one call; if the worker has died, receiving its result fails."""
        with suppress(OSError):
            self.pipe.send_bytes(json.dumps(answer._asdict()).encode())

    def kill(self) -> None:
        """Kills the process."""
        self.pipe.close()
        self._process.kill()
        self._process.wait()
