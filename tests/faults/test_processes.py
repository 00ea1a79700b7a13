"""Ranks killed, stopped or stuck: the run names the rank, restarts, and ends as if uninterrupted."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from colonnade.checkpoint import atomic_folder as folders
from colonnade.checkpoint import native
from colonnade.checkpoint.file_lock import LOCK
from colonnade.config import Plan, RunConfig, TrainConfig
from colonnade.train.loop import train
from tests.corpora import tensors
from tests.faults import faulty_run
from tests.worlds import run as in_world

pytestmark = pytest.mark.timeout(900)


@pytest.fixture
def config(config: RunConfig) -> RunConfig:
    return config.replace(plan=Plan(tp=2), train=config.train.replace(restarts=1))


def with_short_timeout(config: RunConfig, restarts: int) -> RunConfig:
    """With a timeout long enough for a busy machine, but short enough for a test."""
    return config.replace(train=config.train.replace(timeout_s=8.0, restarts=restarts))


def start(fault_list: str, config: RunConfig, *before: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *before, str(faulty_run.__file__), fault_list, config.model_dump_json()],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        cwd=Path(__file__).parents[2], env={**os.environ, "PYTHONPATH": "."},
    )  # fmt: skip


def finish(process: subprocess.Popen[str]) -> str:
    try:
        return process.communicate(timeout=220)[0]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            print(process.communicate()[0])


WHOLE: dict[str, dict] = {}
"""Final tensors of uninterrupted runs, by config."""


def uninterrupted(config: RunConfig) -> dict:
    """The result of a run like ``config`` that is not restarted; cached for all tests."""
    whole = config.replace(name="whole", train=config.train.replace(restarts=0, timeout_s=TrainConfig().timeout_s))
    key = whole.replace(runs=Path()).model_dump_json()
    if key not in WHOLE:
        in_world(2, train, whole)
        WHOLE[key] = tensors(whole.folder / "step-12")
    return WHOLE[key]


def same_as_uninterrupted(config: RunConfig) -> None:
    assert tensors(config.folder / "step-12") == uninterrupted(config)
    assert not list(config.folder.glob(".*"))


def has_ended(pid: int) -> bool:
    """Whether a process has ended (its parent may not have waited for it yet)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 100
    while not condition():
        assert time.monotonic() < deadline, "condition not met in time"
        time.sleep(0.05)


@pytest.mark.slow
def test_second_start_of_a_running_run_is_refused(config: RunConfig) -> None:
    first = start("none", config.replace(plan=Plan()))
    try:
        wait_for((config.folder / LOCK).exists)
        os.killpg(first.pid, signal.SIGSTOP)  # so that it does not end before the second starts
        second = start("none", config)
        output = finish(second)
        assert re.search(rf"CheckpointError: (rank \d: )?{config.folder} is in use by process \d+ on", output), output
        assert "restarting" not in output and second.returncode == 1
    finally:
        os.killpg(first.pid, signal.SIGCONT)
        output = finish(first)
    assert output.rstrip().endswith("ended 12") and first.returncode == 0, output
    assert [step for step, _ in folders.list_steps(config.folder)] == [12, 8, 4]


@pytest.mark.slow
def test_rank_killed_in_a_save_and_in_a_step_is_restarted(config: RunConfig) -> None:
    config = config.replace(train=config.train.replace(restarts=2))
    process = start("kill in save,kill in step", config)
    output = finish(process)
    again = re.findall(r"rank 1 was killed by SIGKILL .*; restarting, (\d) of at most 2 times\n", output)
    assert again == ["1", "2"], output
    first, second = re.findall(r"resumed \S+/step-(\d+)\b", output)
    assert first == "4" and second in ("4", "8"), output
    assert output.rstrip().endswith("ended 12") and process.returncode == 0
    same_as_uninterrupted(config)


@pytest.mark.slow
def test_torchrun_restarts_a_killed_rank(config: RunConfig) -> None:
    bare = config.replace(train=config.train.replace(restarts=0))
    process = start("kill in step", bare, "-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=1")
    output = finish(process)
    assert re.search(r"resumed \S+/step-[48]\b", output) and "ended 12" in output, output
    assert process.returncode == 0
    same_as_uninterrupted(bare)


@pytest.mark.slow
def test_stopped_rank_is_named_and_the_run_restarts(config: RunConfig) -> None:
    process = start("stop", with_short_timeout(config, 1))
    wait_for((config.runs / "struck by stop").exists)
    waiting, stopped = (int((config.runs / f"pid-{rank}").read_text()) for rank in (0, 1))
    wait_for(lambda: has_ended(waiting))  # rank 0 ends by itself, while rank 1 is stopped
    assert not has_ended(stopped)
    os.kill(stopped, signal.SIGKILL)  # torch's agent would do so after 30 s
    output = finish(process)
    line = r"step 10: rank 0 computes and has waited for \S+ s; missing of 2 ranks: rank 1, silent for at least \S+ s, "
    assert re.search(line + r"last seen in step \d+ \([a-z ]+\); .*; restarting, 1 of at most 1", output), output
    assert output.rstrip().endswith("ended 12") and process.returncode == 0
    same_as_uninterrupted(config)


@pytest.mark.slow
def test_stuck_rank_is_named(config: RunConfig) -> None:
    process = start("stuck", with_short_timeout(config, 0))
    output = finish(process)
    assert process.returncode == 1
    assert re.search(
        r"WorkerError: step 10: .* alive but make no progress: rank 1 reads samples in step 10 for \S+ s; check",
        output,
    ), output
    assert [step for step, _ in folders.list_steps(config.folder)][-1] == 4
    in_world(2, train, config)
    same_as_uninterrupted(config)


@pytest.mark.slow
def test_truncated_shard_is_named_and_not_retried(config: RunConfig) -> None:
    in_world(2, train, config.replace(train=config.train.replace(steps=8)))
    shard = config.folder / "step-8" / "exp_avg-00001.safetensors"
    os.truncate(shard, shard.stat().st_size // 2)
    before = tensors(config.folder / "step-4")
    process = start("none", config)
    output = finish(process)
    assert process.returncode == 1
    assert re.search(rf"CheckpointError: (rank 1: )?{shard} has \d+ bytes instead of \d+; restore it or use", output), (
        output
    )
    assert "restarting" not in output
    assert native.newest(config.folder) == config.folder / "step-4"
    assert tensors(config.folder / "step-4") == before
