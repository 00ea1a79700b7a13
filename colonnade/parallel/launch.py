"""Starts a plan's processes and reports their failures.

    launch(work, (argument, …), plan)

calls ``work`` in ``plan.world`` local processes through torch's elastic launcher and returns rank 0's result. In a
world of one, or in a process that torchrun started, it just calls ``work``. When a worker fails, the others are
stopped, and the user reads one line with the rank that failed *first* and why, not eight tracebacks of collectives
that lost their peer.
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
from collections.abc import Callable, Iterator, Sequence
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
from colonnade.cores import child_placement, threads_per_rank
from colonnade.errors import Interrupted

Result = TypeVar("Result")
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
"""Signals by which users and schedulers stop a process."""
PEER_LOST = re.compile("Connection (closed|reset) by peer|Broken pipe")
"""Gloo's error in a rank that lost a peer."""
PEER_LOST_S = 1.0
"""How long such a rank waits before it ends [s]. The agent polls its processes every 0.1 s and reports the exit code of
the first one that has ended; thanks to this delay that is the lost peer.
"""
GPUS_VARIABLE = "CUDA_VISIBLE_DEVICES"
REPORTS_VARIABLE = "COLONNADE_REPORTS"
"""Environment variable of our workers: the folder for their failure reports."""


def launch(
    work: Callable[..., Result],
    args: tuple[Any, ...],
    plan: Plan,
    restarts: int = 0,
    cpus: Sequence[Sequence[int]] = (),
) -> Result:
    """Run ``work(*args)`` in every process of ``plan`` and return rank 0's result.

    ``cpus`` are those of each rank, for a plan of several; by default all share the machine's.

    ``work`` and its arguments must be importable and picklable (they are sent to our own children only). Raises the
    failing worker's :class:`~colonnade.errors.ColonnadeError` with its rank, :class:`~colonnade.errors.WorkerError`
    for any other failure, :class:`~colonnade.errors.Interrupted` when a signal ended the run.

    After a WorkerError all processes are restarted, ``restarts`` times at most. torch's agent can restart a group too,
    but cannot distinguish a crash from a user's mistake, which would only fail again.
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
                return _run_elastic(work, args, plan, Path(reports), cpus)
        except errors.WorkerError as failure:
            if tried == restarts:
                raise
            tried += 1
            print(f"{failure}; restarting, {tried} of at most {restarts} times", file=sys.stderr, flush=True)


def end_process(error: errors.ColonnadeError) -> NoReturn:
    """Exit immediately with ``error``, from any thread, where no exception would reach the main thread."""
    if reports := os.environ.get(REPORTS_VARIABLE):
        _report(error, reports)
    else:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def launched() -> bool:
    """Whether this process is part of a group started by torchrun, :func:`launch` or the caller."""
    return dist.is_torchelastic_launched() or dist.is_initialized()


def rank_and_world() -> tuple[int, int]:
    """(rank, world size) that the launcher gave this process."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def local_world_size() -> int:
    """Launched processes on this machine; 1 without a launcher."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def local_rank() -> int:
    """This process's rank among the launched ones on this machine."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def visible_gpus() -> tuple[str, ...]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    given = os.environ.get(GPUS_VARIABLE)
    return tuple(given.split(",") if given else map(str, range(count)))[:count]


def use_gpus(gpus: Sequence[str]) -> None:
    """Let this process and its children use only ``gpus``; before any of them uses CUDA."""
    os.environ[GPUS_VARIABLE] = ",".join(gpus)


def slurm_job() -> tuple[str, str]:
    """(id, restart count) of the Slurm job, empty outside one; a requeue keeps the id."""
    return os.environ.get("SLURM_JOB_ID", ""), os.environ.get("SLURM_RESTART_COUNT", "")


def local_ranks(plan: Plan) -> int:
    """How many ranks of ``plan`` run on this machine."""
    return int(os.environ["LOCAL_WORLD_SIZE"]) if dist.is_torchelastic_launched() else plan.world


def _run_elastic(
    work: Callable[..., Result], args: tuple[Any, ...], plan: Plan, reports: Path, cpus: Sequence[Sequence[int]]
) -> Result:
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
        logs_specs=DefaultLogsSpecs(log_dir=str(reports / "logs")),  # deleted at the end
        local_addr="127.0.0.1",
    )
    # The agent logs each failure at length; our error has one line, and the reports hold the rest.
    verbose = ("torch.distributed.elastic", "torch.distributed.launcher", "torch.multiprocessing.spawn")
    # Each module's logger has its own level, so setting the parent's is not enough.
    loggers = [logging.getLogger(name) for name in list(logging.root.manager.loggerDict) if name.startswith(verbose)]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        with _sigint_blocked_in_children(), child_placement(None, os.environ):
            results = elastic_launch(config, _worker)(
                work, args, plan.world, str(reports), loaded_plugins(), cpus
            )  # fmt: skip
        return results[0]
    except ChildFailedError as failure:
        raise _explain(failure, reports) from None
    except SignalException as stop:
        raise Interrupted(int(stop.sigval)) from None
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)


@contextmanager
def _sigint_blocked_in_children() -> Iterator[None]:
    """Start children with SIGINT blocked until :func:`_worker` unblocks it.

    Ctrl-C in a terminal reaches the children too; during their imports it would be lost, or end each with a traceback.
    They inherit the signal mask of the thread that starts them, so it is blocked here. This process still receives the
    signal through another thread: Python runs handlers in the main thread whichever thread received the signal.
    """
    resource_tracker.ensure_running()  # otherwise the first child starts it, and it unblocks the signal
    done = threading.Event()
    threading.Thread(target=done.wait, name="receives-SIGINT", daemon=True).start()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        done.set()


def _worker(
    work: Callable[..., Result],
    args: tuple[Any, ...],
    world: int,
    reports: str,
    plugins: tuple[str, ...],
    cpus: Sequence[Sequence[int]],
) -> Result:
    """Run in the child: divide the cores, call ``work``, and write a report when it fails."""
    if cpus and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cpus[local_rank()])
    else:
        torch.set_num_threads(min(torch.get_num_threads(), threads_per_rank(world)))
    os.environ[REPORTS_VARIABLE] = reports
    # Nothing here uses NVLink multicast, which torch would set up for each symmetric buffer.
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # delivers one that arrived during startup
        for plugin in plugins:
            load_plugin(plugin)
        return work(*args)
    except (Interrupted, KeyboardInterrupt) as stop:
        # The agent that forwarded the signal waits for this process to end, and would kill it after a return.
        number = stop.signal if isinstance(stop, Interrupted) else signal.SIGINT
        sys.stdout.flush()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        raise
    except BaseException as error:
        if isinstance(error, SystemExit) and not error.code:
            raise
        _report(error, reports)
        if PEER_LOST.search(str(error)):
            time.sleep(PEER_LOST_S)
        raise SystemExit(1) from None


def _report(error: BaseException, folder: str) -> None:
    report = {
        "time": time.time(),
        "kind": type(error).__name__,
        "ours": isinstance(error, errors.ColonnadeError),
        "message": str(error),
        "traceback": "".join(traceback.format_exception(error)),
    }
    file = Path(folder, f"{os.environ['RANK']}.json")
    file.with_suffix(".part").write_text(json.dumps(report))
    file.with_suffix(".part").rename(file)  # atomic: this process may be killed meanwhile


def _explain(failed: ChildFailedError, folder: Path) -> Exception:
    """Return one error for the first failure: a worker's report, or the signal that killed it."""
    reports = {int(path.stem): json.loads(path.read_text()) for path in folder.glob("*.json")}
    # The watchdog's report has more information than the missing rank's exit code: the rank may have been killed
    # afterwards.
    missing = [report["message"] for report in reports.values() if report["kind"] == errors.WorkerError.__name__]
    if missing:
        return errors.WorkerError(missing[0])
    # A killed process leaves no report, and its peers report that they lost it: it comes first.
    for rank, failure in sorted(failed.failures.items()):
        if failure.exitcode < 0 and -failure.exitcode not in STOP_SIGNALS and rank not in reports:
            name = signal.Signals(-failure.exitcode).name
            hint = " (usually because it ran out of memory)" if name == "SIGKILL" else ""
            return errors.WorkerError(f"rank {rank} was killed by {name}{hint}; the run was stopped")
    stops = [-f.exitcode for f in failed.failures.values() if -f.exitcode in STOP_SIGNALS]
    if not reports and stops:
        return Interrupted(stops[0])
    if not reports:
        codes = {rank: failure.exitcode for rank, failure in failed.failures.items()}
        return errors.WorkerError(f"workers ended without a report, exit codes by rank: {codes}")
    # A rank that lost a peer may report it before the peer reports its own failure.
    rank, first = min(reports.items(), key=lambda item: (bool(PEER_LOST.search(item[1]["message"])), item[1]["time"]))
    if first["ours"]:
        kind = getattr(errors, first["kind"], errors.ColonnadeError)
        return kind(f"rank {rank}: {first['message']}" if rank else first["message"])
    error = errors.WorkerError(f"rank {rank} failed with {first['kind']}: {first['message']}")
    error.add_note(first["traceback"])
    return error
