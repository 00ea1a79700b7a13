"""A lock on a run's folder: one training run writes there at a time.

``runs/NAME/.lock`` names its owner: host, pid, when both were started, and the scheduler's job. It is created with
O_EXCL, which is atomic on local and on network file systems; flock is not on all of them. A thread of the owner touches
the file every ``beat_s``: its modification time is a heartbeat. Whether an owner still runs:

    the same boot and pid namespace    its process exists and was started when the lock says: certain, at once
    another machine or container       its heartbeat is younger than ``stale_s`` by the file system's own clock

An owner that does not run is replaced: whoever creates ``.lock.takeover`` (O_EXCL again) reads the lock once more and
renames a new one over it. An owner that was suspended for longer than ``stale_s`` finds another's name in its lock, and
must not write any more: :meth:`Lock.check` before each save.
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

LOCK = ".lock"
BEAT_S = 10.0
STALE_S = 120.0
_POLL_S = 0.25


class Lock:
    """The lock of the folder ``run``: :meth:`acquire` it, :meth:`check` it before writing, :meth:`release` it."""

    def __init__(self, run: Path, job: tuple[str, str] = ("", ""), *, beat_s: float = BEAT_S, stale_s: float = STALE_S):
        """``job`` is the scheduler's job and which attempt at it this is: a requeued one waits for its predecessor."""
        self.run, self.file = run, run / LOCK
        self._job, self._beat_s, self._stale_s = job, beat_s, stale_s
        self._mine = ""
        """What the file holds while this process owns it."""
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def acquire(self) -> None:
        """Own the folder, or raise :class:`CheckpointError` that names who does.

        A running owner is refused as soon as that is certain: at once on this machine, after its next heartbeat on
        another. Only an earlier attempt of the same job is waited for, ``stale_s`` at most.
        """
        owner = {
            "host": socket.gethostname(),
            "machine": _machine(),
            "pid": os.getpid(),
            "started": _started(os.getpid()),
            "since": datetime.now(UTC).isoformat(timespec="seconds"),
            "job": self._job[0],
            "attempt": self._job[1],
            "token": secrets.token_hex(8),
        }
        text = json.dumps(owner)
        mine = self.file.with_name(f"{LOCK}.{owner['token']}")
        try:
            self.run.mkdir(parents=True, exist_ok=True)
            mine.write_text(text, encoding="utf-8")
            try:
                self._take(mine, text)
            finally:
                mine.unlink(missing_ok=True)
        except OSError as why:
            raise CheckpointError(f"{self.run} cannot be locked: {why}; make it writable, or use other --runs") from why
        self._mine = text
        self._thread = threading.Thread(target=self._beat, name="lock heartbeat", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise :class:`CheckpointError` when another process has taken the folder over."""
        if (text := _read(self.file)) != self._mine:
            now = f"{_name(_owner(text))} has it" if text is not None else "its lock was deleted"
            raise CheckpointError(
                f"{self.run} is no longer this run's: {now}; this process was suspended or cut off for long, and "
                "ends without saving"
            )

    def release(self) -> None:
        """Leave the folder to others."""
        if self._thread is None:
            return
        self._over.set()
        self._thread.join()
        self._thread = None
        if _read(self.file) == self._mine:
            self.file.unlink(missing_ok=True)

    def _take(self, mine: Path, text: str) -> None:
        """Make the lock file hold ``text``, which ``mine`` holds already."""
        began_s, first_beat = time.monotonic(), None
        while not _created(self.file, text):
            held, beat = _read(self.file), _modified(self.file)
            if held is None or beat is None:
                continue  # released just now
            owner = _owner(held)
            if not self._runs(owner, beat, mine):
                if self._replace(held, mine):
                    return
            else:
                certain = owner.get("machine") == _machine() or (first_beat is not None and beat != first_beat)
                if certain and not (self._follows(owner) and time.monotonic() - began_s < self._stale_s):
                    raise CheckpointError(
                        f"{self.run} is in use by {_name(owner)}; wait for its end or stop it, or use another --name "
                        f"(if you are certain that it is gone, delete {self.file})"
                    )
                if first_beat is None:
                    print(f"waiting for {self.run}, in use by {_name(owner)}", file=sys.stderr, flush=True)
                    first_beat = beat
            time.sleep(_POLL_S)

    def _follows(self, owner: dict[str, Any]) -> bool:
        """Whether the owner is another attempt at this process's job."""
        job, attempt = self._job
        return bool(job) and owner.get("job") == job and owner.get("attempt") != attempt

    def _runs(self, owner: dict[str, Any], beat: float, mine: Path) -> bool:
        """Whether the owner's process exists, as far as can be known from here."""
        if owner.get("machine") == _machine():
            return _started(owner["pid"]) == owner["started"]
        return _touched(mine) - beat < self._stale_s

    def _replace(self, held: str, mine: Path) -> bool:
        """Rename ``mine`` over a lock that still says ``held``; False when somebody else is at it."""
        claim = self.file.with_name(f"{LOCK}.takeover")
        if not _created(claim, ""):
            at = _modified(claim)
            if at is not None and _touched(mine) - at > self._stale_s:
                claim.unlink(missing_ok=True)  # of a process that was killed between the next lines
            return False
        try:
            if _read(self.file) != held:
                return False
            os.utime(mine)
            mine.replace(self.file)
            return True
        finally:
            claim.unlink(missing_ok=True)

    def _beat(self) -> None:
        while not self._over.wait(self._beat_s):
            try:
                if _read(self.file) != self._mine:
                    return  # check() says so
                os.utime(self.file)
            except OSError:  # a server that does not answer: the next beat may reach it, and if none does we are stale
                continue


def _created(file: Path, text: str) -> bool:
    """Whether ``file`` did not exist and does now."""
    try:
        handle = os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
    except FileExistsError:
        return False
    try:
        os.write(handle, text.encode())
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


def _modified(file: Path) -> float | None:
    try:
        return file.stat().st_mtime
    except FileNotFoundError:
        return None


def _touched(file: Path) -> float:
    """The time by the clock of the file system that holds ``file``."""
    os.utime(file)
    return file.stat().st_mtime


def _owner(text: str) -> dict[str, Any]:
    """What a lock says; nothing while it is being written."""
    try:
        owner = json.loads(text)
    except ValueError:
        return {}
    return owner if isinstance(owner, dict) and {"machine", "pid", "started"} <= owner.keys() else {}


def _name(owner: dict[str, Any]) -> str:
    if not owner:
        return "a process that has not written its name"
    job = f", job {owner['job']}" if owner.get("job") else ""
    return f"process {owner['pid']} on {owner.get('host')}{job}, since {owner.get('since')}"


def _machine() -> str:
    """This boot of this machine and the namespace of its pids; the host's name where there is no /proc."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    if not boot.is_file():
        return socket.gethostname()
    return f"{boot.read_text().strip()} {Path('/proc/self/ns/pid').readlink()}"


def _started(pid: int) -> str | None:
    """When a process of this machine was started, in the kernel's own terms; None: it does not run."""
    if not Path("/proc/self/stat").is_file():
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return None
        except PermissionError:  # another user's
            return ""
        return ""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else fields[19]
