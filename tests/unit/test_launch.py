"""The launcher returns results and reports the one failure that caused the others."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from colonnade.config import Plan
from colonnade.cores import OPENMP_VARIABLES, read_machine
from colonnade.errors import DataError, PlanError
from colonnade.parallel.distributed_context import DistributedContext, choose_device
from colonnade.parallel.launch import launch

TWO = Plan(tp=2)


def work(how: str) -> tuple[list[float], int, int]:
    """Two ranks reduce once; then rank 1 fails as ``how`` says while rank 0 waits in a second reduction."""
    with DistributedContext.build(TWO) as context:
        tp = context.axes.tp
        total = tp.fan_in(torch.full((2,), float(context.rank + 1)))
        if context.rank == 1:
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "raises":
                raise ValueError("a bug")
            if how == "exits":
                raise SystemExit(3)
            if how == "ours":
                raise DataError("corpus is empty; add text")
        return tp.fan_in(total).tolist(), *pid_and_threads()


def choose_and_work() -> tuple[str, list[float], int, int]:
    """Device that each rank chooses on a machine with one GPU, and the result of a run there."""
    torch.cuda.is_available, torch.cuda.device_count = (lambda: True), (lambda: 1)
    return choose_device(TWO, "auto"), *work("well")


def pid_and_threads() -> tuple[int, int]:
    return os.getpid(), torch.get_num_threads()


@pytest.mark.slow
def test_returns_rank_0_result_and_workers_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine with one GPU all ranks use the CPU."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.setenv(name, "999")
    chosen, sums, pid, threads = launch(choose_and_work, (), TWO)
    assert chosen == "cpu" and sums == [6.0, 6.0]
    assert pid != os.getpid()
    assert threads == max(1, read_machine().usable // 2)


def waiting() -> str | None:
    return os.environ.get("OMP_WAIT_POLICY")


@pytest.mark.slow
def test_waiting_threads_of_workers_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for a program that did not start on the command line."""
    for name in OPENMP_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert launch(waiting, (), TWO) == "PASSIVE" and waiting() is None


def test_world_of_one_runs_in_this_process() -> None:
    assert launch(pid_and_threads, (), Plan())[0] == os.getpid()


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("how", "kind", "message"),
    [
        (
            "killed",
            PlanError,
            r"^rank 1 was killed by SIGKILL \(usually because it ran out of memory\)",
        ),
        ("raises", PlanError, r"(?m)^rank 1 failed with ValueError: a bug$"),
        ("exits", PlanError, r"(?m)^rank 1 failed with SystemExit: 3$"),
        ("ours", DataError, r"^rank 1: corpus is empty; add text$"),
    ],
)
def test_the_first_failure_is_reported(how: str, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message) as failure:
        launch(work, (how,), TWO)
    if how == "raises":
        assert "test_launch.py" in "".join(failure.value.__notes__), "a bug keeps its traceback"


SLOW_START = """
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


@pytest.mark.slow
def test_ctrl_c_while_workers_start(tmp_path: Path) -> None:
    """A terminal sends it to all processes; it is neither lost nor answered with tracebacks."""
    script = tmp_path / "slow.py"
    script.write_text(SLOW_START)
    command = [sys.executable, str(script)]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    assert run.stdout is not None
    assert [run.stdout.readline().strip() for _ in range(2)] == ["begins"] * 2
    os.killpg(run.pid, signal.SIGINT)
    interrupted = time.monotonic()
    output, errors = run.communicate(timeout=120)
    assert time.monotonic() - interrupted < 20
    assert (output.strip(), errors, run.returncode) == ("stopped by SIGINT", "", 0)


def test_more_ranks_than_gpus_is_refused() -> None:
    if torch.cuda.device_count() >= 64:
        pytest.skip("needs fewer than 64 GPUs")
    with (
        pytest.raises(PlanError, match="puts 64 ranks on this machine, which has"),
        DistributedContext.build(Plan(dp=64), "cuda"),
    ):
        pass


def test_wrong_world_size_is_refused() -> None:
    with pytest.raises(PlanError, match="needs 2 processes but 1 were started"), DistributedContext.build(TWO, "cpu"):
        pass
