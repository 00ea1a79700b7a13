"""The launcher: results come back, and so does the one failure that explains all the others."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from colonnade.config import Plan
from colonnade.errors import DataError, PlanError
from colonnade.parallel.distributed_context import DistributedContext, choose_device
from colonnade.parallel.launch import launch

TWO = Plan(tp=2)


def work(how: str) -> tuple[list[float], int, int]:
    """Two ranks meet in a collective; then rank 1 meets its fate, and rank 0 waits for it in another."""
    with DistributedContext.build(TWO) as context:
        tp = context.axes.tp
        met = tp.fan_in(torch.full((2,), float(context.rank + 1)))
        if context.rank == 1:
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "raises":
                raise ValueError("a bug")
            if how == "exits":
                raise SystemExit(3)
            if how == "ours":
                raise DataError("corpus is empty; add text")
        return tp.fan_in(met).tolist(), *where()


def well() -> tuple[str, list[float], int, int]:
    """What each of the ranks chooses on a machine with one GPU, and a run on what it chose."""
    torch.cuda.is_available, torch.cuda.device_count = (lambda: True), (lambda: 1)
    return choose_device(TWO, "auto"), *work("well")


def where() -> tuple[int, int]:
    return os.getpid(), torch.get_num_threads()


def test_result_of_rank_0_and_workers_share_the_cores() -> None:
    """On a machine with one GPU all ranks are on the CPU."""
    chosen, sums, pid, threads = launch(well, (), TWO)
    assert chosen == "cpu" and sums == [6.0, 6.0]
    assert pid != os.getpid()
    assert threads == max(1, len(os.sched_getaffinity(0)) // 2)


def test_a_world_of_one_is_this_process() -> None:
    assert launch(where, (), Plan())[0] == os.getpid()


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
    with pytest.raises(kind, match=message) as failure:
        launch(work, (how,), TWO)
    if how == "raises":
        assert "test_launch.py" in "".join(failure.value.__notes__), "a bug keeps its traceback"


SLOW_TO_BEGIN = """
import os
import time
from colonnade.config import Plan
from colonnade.errors import Interrupted
from colonnade.parallel.launch import launch

def work():
    time.sleep(60)

if __name__ == "__main__":
    try:
        launch(work, (), Plan(tp=2))
    except Interrupted as stop:
        print(stop, flush=True)
else:
    os.write(1, b"begins\\n")  # in one piece
    time.sleep(1)
"""


def test_ctrl_c_while_the_workers_begin(tmp_path: Path) -> None:
    """A terminal sends it to all of them; it is neither lost nor answered with tracebacks."""
    script = tmp_path / "slow.py"
    script.write_text(SLOW_TO_BEGIN)
    command = [sys.executable, str(script)]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    assert run.stdout is not None
    assert [run.stdout.readline().strip() for _ in range(2)] == ["begins"] * 2
    os.killpg(run.pid, signal.SIGINT)
    asked = time.monotonic()
    said, errors = run.communicate(timeout=60)
    assert time.monotonic() - asked < 20
    assert (said.strip(), errors, run.returncode) == ("stopped by SIGINT", "", 0)


def test_more_gpus_than_there_are() -> None:
    if torch.cuda.device_count() >= 64:
        pytest.skip("needs fewer than 64 GPUs")
    with (
        pytest.raises(PlanError, match="puts 64 ranks on this machine, which has"),
        DistributedContext.build(Plan(dp=64), "cuda"),
    ):
        pass


def test_wrong_world() -> None:
    with pytest.raises(PlanError, match="needs 2 processes but 1 were started"), DistributedContext.build(TWO, "cpu"):
        pass
