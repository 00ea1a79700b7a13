"""Starting the processes of a plan, and bringing their troubles home.

    launch(work, (argument, …), plan)

calls ``work`` in ``plan.world`` local processes through torch's own elastic launcher and returns rank 0's result. In a
world of one, or in a process that torchrun started, it just calls ``work``. A worker that fails takes the others with
it, and the user reads one line with the rank that failed *first* and why, not eight tracebacks of collectives that
lost their peer.
"""

import json
import logging
import os
import re
import signal
import sys
import tempfile
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from colonnade import errors
from colonnade.config import Plan
from colonnade.config.plugins import load_plugin, loaded_plugins
from colonnade.errors import Interrupted

Result = TypeVar("Result")
ASKED = (signal.SIGTERM, signal.SIGINT)
"""The signals by which people and schedulers ask a process to end."""
ECHO = re.compile("Connection (closed|reset) by peer|Broken pipe")
"""What gloo says in a rank whose peer is gone."""
REPORTS = "COLONNADE_REPORTS"
"""Set in our workers: the folder into which the last words of each go."""


def launch(work: Callable[..., Result], args: tuple[Any, ...], plan: Plan, restarts: int = 0) -> Result:
    """``work(*args)`` in every process of ``plan``; the result of rank 0.

    ``work`` and its arguments must be importable and picklable (they are sent to our own children only). Raises the
    failing worker's :class:`~colonnade.errors.ColonnadeError` with its rank, :class:`~colonnade.errors.WorkerError`
    for any other death, :class:`~colonnade.errors.Interrupted` when a signal ended the run.

    After a WorkerError all processes are started again, ``restarts`` times at most. torch's agent can restart a group
    too, but not tell a death from a user's mistake, which would only be made again.
    """
    if dist.is_torchelastic_launched():
        plan.check_world(int(os.environ["WORLD_SIZE"]))
        return work(*args)
    if plan.world == 1 and not restarts:
        return work(*args)
    tried = 0
    while True:
        try:
            with tempfile.TemporaryDirectory(prefix="colonnade-") as reports:
                return _elastic(work, args, plan, Path(reports))
        except errors.WorkerError as death:
            if tried == restarts:
                raise
            tried += 1
            print(f"{death}; starting again, {tried} of at most {restarts} times", file=sys.stderr, flush=True)


def end_process(error: errors.ColonnadeError) -> NoReturn:
    """End this process at once with ``error``, from any thread, when the main thread is where no exception reaches."""
    if reports := os.environ.get(REPORTS):
        _report(error, reports)
    else:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def launched() -> bool:
    """Whether this process belongs to a group that somebody started: torchrun, :func:`launch`, or the caller."""
    return dist.is_torchelastic_launched() or dist.is_initialized()


def place() -> tuple[int, int]:
    """(rank, world) of this process as it was launched."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def beside() -> int:
    """How many processes of the launched group are on this machine; 1 where nobody says."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def local_rank() -> int:
    """This process's number among those of the launched group on this machine."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def job() -> tuple[str, str]:
    """(id, attempt) of this process's Slurm job, empty outside one; a requeue keeps the id."""
    return os.environ.get("SLURM_JOB_ID", ""), os.environ.get("SLURM_RESTART_COUNT", "")


def local_ranks(plan: Plan) -> int:
    """How many of the ranks are on this machine."""
    return int(os.environ["LOCAL_WORLD_SIZE"]) if dist.is_torchelastic_launched() else plan.world


def _elastic(work: Callable[..., Result], args: tuple[Any, ...], plan: Plan, reports: Path) -> Result:
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=plan.world,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        max_restarts=0,
        monitor_interval=0.1,
        start_method="spawn",
        logs_specs=DefaultLogsSpecs(log_dir=str(reports / "logs")),  # nothing stays behind in /tmp
        local_addr="127.0.0.1",
    )
    # The agent logs each failure at length; our one line says it, and the reports hold the rest.
    chatty = ("torch.distributed.elastic", "torch.distributed.launcher", "torch.multiprocessing.spawn")
    # Each module's logger has a level of its own, so that to quiet the parent is not enough.
    loggers = [logging.getLogger(name) for name in list(logging.root.manager.loggerDict) if name.startswith(chatty)]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        with _children_begin_deaf():
            results = elastic_launch(config, _worker)(work, args, plan.world, str(reports), loaded_plugins())
        return results[0]
    except ChildFailedError as death:
        raise _explain(death, reports) from None
    except SignalException as stop:
        raise Interrupted(int(stop.sigval)) from None
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)


@contextmanager
def _children_begin_deaf() -> Iterator[None]:
    """Children started inside have SIGINT blocked until :func:`_worker` unblocks it.

    Ctrl-C in a terminal reaches them too, and while they import it would break them halfway, with a traceback each,
    or be lost. They inherit the mask of the thread that starts them, so it is blocked here; the signal still comes to
    us through another thread that takes it, for Python runs handlers in the main thread whoever took it.
    """
    resource_tracker.ensure_running()  # the first child would start it, and it would unblock the signal
    over = threading.Event()
    threading.Thread(target=over.wait, name="takes-SIGINT", daemon=True).start()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        over.set()


def _worker(
    work: Callable[..., Result], args: tuple[Any, ...], world: int, reports: str, plugins: tuple[str, ...]
) -> Result:
    """In the child: share the cores out, run, and leave a report when it goes wrong."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(max(1, cores // world))
    os.environ[REPORTS] = reports
    # Nothing here uses NVLink's multicast, and torch would set it up with each buffer that ranks share.
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # one that came while we began strikes now
        for plugin in plugins:
            load_plugin(plugin)
        return work(*args)
    except (Interrupted, KeyboardInterrupt) as stop:
        # The agent that passed the signal on waits for our end; to return would be to wait until it kills us.
        number = stop.signal if isinstance(stop, Interrupted) else signal.SIGINT
        sys.stdout.flush()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        raise
    except BaseException as error:
        if isinstance(error, SystemExit) and not error.code:
            raise
        _report(error, reports)
        raise SystemExit(1) from None


def _report(error: BaseException, folder: str) -> None:
    """What the parent will say of this worker."""
    report = {
        "time": time.time(),
        "kind": type(error).__name__,
        "ours": isinstance(error, errors.ColonnadeError),
        "message": str(error),
        "traceback": "".join(traceback.format_exception(error)),
    }
    place = Path(folder, f"{os.environ['RANK']}.json")
    place.with_suffix(".part").write_text(json.dumps(report))
    place.with_suffix(".part").rename(place)  # whole or not at all: this process may be killed by then


def _explain(death: ChildFailedError, folder: Path) -> Exception:
    """One error for the first death: a worker's own report, or how the operating system ended it."""
    reports = {int(path.stem): json.loads(path.read_text()) for path in folder.glob("*.json")}
    # Who saw that a rank is missing knows more than its end says: it may have been killed because of that.
    silence = [report["message"] for report in reports.values() if report["kind"] == errors.WorkerError.__name__]
    if silence:
        return errors.WorkerError(silence[0])
    # A process that was killed leaves no report, and its peers then report that they lost it: it comes first.
    for rank, failure in sorted(death.failures.items()):
        if failure.exitcode < 0 and -failure.exitcode not in ASKED and rank not in reports:
            name = signal.Signals(-failure.exitcode).name
            hint = " (out of memory is the usual reason)" if name == "SIGKILL" else ""
            return errors.WorkerError(f"rank {rank} was killed by {name}{hint}; the run was stopped")
    asked = [-f.exitcode for f in death.failures.values() if -f.exitcode in ASKED]
    if not reports and asked:
        return Interrupted(asked[0])
    if not reports:
        codes = {rank: failure.exitcode for rank, failure in death.failures.items()}
        return errors.WorkerError(f"workers ended without a report, exit codes by rank: {codes}")
    # Who lost a peer may have said so before the peer had said why it went.
    rank, first = min(reports.items(), key=lambda item: (bool(ECHO.search(item[1]["message"])), item[1]["time"]))
    if first["ours"]:
        kind = getattr(errors, first["kind"], errors.ColonnadeError)
        return kind(f"rank {rank}: {first['message']}" if rank else first["message"])
    failed = errors.WorkerError(f"rank {rank} failed with {first['kind']}: {first['message']}")
    failed.add_note(first["traceback"])
    return failed
