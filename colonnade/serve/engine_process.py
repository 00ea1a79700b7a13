"""Starts, supervises and stops the engine's processes, and leaves no orphan processes.

The model always runs in other processes, so that the event loop never waits for a forward pass:

    HTTP process ── supervisor (its own session) ── rank 0, rank 1, …     world > 1: torch's elastic launcher
                 └─ supervisor, which is rank 0                           world 1

The supervisor reports a failure through a pipe, as JSON; if it is killed there is no report, only its exit code.
"""

import asyncio
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING

from colonnade import errors
from colonnade.config import Plan, ServeConfig
from colonnade.config.plugins import load_plugin, loaded_plugins
from colonnade.cores import child_placement
from colonnade.errors import ColonnadeError, Interrupted, PlanError, WorkerError
from colonnade.serve.child_process import ignore_interrupts, start_child
from colonnade.serve.engine_client import EngineClient
from colonnade.serve.replica_placement import ANYWHERE, Placement
from colonnade.serve.start_order import Turn

if TYPE_CHECKING:
    from colonnade.serve.worker import Load

OpenModel = Callable[[], "Load"]
"""Opens a model without its weights, in the supervisor, and returns the function that loads it in each rank; must be
picklable."""

STOP_S = 10.0
"""Time for a stopped engine to exit before it is killed [s]."""

MAX_MESSAGE_BYTES = 1 << 26
"""Size limit for a message of the engine."""

MAX_TMPDIR_CHARACTERS = 80
"""A Unix socket's path has at most 107 characters."""


@asynccontextmanager
async def engine_process(
    open_model: OpenModel,
    plan: Plan,
    config: ServeConfig,
    device: str,
    give_up: asyncio.Event,
    kill: asyncio.Event | None = None,
    client: EngineClient | None = None,
    placement: Placement = ANYWHERE,
    turn: Turn | None = None,
) -> AsyncIterator[EngineClient]:
    """Start an engine and wait until its model is loaded; stop it at the end.

    Setting ``give_up`` ends the wait; setting ``kill`` kills the engine at the end instead of stopping it. ``client``
    is the connection to use, if the caller has made one; ``placement`` limits its cores or GPUs; it allocates its cache
    when it is its ``turn``. Raises what the start raised: a :class:`CheckpointError`, a :class:`CapacityError`, …
    """
    client, kill = client or EngineClient(), kill or asyncio.Event()
    with socket_folder() as folder:
        address = f"{folder}/engine"
        async with await asyncio.start_unix_server(client.listen, address, limit=MAX_MESSAGE_BYTES):
            args = (loaded_plugins(), open_model, plan, config, device, address, placement)
            report, process = _spawn(args, placement)
            watcher = asyncio.create_task(_watch(client, process, report))
            try:
                await wait_first(_allocate(client, turn), client.exited.wait(), give_up.wait())
                if client.failure:
                    raise client.failure
                yield client
            finally:
                client.stop()
                if not client.ready.is_set():
                    process.terminate()  # still loading: it does not read messages yet
                await wait_first(client.exited.wait(), kill.wait(), timeout_s=STOP_S)
                if not client.exited.is_set():
                    _kill(process)
                await watcher


@contextmanager
def socket_folder() -> Iterator[str]:
    """A temporary folder for Unix sockets, which only this user may enter."""
    parent = None if len(tempfile.gettempdir()) < MAX_TMPDIR_CHARACTERS else "/tmp"
    with tempfile.TemporaryDirectory(prefix="colonnade-", dir=parent) as folder:
        yield folder


async def _allocate(client: EngineClient, turn: Turn | None) -> None:
    """Wait until the engine has loaded, and let it allocate its cache in its turn."""
    await client.loaded.wait()
    if turn:
        await turn.wait()
    client.allocate()
    await client.ready.wait()
    if turn:
        turn.end()


async def wait_first(*waits: Awaitable[object], timeout_s: float | None = None) -> None:
    """Wait until one of ``waits`` is done, or for ``timeout_s``; cancel the others."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


async def _watch(client: EngineClient, process: BaseProcess, report: Connection) -> None:
    """Wait until the engine exits, report a failure to ``client``, and leave no process behind."""
    died, loop = asyncio.Event(), asyncio.get_running_loop()
    loop.add_reader(process.sentinel, died.set)
    await wait_first(died.wait(), client.disconnected.wait())
    # Rank 0 exits a little before its supervisor; or the supervisor was killed and has left ranks behind.
    with suppress(TimeoutError):
        await asyncio.wait_for(died.wait(), STOP_S)
    loop.remove_reader(process.sentinel)
    _kill(process)
    await asyncio.to_thread(process.join)
    if not client.stopped:
        client.fail(_exit_error(report, process.exitcode))
    report.close()
    client.exited.set()


def _kill(process: BaseProcess) -> None:
    """Kill the remaining processes of the engine's session; the supervisor must not have been joined yet."""
    assert process.pid is not None
    with suppress(ProcessLookupError, PermissionError):  # it has exited, or has not yet started its own session
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()


def _spawn(args: tuple, placement: Placement) -> tuple[Connection, BaseProcess]:
    """Start the supervisor; returns the pipe on which it reports a failure, and its process."""
    context = multiprocessing.get_context("spawn")
    report, report_end = context.Pipe(duplex=False)
    try:
        with child_placement(placement.cpus, os.environ):
            return report, start_child(_supervise, (report_end, *args), "colonnade-engine")
    finally:
        report_end.close()


def _supervise(
    report: Connection,
    plugins: tuple[str, ...],
    open_model: OpenModel,
    plan: Plan,
    config: ServeConfig,
    device: str,
    address: str,
    placement: Placement,
) -> None:
    """In the child: open the model, launch the ranks, and report why they failed."""
    os.setsid()
    ignore_interrupts()
    try:
        # Imported here, since they import torch, which the HTTP process does not need.
        from colonnade.parallel.launch import launch, use_gpus
        from colonnade.serve.worker import run_worker

        if placement.gpus:
            use_gpus(placement.gpus)
        for plugin in plugins:
            load_plugin(plugin)
        cpus = placement.cpus.ranks if placement.cpus else ()
        launch(run_worker, (open_model(), plan, config, device, address, placement.engines), plan, cpus=cpus)
    except Interrupted:
        sys.exit(1)
    except BaseException as error:  # noqa: BLE001 - the HTTP process raises it
        trace = "\n".join(getattr(error, "__notes__", ())) or traceback.format_exc()
        ours = isinstance(error, ColonnadeError)
        details = {"kind": type(error).__name__, "ours": ours, "message": str(error), "trace": trace}
        report.send_bytes(json.dumps(details).encode())
        sys.exit(1)


def _exit_error(report: Connection, code: int | None) -> ColonnadeError:
    """The error that the supervisor reported, or one for its exit code."""
    with suppress(EOFError, OSError):
        if report.poll():
            details = json.loads(report.recv_bytes())
            kind, message = details["kind"], details["message"]
            if details["ours"]:
                failure = getattr(errors, kind, PlanError)(message)
            else:
                failure = PlanError(f"the engine raised {kind}: {message}")
            failure.add_note(details["trace"])
            return failure
    if code is not None and code < 0:
        name = signal.Signals(-code).name
        hint = " (usually because it ran out of memory)" if name == "SIGKILL" else ""
        return WorkerError(f"the engine process was killed by {name}{hint}; restart the server")
    return WorkerError(f"the engine process ended with exit code {code}; restart the server")
