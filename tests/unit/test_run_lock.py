"""A run's lock between real processes: started twice, killed, requeued, and owners on unreachable machines."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from colonnade.checkpoint.file_lock import LOCK, FileLock
from colonnade.errors import CheckpointError

PROGRAM = """
import sys
from pathlib import Path
from colonnade.checkpoint.file_lock import FileLock
from colonnade.errors import CheckpointError
run, job, attempt, stale_s = sys.argv[1:]
lock = FileLock(Path(run), (job, attempt), heartbeat_s=0.1, stale_s=float(stale_s))
try:
    lock.acquire()
except CheckpointError as error:
    sys.exit(f"refused: {error}")
print("owns", flush=True)
sys.stdin.readline()
lock.check()
lock.release()
print("released", flush=True)
"""


class Starter:
    """Starts owners of a folder's lock, and ends them all."""

    def __init__(self, run: Path):
        self.run = run
        self.started: list[subprocess.Popen[str]] = []

    def __call__(self, job: str = "", attempt: str = "", stale_s: float = 60.0) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(self.run), job, attempt, str(stale_s)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            cwd=Path(__file__).parents[2], env={**os.environ, "PYTHONPATH": "."},
        )  # fmt: skip
        self.started.append(process)
        return process


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Starter]:
    starter = Starter(tmp_path / "runs" / "it")
    yield starter
    for process in starter.started:
        process.kill()
        process.communicate()


def owns(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    assert process.stdout.readline() == "owns\n"


def assert_clean_exit(process: subprocess.Popen[str]) -> None:
    output, errors = process.communicate("\n", timeout=120)
    assert (output, process.returncode) == ("released\n", 0), errors


def refused(process: subprocess.Popen[str]) -> str:
    output, errors = process.communicate(timeout=120)
    assert (output, process.returncode) == ("", 1)
    return errors


def foreign_lock(run: Path, **changes: str) -> str:
    """A lock owned by a process on an unreachable machine, without heartbeat."""
    run.mkdir(parents=True, exist_ok=True)
    lock = {"host": "node-7", "machine": "another boot", "pid": 1, "started": "5", "token": "t", "job": "", "since": ""}
    (run / LOCK).write_text(text := json.dumps(lock | changes))
    return text


def test_second_start_is_refused_until_the_first_ends(start: Starter) -> None:
    owns(first := start())
    complaint = refused(start())
    assert f"{start.run} is in use by process {first.pid} on " in complaint
    assert "use another --name" in complaint and f"delete {start.run / LOCK}" in complaint
    assert_clean_exit(first)
    assert not list(start.run.iterdir())
    owns(third := start())
    assert_clean_exit(third)


def test_killed_owner_is_replaced_at_once(start: Starter) -> None:
    owns(first := start())
    first.send_signal(signal.SIGKILL)  # and not waited for: it stays a zombie
    owns(second := start())
    assert json.loads((start.run / LOCK).read_text())["pid"] == second.pid
    assert_clean_exit(second)


def test_exactly_one_process_takes_a_stale_lock(start: Starter) -> None:
    owns(first := start())
    first.kill()
    others = [start() for _ in range(6)]
    first_lines = [process.stdout.readline() for process in others if process.stdout]
    assert sorted(first_lines) == [""] * 5 + ["owns\n"]
    assert_clean_exit(others[first_lines.index("owns\n")])
    assert not list(start.run.iterdir())


def test_requeued_job_waits_for_its_predecessor(start: Starter) -> None:
    owns(first := start("77", ""))
    assert ", job 77, since 20" in refused(start("77", "")), "the same attempt started twice"
    assert "is in use by" in refused(start("78", "1")), "another job"
    assert "is in use by" in refused(start("77", "1", stale_s=0.5)), "the wait is bounded"
    second = start("77", "1")
    assert second.stderr is not None
    assert second.stderr.readline().startswith(f"waiting for {start.run}, in use by process {first.pid}")
    assert_clean_exit(first)
    owns(second)
    assert_clean_exit(second)


def test_reused_pid_is_not_the_owner(start: Starter) -> None:
    owns(first := start())
    lock = json.loads((start.run / LOCK).read_text())
    (start.run / LOCK).write_text(json.dumps(lock | {"started": "1"}))  # the pid was used before
    owns(second := start())
    assert_clean_exit(second)
    assert "is no longer locked by this run: its lock was deleted" in first.communicate("\n")[1]


@pytest.mark.sample(1)
@pytest.mark.parametrize("text", ["elsewhere", "", "half of {", '{"pid": 1}', "[]"])
def test_unreachable_owner_without_heartbeat_is_replaced(tmp_path: Path, capsys, text: str) -> None:
    lock_text = text if text != "elsewhere" else foreign_lock(tmp_path)
    for silent_s, waits in ((0, True), (500, False)):
        (tmp_path / LOCK).write_text(lock_text)
        os.utime(tmp_path / LOCK, (time.time() - silent_s,) * 2)
        lock = FileLock(tmp_path, stale_s=1.0 if waits else 120.0)
        lock.acquire()
        assert ("waiting for" in capsys.readouterr().err) == waits
        lock.check()
        lock.release()
        assert not list(tmp_path.iterdir())


def test_owner_with_heartbeat_keeps_its_lock(tmp_path: Path, capsys) -> None:
    foreign_lock(tmp_path, job="5")
    over = threading.Event()

    def beat() -> None:
        while not over.wait(0.1):
            os.utime(tmp_path / LOCK)

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        with pytest.raises(CheckpointError, match="in use by process 1 on node-7, job 5"):
            FileLock(tmp_path, stale_s=60).acquire()
    finally:
        over.set()
        thread.join()
    assert "waiting for" in capsys.readouterr().err


def test_owner_that_lost_its_lock_does_not_write(tmp_path: Path) -> None:
    lock = FileLock(tmp_path, heartbeat_s=0.05)
    lock.acquire()
    before = (tmp_path / LOCK).stat().st_mtime_ns
    while (tmp_path / LOCK).stat().st_mtime_ns == before:  # its heartbeat runs
        time.sleep(0.01)
    text = foreign_lock(tmp_path)
    with pytest.raises(CheckpointError, match=r"no longer locked by this run: process 1 on node-7.* has it"):
        lock.check()
    lock.release()
    assert (tmp_path / LOCK).read_text() == text, "the lock of another owner must not be removed"


def test_unwritable_folder_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"cannot be locked: .*; make it writable, or use other --runs"):
        FileLock(tmp_path / "file").acquire()


@pytest.mark.skipif(not Path("/proc/self/comm").is_file(), reason="the name is that of Linux")
def test_a_program_may_have_any_name(tmp_path: Path) -> None:
    """The kernel cuts names after 15 bytes, within a letter."""
    name = Path("/proc/self/comm")
    before = name.read_bytes().strip()
    name.write_bytes("обслуживание".encode()[:15])
    try:
        lock = FileLock(tmp_path / "it")
        lock.acquire()
        lock.release()
    finally:
        name.write_bytes(before)
