"""The engine's processes: started, watched, and never left behind.

For every world size the model runs in other processes, so the event loop never waits for a forward pass:

    HTTP process ── supervisor (its own session) ── rank 0, rank 1, …     world > 1: torch's elastic launcher
                 └─ supervisor, which is rank 0                           world 1

The supervisor reports a failure through a pipe, as data; a kill leaves no report and shows in its exit code.
"""

import asyncio
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager, suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

from colonnade import errors
from colonnade.config import Plan, ServeConfig
from colonnade.config.plugins import load_plugin, loaded_plugins
from colonnade.errors import ColonnadeError, PlanError, WorkerError
from colonnade.parallel.launch import Interrupted, launch
from colonnade.serve.engine_client import EngineClient
from colonnade.serve.worker import Load, work

STOP_S = 10.0
"""How long a stopped engine may take to leave before it is killed [s]."""

LINE_BYTES = 1 << 26
"""The longest message of the engine."""

LONGEST_FOLDER = 80
"""A Unix socket's path has at most 107 characters."""


@asynccontextmanager
async def engine_process(
    load: Load,
    plan: Plan,
    config: ServeConfig,
    device: str,
    give_up: asyncio.Event,
    at_once: asyncio.Event | None = None,
) -> AsyncIterator[EngineClient]:
    """Start an engine, wait until its model is loaded (or ``give_up`` is set), and end it at the end: when ``at_once``
    is set it is not asked to go, but killed.

    Raises what the start raised: a :class:`CheckpointError`, a :class:`CapacityError`, …
    """
    client, at_once = EngineClient(), at_once or asyncio.Event()
    place = None if len(tempfile.gettempdir()) < LONGEST_FOLDER else "/tmp"
    with tempfile.TemporaryDirectory(prefix="colonnade-", dir=place) as folder:  # only this user may enter
        address = f"{folder}/engine"
        async with await asyncio.start_unix_server(client.listen, address, limit=LINE_BYTES):
            report, process = _start((loaded_plugins(), load, plan, config, device, address))
            watcher = asyncio.create_task(_watch(client, process, report))
            try:
                await first(client.ready.wait(), client.ended.wait(), give_up.wait())
                if client.failure:
                    raise client.failure
                yield client
            finally:
                client.stop()
                if not client.ready.is_set():
                    process.terminate()  # still loading: it does not listen yet
                await first(client.ended.wait(), at_once.wait(), timeout_s=STOP_S)
                if not client.ended.is_set():
                    _kill(process)
                await watcher


async def first(*waits: Awaitable[object], timeout_s: float | None = None) -> None:
    """Return as soon as one of ``waits`` has, or after so long."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


async def _watch(client: EngineClient, process: BaseProcess, report: Connection) -> None:
    """Wait for the end of the engine, tell everybody, and leave no process behind."""
    died, loop = asyncio.Event(), asyncio.get_running_loop()
    loop.add_reader(process.sentinel, died.set)
    await first(died.wait(), client.hung_up.wait())
    # Rank 0 is gone a little before its supervisor; or the supervisor was killed and has left ranks behind.
    with suppress(TimeoutError):
        await asyncio.wait_for(died.wait(), STOP_S)
    loop.remove_reader(process.sentinel)
    _kill(process)
    await asyncio.to_thread(process.join)
    if not client.stopped:
        client.fail(_why(report, process.exitcode))
    report.close()
    client.ended.set()


def _kill(process: BaseProcess) -> None:
    """End whatever is left of the engine's session; the supervisor must not have been joined yet."""
    assert process.pid is not None
    with suppress(ProcessLookupError, PermissionError):  # already gone, or not yet a session of its own
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()


def _start(args: tuple) -> tuple[Connection, BaseProcess]:
    """The supervisor, started; and the pipe on which it reports a failure."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_supervise, args=(theirs, *args), name="colonnade-engine")
    # A child inherits the mask: Ctrl-C in a terminal must not hit it before it has a session of its own. (Ignoring the
    # signal meanwhile would do that too, but lose one that is meant for us.)
    resource_tracker.ensure_running()  # the first child would start it, and it would unblock the signal
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
    return ours, process


def _supervise(
    report: Connection,
    plugins: tuple[str, ...],
    load: Load,
    plan: Plan,
    config: ServeConfig,
    device: str,
    address: str,
) -> None:
    """In the child: launch the ranks, and say why they failed."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    try:
        for plugin in plugins:
            load_plugin(plugin)
        launch(work, (load, plan, config, device, address), plan)
    except Interrupted:
        sys.exit(1)
    except BaseException as error:  # noqa: BLE001 - whatever it was, the HTTP process raises it
        trace = "\n".join(getattr(error, "__notes__", ())) or traceback.format_exc()
        told = {"kind": type(error).__name__, "ours": isinstance(error, ColonnadeError), "message": str(error)}
        report.send_bytes(json.dumps({**told, "trace": trace}).encode())
        sys.exit(1)


def _why(report: Connection, code: int | None) -> ColonnadeError:
    """The supervisor's report as an error, or what its exit code tells."""
    with suppress(EOFError, OSError):
        if report.poll():
            told = json.loads(report.recv_bytes())
            kind = getattr(errors, told["kind"], PlanError) if told["ours"] else PlanError
            failure = kind(told["message"] if told["ours"] else f"the engine raised {told['kind']}: {told['message']}")
            failure.add_note(told["trace"])
            return failure
    if code is not None and code < 0:
        name = signal.Signals(-code).name
        hint = " (out of memory is the usual reason)" if name == "SIGKILL" else ""
        return WorkerError(f"the engine process was killed by {name}{hint}; start the server again")
    return WorkerError(f"the engine process ended with exit code {code}; start the server again")
