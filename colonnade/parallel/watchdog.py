"""A rank that falls silent is named, instead of everybody waiting for it for ever.

A collective whose peer was stopped, lost or is stuck does not return, and says nothing: the thread that waits in it
can be reached by no exception. So a second thread of each rank writes a *beat* into the store of the process group
every so often: how far the rank came (its last *mark*) and for how long it has stood there. Marks come in the same
order on all ranks. As long as its own rank moves on, the thread reads nothing; once it stands for a quarter of the
limit it listens to the others, and at the limit it ends the process with who is missing:

    no beat for three quarters of the limit      the process was stopped, killed, or cannot be reached: it is missing
    all beat, and all stand past their limits    those with the fewest marks are missing: the others wait for them

Works on gloo and NCCL alike, because it asks neither. Compilation, a save and a validation are marked as
patient: there only silence counts, until :data:`PATIENCE` times the limit. Time is counted in beats of this thread,
not read from the clock: to suspend the whole run and let it go on is no reason to suspect anybody.
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

PATIENCE = 10.0
"""A patient mark may stand for so many times the limit."""
BACKSTOP = 12.0
"""Times the limit after which a collective gives up by itself, if the watchdog has not."""
LONGEST_PAUSE_S = 30.0


@dataclass(frozen=True)
class Heartbeat:
    """What a rank tells the others."""

    number: int
    """Beats so far."""
    marks: int
    """Places that it has passed; the same number means the same place on every rank."""
    step: int
    """The optimizer step at which it is, from 1."""
    doing: str
    """What it does there, in words."""
    stands_s: float
    """For how long it has been there."""
    limit_s: float
    """How long it may be there."""
    over: bool = False
    """It has left in peace and beats no more."""

    @property
    def late(self) -> bool:
        """Whether it stands longer than it may."""
        return self.stands_s >= self.limit_s


class Watchdog:
    """Used as a context around the work of a rank, which calls :meth:`at`; in a world of one it does nothing."""

    def __init__(self, timeout_s: float, end: Callable[[WorkerError], NoReturn] = end_process):
        """``end`` is called, from the watching thread, with what is to be said; it must not return."""
        self.timeout_s, self.end = timeout_s, end
        self._pause_s = min(timeout_s / 20, LONGEST_PAUSE_S)
        self._mark = (1, 0, "starts", timeout_s * PATIENCE)
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def at(self, step: int, doing: str, *, patient: bool = False) -> None:
        """This rank comes to the next place: in optimizer step ``step`` (from 1) it ``doing``, such as "saves"."""
        self._mark = (self._mark[0] + 1, step, doing, self.timeout_s * (PATIENCE if patient else 1))

    def __enter__(self) -> Self:
        if dist.is_initialized() and dist.get_world_size() > 1:
            ears = HeartbeatListener(collectives.store(), dist.get_rank(), dist.get_world_size(), self.timeout_s / 8)
            self._thread = threading.Thread(target=self._watch, args=(ears,), name="watchdog", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    def _watch(self, ears: "HeartbeatListener") -> None:
        number, stands_s, last, then_s = 0, 0.0, self._mark, time.monotonic()
        while True:
            over = self._over.wait(self._pause_s)
            # A process that was itself suspended counts the time as one late beat.
            now_s = time.monotonic()
            passed_s, then_s = min(now_s - then_s, self.timeout_s / 4), now_s
            stands_s = stands_s + passed_s if self._mark == last else 0.0
            last, number = self._mark, number + 1
            marks, step, doing, limit_s = last
            mine = Heartbeat(number, marks, step, doing, stands_s, limit_s, over)
            try:
                ears.tell(mine)
                if over:
                    return
                if stands_s < self.timeout_s / 4:
                    ears.forget()
                    continue
                ears.listen(passed_s)
            except RuntimeError as why:  # what a store raises when its host is gone or does not answer
                if over:
                    return
                ears.deaf(passed_s, why)
            if stands_s >= self.timeout_s and (what := ears.verdict(mine, self.timeout_s)):
                self.end(WorkerError(what))


class HeartbeatListener:
    """What one rank knows of the others' beats."""

    def __init__(self, store: Any, rank: int, world: int, patience_s: float):
        # A connection of its own: the process group's blocks while it waits for something.
        self.store = dist.PrefixStore("colonnade/beats", store.clone())
        self.store.set_timeout(timedelta(seconds=max(patience_s, 0.1)))
        self.rank, self.world = rank, world
        self.beats: dict[int, Heartbeat] = {}
        self.silent_s: dict[int, float] = {}
        self.deaf_s, self.reason = 0.0, ""
        self._known: list[str] = []

    def tell(self, mine: Heartbeat) -> None:
        """Let the others know."""
        self.store.set(str(self.rank), json.dumps(asdict(mine)))
        self.deaf_s = 0.0

    def forget(self) -> None:
        """This rank moves on, so nobody is missing."""
        self.silent_s.clear()
        self.beats.clear()

    def listen(self, passed_s: float) -> None:
        """Hear what the others say now, ``passed_s`` after the last time."""
        peers = [rank for rank in range(self.world) if rank != self.rank and self.store.check([str(rank)])]
        for rank, said in zip(peers, self.store.multi_get([str(rank) for rank in peers]), strict=True):
            beat, before = Heartbeat(**json.loads(said)), self.beats.get(rank)
            same = before is not None and beat.number == before.number and not beat.over
            self.silent_s[rank] = self.silent_s.get(rank, 0.0) + passed_s if same else 0.0
            self.beats[rank] = beat
        for rank in range(self.world):  # those that never said anything yet
            if rank != self.rank and rank not in self.beats:
                self.silent_s[rank] = self.silent_s.get(rank, 0.0) + passed_s

    def deaf(self, passed_s: float, why: Exception) -> None:
        """The store did not answer."""
        self.deaf_s, self.reason = self.deaf_s + passed_s, str(why).splitlines()[0]

    def verdict(self, mine: Heartbeat, timeout_s: float) -> str | None:
        """Who is missing, in a line, when somebody is; ``mine`` stands for the limit at least."""
        enough_s = 0.75 * timeout_s
        here = f"step {mine.step}: rank {self.rank} {mine.doing} and has waited for {mine.stands_s:.3g} s"
        remedy = "look at that machine and its memory; the same command goes on from the newest checkpoint"
        if self.deaf_s >= enough_s:
            return f"{here}; the rendezvous store has not answered for {self.deaf_s:.3g} s ({self.reason}); {remedy}"
        missing = [rank for rank in sorted(self.silent_s) if self.silent_s[rank] >= enough_s]
        if missing:
            who = ", ".join(self._last_seen(rank) for rank in missing)
            return f"{here}; missing of {self.world} ranks: {who}; {remedy}"
        beats = {self.rank: mine, **self.beats}
        standing = {rank: beat for rank, beat in beats.items() if not beat.over}
        if len(beats) < self.world or not all(beat.late for beat in standing.values()):
            return None  # somebody is slow, and may be
        least = min(beat.marks for beat in standing.values())
        behind = [rank for rank, beat in sorted(standing.items()) if beat.marks == least]
        if len(behind) == len(standing):
            return f"{here}; all ranks are there and none goes on; raise --train.timeout_s if a step may take so long"
        who = ", ".join(f"rank {r} {beats[r].doing} in step {beats[r].step}" for r in behind)
        return f"{here} for others that stand still, alive: {who} for {beats[behind[0]].stands_s:.3g} s; look there"

    def _last_seen(self, rank: int) -> str:
        beat = self.beats.get(rank)
        if beat is None:
            return f"rank {rank}, never heard of"
        where = f"last seen in step {beat.step} ({beat.doing})"
        return f"rank {rank}, silent for at least {self.silent_s[rank]:.3g} s, {where}"
