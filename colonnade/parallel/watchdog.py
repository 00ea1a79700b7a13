"""Heartbeat watchdog: names the rank that stopped responding, so that its peers do not wait forever.

A collective with a peer that was stopped, lost or is stuck does not return, and no exception reaches the thread that
waits in it. So a second thread on each rank writes a *heartbeat* to the process group's store at regular intervals: how
many *marks* the rank has passed and how long it has been at the last one. Marks come in the same order on all ranks.
While its own rank advances, the thread reads nothing; after a quarter of the limit without a new mark it reads the
others' heartbeats, and at the limit it ends the process with the missing rank:

    no heartbeat for three quarters of the limit   the process was stopped, killed, or cannot be reached: it is missing
    all beat, and all are past their limits        those with the fewest marks are missing: the others wait for them

This works on gloo and NCCL alike, because it uses neither. Compilation, saving and validation are marked as patient:
for them only silence counts, until :data:`PATIENT_FACTOR` times the limit. Time is counted in intervals of this thread,
not by the clock, so suspending and resuming the whole run raises no alarm.
"""

import json
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from types import TracebackType
from typing import Any, NoReturn, Self

import torch.distributed as dist

from colonnade.errors import WorkerError
from colonnade.parallel import collectives
from colonnade.parallel.launch import end_process

PATIENT_FACTOR = 10.0
"""Times the limit that a patient mark may take."""
COLLECTIVE_TIMEOUT_FACTOR = 12.0
"""Times the limit after which a collective times out by itself, if the watchdog has not ended the process."""
MAX_INTERVAL_S = 30.0


@dataclass(frozen=True)
class Heartbeat:
    """Progress of one rank, as its peers read it."""

    number: int
    """Heartbeats so far."""
    marks: int
    """Marks passed; the same number is the same place in the program on every rank."""
    step: int
    """The current optimizer step, from 1."""
    activity: str
    """The rank's activity since the last mark, such as "computes"."""
    waited_s: float
    """Time since the last mark."""
    limit_s: float
    """How long this activity may take."""
    finished: bool = False
    """The rank has left normally and sends no more heartbeats."""

    @property
    def overdue(self) -> bool:
        """Whether the activity takes longer than its limit."""
        return self.waited_s >= self.limit_s


class Watchdog:
    """Context manager around the work of a rank, which calls :meth:`mark`; does nothing in a world of one."""

    def __init__(self, timeout_s: float, end: Callable[[WorkerError], NoReturn] = end_process):
        """``end`` is called from the watchdog's thread with the error; it must not return."""
        self.timeout_s, self.end = timeout_s, end
        self._interval_s = min(timeout_s / 20, MAX_INTERVAL_S)
        self._mark = (1, 0, "starts", timeout_s * PATIENT_FACTOR)
        self._finished = threading.Event()
        self._thread: threading.Thread | None = None

    def mark(self, step: int, activity: str, *, patient: bool = False) -> None:
        """Report that this rank begins ``activity`` (such as "saves") in optimizer step ``step``, from 1."""
        self._mark = (self._mark[0] + 1, step, activity, self.timeout_s * (PATIENT_FACTOR if patient else 1))

    def __enter__(self) -> Self:
        if dist.is_initialized() and dist.get_world_size() > 1:
            monitor = HeartbeatMonitor(collectives.store(), dist.get_rank(), dist.get_world_size(), self.timeout_s / 8)
            self._thread = threading.Thread(target=self._watch, args=(monitor,), name="watchdog", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._finished.set()
        if self._thread is not None:
            self._thread.join()

    def _watch(self, monitor: "HeartbeatMonitor") -> None:
        number, waited_s, last, then_s = 0, 0.0, self._mark, time.monotonic()
        while True:
            finished = self._finished.wait(self._interval_s)
            # A process that was itself suspended counts that time as one late heartbeat.
            now_s = time.monotonic()
            passed_s, then_s = min(now_s - then_s, self.timeout_s / 4), now_s
            waited_s = waited_s + passed_s if self._mark == last else 0.0
            last, number = self._mark, number + 1
            marks, step, activity, limit_s = last
            mine = Heartbeat(number, marks, step, activity, waited_s, limit_s, finished)
            try:
                monitor.publish(mine)
                if finished:
                    return
                if waited_s < self.timeout_s / 4:
                    monitor.reset()
                    continue
                monitor.poll(passed_s)
            except RuntimeError as error:  # the store's host is gone or does not respond
                if finished:
                    return
                monitor.store_failed(passed_s, error)
            if waited_s >= self.timeout_s and (message := monitor.diagnose(mine, self.timeout_s)):
                self.end(WorkerError(message))


class HeartbeatMonitor:
    """One rank's view of all ranks' heartbeats, exchanged through ``store``."""

    def __init__(self, store: Any, rank: int, world: int, timeout_s: float):
        # A separate connection: the process group's blocks while it waits for a key.
        self.store = dist.PrefixStore("colonnade/beats", store.clone())
        self.store.set_timeout(timedelta(seconds=max(timeout_s, 0.1)))
        self.rank, self.world = rank, world
        self.beats: dict[int, Heartbeat] = {}
        self.silent_s: dict[int, float] = {}
        self.store_silent_s, self.store_error = 0.0, ""

    def publish(self, mine: Heartbeat) -> None:
        """Write this rank's heartbeat."""
        self.store.set(str(self.rank), json.dumps(asdict(mine)))
        self.store_silent_s = 0.0

    def reset(self) -> None:
        """Reset the peers' state, because this rank advances."""
        self.silent_s.clear()
        self.beats.clear()

    def poll(self, passed_s: float) -> None:
        """Read the peers' heartbeats, ``passed_s`` after the last time."""
        peers = [rank for rank in range(self.world) if rank != self.rank and self.store.check([str(rank)])]
        for rank, text in zip(peers, self.store.multi_get([str(rank) for rank in peers]), strict=True):
            beat, before = Heartbeat(**json.loads(text)), self.beats.get(rank)
            same = before is not None and beat.number == before.number and not beat.finished
            self.silent_s[rank] = self.silent_s.get(rank, 0.0) + passed_s if same else 0.0
            self.beats[rank] = beat
        for rank in range(self.world):  # ranks without any heartbeat yet
            if rank != self.rank and rank not in self.beats:
                self.silent_s[rank] = self.silent_s.get(rank, 0.0) + passed_s

    def store_failed(self, passed_s: float, error: Exception) -> None:
        """Note that the store did not respond."""
        self.store_silent_s, self.store_error = self.store_silent_s + passed_s, str(error).splitlines()[0]

    def diagnose(self, mine: Heartbeat, timeout_s: float) -> str | None:
        """Describe the missing ranks in one line, if any; ``mine`` has waited for the limit at least."""
        silence_s = 0.75 * timeout_s
        here = f"step {mine.step}: rank {self.rank} {mine.activity} and has waited for {mine.waited_s:.3g} s"
        remedy = "check that machine and its memory; the same command resumes from the newest checkpoint"
        if self.store_silent_s >= silence_s:
            silent = f"the rendezvous store has not answered for {self.store_silent_s:.3g} s ({self.store_error})"
            return f"{here}; {silent}; {remedy}"
        missing = [rank for rank in sorted(self.silent_s) if self.silent_s[rank] >= silence_s]
        if missing:
            shown = ", ".join(self._last_seen(rank) for rank in missing)
            return f"{here}; missing of {self.world} ranks: {shown}; {remedy}"
        beats = {self.rank: mine, **self.beats}
        running = {rank: beat for rank, beat in beats.items() if not beat.finished}
        if len(beats) < self.world or not all(beat.overdue for beat in running.values()):
            return None  # a rank is slow, within its limit
        least = min(beat.marks for beat in running.values())
        behind = [rank for rank, beat in sorted(running.items()) if beat.marks == least]
        if len(behind) == len(running):
            return f"{here}; all ranks are alive but make no progress; raise --train.timeout_s for longer steps"
        shown = ", ".join(f"rank {r} {beats[r].activity} in step {beats[r].step}" for r in behind)
        stuck_s = beats[behind[0]].waited_s
        return f"{here} for ranks that are alive but make no progress: {shown} for {stuck_s:.3g} s; check these ranks"

    def _last_seen(self, rank: int) -> str:
        beat = self.beats.get(rank)
        if beat is None:
            return f"rank {rank}, never heard from"
        where = f"last seen in step {beat.step} ({beat.activity})"
        return f"rank {rank}, silent for at least {self.silent_s[rank]:.3g} s, {where}"
