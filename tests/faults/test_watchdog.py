"""The watchdog's diagnosis, without processes or clocks: missing, slow and stuck ranks."""

import datetime
from threading import Thread

import pytest
import torch.distributed as dist

from colonnade.parallel.rendezvous import agree_on_name
from colonnade.parallel.watchdog import Heartbeat, HeartbeatMonitor

LIMIT_S = 8.0
PATIENT_S = 80.0


def beat(number: int, marks: int, waited_s: float, limit_s: float = LIMIT_S, *, finished: bool = False) -> Heartbeat:
    return Heartbeat(number, marks, 7, "computes" if marks == 20 else "reads samples", waited_s, limit_s, finished)


class World:
    """Three ranks that send a heartbeat every second; rank 0 listens."""

    def __init__(self) -> None:
        store = dist.HashStore()
        self.monitors = [HeartbeatMonitor(store, rank, 3, 1.0) for rank in range(3)]
        self.numbers = {1: 0, 2: 0}

    def go(self, seconds: int, one: Heartbeat | None, two: Heartbeat | None) -> None:
        """The other ranks send these heartbeats, with a new number each second, or nothing (None)."""
        for _ in range(seconds):
            for rank, diagnosis in ((1, one), (2, two)):
                if diagnosis is not None:
                    self.numbers[rank] += 1
                    self.monitors[rank].publish(Heartbeat(**{**vars(diagnosis), "number": self.numbers[rank]}))
            self.monitors[0].poll(1.0)

    def diagnose(self, mine: Heartbeat) -> str | None:
        return self.monitors[0].diagnose(mine, LIMIT_S)


WAITING = beat(1, 20, LIMIT_S)


def test_silent_rank_is_missing() -> None:
    world = World()
    world.go(1, beat(1, 20, 1), beat(1, 20, 1))
    world.go(5, beat(1, 20, 6), None)
    assert world.diagnose(WAITING) is None, "five seconds are below the limit of six"
    world.go(1, beat(1, 20, 7), None)
    diagnosis = world.diagnose(WAITING)
    assert diagnosis is not None
    assert diagnosis.startswith(
        "step 7: rank 0 computes and has waited for 8 s; missing of 3 ranks: rank 2, silent for at"
    )
    assert "rank 1," not in diagnosis


def test_rank_without_any_heartbeat_is_missing() -> None:
    world = World()
    world.go(6, beat(1, 20, 8), None)
    diagnosis = world.diagnose(WAITING)
    assert diagnosis is not None and "rank 2, never heard from" in diagnosis


def test_rank_that_does_not_advance_is_named() -> None:
    world = World()
    world.go(6, beat(1, 20, 9), beat(1, 19, 9))
    diagnosis = world.diagnose(WAITING)
    assert diagnosis is not None and "alive but make no progress: rank 2 reads samples in step 7 for 9 s" in diagnosis


@pytest.mark.parametrize(
    "slow",
    [beat(1, 19, 2), beat(1, 19, 60, PATIENT_S), beat(1, 20, 79, PATIENT_S)],
    ids=["just arrived", "phase may be slow", "compiles"],
)
def test_no_false_alarm_for_a_rank_that_may_be_slow(slow: Heartbeat) -> None:
    world = World()
    world.go(60, beat(1, 20, 60), slow)
    assert world.diagnose(beat(1, 20, 60)) is None


def test_rank_that_finished_is_not_missing() -> None:
    world = World()
    world.go(1, beat(1, 20, 1), beat(1, 25, 0, finished=True))
    world.go(60, beat(1, 24, 3), None)
    assert world.diagnose(beat(1, 23, 60)) is None


def test_all_ranks_stuck_in_the_same_phase() -> None:
    world = World()
    world.go(9, beat(1, 20, 9), beat(1, 20, 9))
    diagnosis = world.diagnose(WAITING)
    assert diagnosis is not None and "all ranks are alive but make no progress; raise --train.timeout_s" in diagnosis


def test_unresponsive_store_is_reported() -> None:
    world = World()
    world.go(2, beat(1, 20, 1), beat(1, 20, 1))
    for _ in range(6):
        world.monitors[0].store_failed(1.0, RuntimeError("Connection refused\nat a place"))
    diagnosis = world.diagnose(WAITING)
    assert diagnosis is not None and "the rendezvous store has not answered for 6 s (Connection refused)" in diagnosis


def test_each_attempt_agrees_on_its_own_name() -> None:
    """Three attempts over one store; the second loses its rank 0 before any rank is answered."""
    store, timeout = dist.HashStore(), datetime.timedelta(seconds=30)
    names: list[str] = []
    for attempt in range(3):
        if attempt == 1:
            store.set("colonnade/token/1", "stale token")
            continue
        agreed_names: dict[int, str] = {}

        def join(rank: int, agreed_names: dict[int, str] = agreed_names) -> None:
            agreed_names[rank] = agree_on_name(store, rank, 3, timeout)

        ranks = [Thread(target=join, args=(rank,)) for rank in range(3)]
        for thread in ranks:
            thread.start()
        for thread in ranks:
            thread.join()
        assert len(agreed_names) == 3 and len(set(agreed_names.values())) == 1
        names.append(agreed_names[0])
    assert names[0] != names[1]
