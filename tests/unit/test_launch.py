"""The launcher: results come back, and so does the one failure that explains all the others."""

import os
import signal

import pytest
import torch

from colonnade.config import Plan
from colonnade.errors import DataError, PlanError
from colonnade.parallel.launch import launch
from colonnade.parallel.mesh import Ground

TWO = Plan(tp=2)


def work(how: str) -> list[float]:
    """Two ranks meet in a collective; then rank 1 meets its fate, and rank 0 waits for it in another."""
    with Ground.build(TWO) as ground:
        tp = ground.axes.tp
        met = tp.fan_in(torch.full((2,), float(ground.rank + 1)))
        if ground.rank == 1:
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "raises":
                raise ValueError("a bug")
            if how == "exits":
                raise SystemExit(3)
            if how == "ours":
                raise DataError("corpus is empty; add text")
        return tp.fan_in(met).tolist()


def where() -> tuple[int, int]:
    return os.getpid(), torch.get_num_threads()


def test_result_of_rank_0() -> None:
    assert launch(work, ("well",), TWO) == [6.0, 6.0]


def test_a_world_of_one_is_this_process() -> None:
    assert launch(where, (), Plan())[0] == os.getpid()


def test_workers_share_the_cores() -> None:
    pid, threads = launch(where, (), TWO)
    assert pid != os.getpid()
    assert threads == max(1, len(os.sched_getaffinity(0)) // 2)


@pytest.mark.parametrize(
    ("how", "kind", "message"),
    [
        (
            "killed",
            PlanError,
            r"^rank 1 was killed by SIGKILL \(out of memory is the usual reason\)",
        ),
        ("raises", PlanError, r"(?m)^rank 1 failed with ValueError: a bug$"),
        ("exits", PlanError, r"(?m)^rank 1 failed with SystemExit: 3$"),
        ("ours", DataError, r"^rank 1: corpus is empty; add text$"),
    ],
)
def test_the_first_failure_is_the_message(how: str, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        launch(work, (how,), TWO)


def test_a_bug_keeps_its_traceback() -> None:
    with pytest.raises(PlanError) as failure:
        launch(work, ("raises",), TWO)
    assert "test_launch.py" in "".join(failure.value.__notes__)


def test_more_gpus_than_there_are() -> None:
    if torch.cuda.device_count() >= 64:
        pytest.skip("needs fewer than 64 GPUs")
    with pytest.raises(PlanError, match="puts 64 ranks on this machine, which has"), Ground.build(Plan(dp=64), "cuda"):
        pass


def test_wrong_world() -> None:
    with pytest.raises(PlanError, match="needs 2 processes but 1 were started"), Ground.build(TWO, "cpu"):
        pass
