"""A lock file on a run's folder: only one training run writes there at a time.

``runs/NAME/.lock`` names its owner: host, pid, start times, and the scheduler's job. It is created with O_EXCL, which
is atomic on local and network file systems; flock is not available on all of them. A thread of the owner touches the
file every ``heartbeat_s``, so its modification time is a heartbeat. Whether the owner is alive:

    same boot and pid namespace        its process exists and has the recorded start time: known at once
    another machine or container       its heartbeat is younger than ``stale_s`` by the file system's clock

A dead owner is replaced: the process that creates ``.lock.takeover`` (O_EXCL again) reads the lock once more and
renames a new one over it. An owner that was suspended for longer than ``stale_s`` may have lost its lock, and must not
write any more: :meth:`FileLock.check` before each save.
"""

import json
import os
import secrets
import socket
import sys
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from colonnade.errors import CheckpointError
from colonnade.proc_stat import stat_fields

LOCK = ".lock"
HEARTBEAT_S = 10.0
STALE_S = 120.0
_POLL_S = 0.25


class FileLock:
    """The lock of the folder ``run``: :meth:`acquire` it, :meth:`check` it before writing, :meth:`release` it."""

    def __init__(
        self, run: Path, job: tuple[str, str] = ("", ""), *, heartbeat_s: float = HEARTBEAT_S, stale_s: float = STALE_S
    ):
        """``job`` is the scheduler's job id and attempt: a requeued job waits for its previous attempt."""
        self.run, self.file = run, run / LOCK
        self._job, self._heartbeat_s, self._stale_s = job, heartbeat_s, stale_s
        self._contents = ""
        """The contents of the lock file while this process owns it."""
        self._released = threading.Event()
        self._thread: threading.Thread | None = None

    def acquire(self) -> None:
        """Acquires the lock; raises :class:`CheckpointError`, naming the owner, when another process has it.

        It raises as soon as the owner is known to be alive: immediately on this machine, after its next heartbeat on
        another. It waits only for an earlier attempt of the same job, for at most ``stale_s``.
        """
        owner = {
            "host": socket.gethostname(),
            "machine": _machine_id(),
            "pid": os.getpid(),
            "started": _start_time(os.getpid()),
            "since": datetime.now(UTC).isoformat(timespec="seconds"),
            "job": self._job[0],
            "attempt": self._job[1],
            "token": secrets.token_hex(8),
        }
        contents = json.dumps(owner)
        own = self.file.with_name(f"{LOCK}.{owner['token']}")
        try:
            self.run.mkdir(parents=True, exist_ok=True)
            own.write_text(contents, encoding="utf-8")
            try:
                self._create_or_take_over(own, contents)
            finally:
                own.unlink(missing_ok=True)
        except OSError as why:
            raise CheckpointError(f"{self.run} cannot be locked: {why}; make it writable, or use other --runs") from why
        self._contents = contents
        self._thread = threading.Thread(target=self._heartbeat, name="lock heartbeat", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raises :class:`CheckpointError` when another process has taken over the lock."""
        if (contents := _read(self.file)) != self._contents:
            now = f"{_describe(_parse_owner(contents))} has it" if contents is not None else "its lock was deleted"
            raise CheckpointError(
                f"{self.run} is no longer locked by this run: {now}; this process was suspended or disconnected for "
                "too long, and will exit without saving"
            )

    def release(self) -> None:
        """Deletes the lock, if this process still owns it."""
        if self._thread is None:
            return
        self._released.set()
        self._thread.join()
        self._thread = None
        if _read(self.file) == self._contents:
            self.file.unlink(missing_ok=True)

    def _create_or_take_over(self, own: Path, contents: str) -> None:
        """Makes the lock file contain ``contents``, which the file ``own`` contains already."""
        started_s, first_beat = time.monotonic(), None
        while not _create_exclusive(self.file, contents):
            current, beat = _read(self.file), _mtime(self.file)
            if current is None or beat is None:
                continue  # released just now
            owner = _parse_owner(current)
            if not self._is_alive(owner, beat, own):
                if self._take_over(current, own):
                    return
            else:
                certain = owner.get("machine") == _machine_id() or (first_beat is not None and beat != first_beat)
                if certain and not (self._is_same_job(owner) and time.monotonic() - started_s < self._stale_s):
                    raise CheckpointError(
                        f"{self.run} is in use by {_describe(owner)}; wait for it to finish, or stop it, or use "
                        f"another --name (if you are certain that it is no longer running, delete {self.file})"
                    )
                if first_beat is None:
                    print(f"waiting for {self.run}, in use by {_describe(owner)}", file=sys.stderr, flush=True)
                    first_beat = beat
            time.sleep(_POLL_S)

    def _is_same_job(self, owner: dict[str, Any]) -> bool:
        """Whether the owner is another attempt of this process's job."""
        job, attempt = self._job
        return bool(job) and owner.get("job") == job and owner.get("attempt") != attempt

    def _is_alive(self, owner: dict[str, Any], beat: float, own: Path) -> bool:
        if owner.get("machine") == _machine_id():
            return _start_time(owner["pid"]) == owner["started"]
        return _filesystem_now(own) - beat < self._stale_s

    def _take_over(self, current: str, own: Path) -> bool:
        """Renames ``own`` over a lock that still contains ``current``; False when another process does the same."""
        takeover = self.file.with_name(f"{LOCK}.takeover")
        if not _create_exclusive(takeover, ""):
            created = _mtime(takeover)
            if created is not None and _filesystem_now(own) - created > self._stale_s:
                takeover.unlink(missing_ok=True)  # left by a process that was killed between the next lines
            return False
        try:
            if _read(self.file) != current:
                return False
            os.utime(own)
            own.replace(self.file)
            return True
        finally:
            takeover.unlink(missing_ok=True)

    def _heartbeat(self) -> None:
        while not self._released.wait(self._heartbeat_s):
            try:
                if _read(self.file) != self._contents:
                    return  # check() raises the error
                os.utime(self.file)
            except OSError:  # the file server does not answer: a later heartbeat may succeed, or the lock becomes stale
                continue


def _create_exclusive(file: Path, contents: str) -> bool:
    """Creates ``file``; False when it exists already."""
    try:
        handle = os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
    except FileExistsError:
        return False
    try:
        os.write(handle, contents.encode())
        os.fsync(handle)
    except OSError:  # a full disk: an empty lock would look like one that is being written
        file.unlink()
        raise
    finally:
        os.close(handle)
    return True


def _read(file: Path) -> str | None:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return None


def _mtime(file: Path) -> float | None:
    try:
        return file.stat().st_mtime
    except FileNotFoundError:
        return None


def _filesystem_now(file: Path) -> float:
    """Touches ``file`` and returns the time by the clock of its file system."""
    os.utime(file)
    return file.stat().st_mtime


def _parse_owner(contents: str) -> dict[str, Any]:
    """The owner in a lock file's contents; empty while the file is being written."""
    try:
        owner = json.loads(contents)
    except ValueError:
        return {}
    return owner if isinstance(owner, dict) and {"machine", "pid", "started"} <= owner.keys() else {}


def _describe(owner: dict[str, Any]) -> str:
    if not owner:
        return "a process that has not written its name"
    job = f", job {owner['job']}" if owner.get("job") else ""
    return f"process {owner['pid']} on {owner.get('host')}{job}, since {owner.get('since')}"


def _machine_id() -> str:
    """The boot id and pid namespace of this process; the host's name where there is no /proc."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    if not boot.is_file():
        return socket.gethostname()
    return f"{boot.read_text().strip()} {Path('/proc/self/ns/pid').readlink()}"


def _start_time(pid: int) -> str | None:
    """The start time of a process on this machine, as the kernel reports it; None when it is not running."""
    if not Path("/proc/self/stat").is_file():
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return None
        except PermissionError:  # it belongs to another user
            return ""
        return ""
    try:
        fields = stat_fields(pid)
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else fields[19]
