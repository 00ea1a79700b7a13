"""Starts child processes of the server in a way that Ctrl-C in a terminal does not reach them."""

import atexit
import importlib
import multiprocessing
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import NamedTuple

ENGINE_MODULES = ("colonnade.parallel.launch", "colonnade.serve.worker")
"""Modules that an engine's process imports, mainly torch."""

Settings = tuple[dict[str, str], set[int] | None]
"""OpenMP's variables and the affinity, which must both be set before torch is imported."""


SETTINGS_S = 10.0
"""Time for a waiting process to report the settings with which it imported torch [s]."""


class WaitingChild(NamedTuple):
    """A process that was started before its target was known."""

    process: BaseProcess
    connection: Connection


waiting: list[WaitingChild] = []
"""Processes of :func:`prestart` that have no target yet."""


def prestart(modules: Sequence[str] = ENGINE_MODULES) -> None:
    """Start a process for the next :func:`start_child`, which imports torch with the settings of a single engine.

    The program calls it before its own imports, which take as long. Without a target the process ends with this one.
    """
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    process = start_child(_wait_for_target, (theirs, modules), "colonnade-engine")
    theirs.close()
    waiting.append(WaitingChild(process, ours))
    atexit.register(discard_waiting)  # before multiprocessing waits for its children


def discard_waiting() -> None:
    """End the processes of :func:`prestart` that have no target."""
    while waiting:
        process, connection = waiting.pop()
        process.kill()
        process.join()
        connection.close()


def _wait_for_target(connection: Connection, modules: Sequence[str]) -> None:
    """In the child: take over settings, import, and run the target that the parent sends."""
    from colonnade.config import Plan
    from colonnade.cores import set_openmp, set_openmp_unpinned
    from colonnade.serve.replica_placement import has_gpu_devices, place_engines

    try:
        if has_gpu_devices():
            connection.send(None)
            return
        set_openmp_unpinned(os.environ)  # as the program does
        cpus = place_engines(1, 1, Plan(), "cpu")[0][0][0].cpus
        assert cpus is not None
        set_openmp(os.environ, cpus.threads, owned=cpus.owned)
        if cpus.cpus and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, cpus.cpus)
        connection.send(_settings())
        for name in modules:
            importlib.import_module(name)
        variables, target, args = connection.recv()
    except (EOFError, ConnectionError):  # the program was killed
        return
    connection.close()
    os.environ.clear()
    os.environ.update(variables)
    target(*args)


def _settings() -> Settings:
    from colonnade.cores import OPENMP_VARIABLES

    variables = {name: os.environ[name] for name in ("OMP_NUM_THREADS", *OPENMP_VARIABLES) if name in os.environ}
    return variables, os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None


def _use_waiting(target: Callable[..., None], args: tuple) -> BaseProcess | None:
    """Let a waiting process run ``target``; None if none has this process's settings."""
    while waiting:
        process, connection = waiting[-1]
        with suppress(EOFError, OSError):
            if connection.poll(SETTINGS_S) and connection.recv() == _settings():
                connection.send((dict(os.environ), target, args))
                connection.close()
                waiting.pop()
                return process
        discard_waiting()
    return None


def start_child(
    target: Callable[..., None], args: tuple, name: str, variables: Mapping[str, str] | None = None
) -> BaseProcess:
    """Start ``target(*args)`` in a new interpreter, with SIGINT blocked: it must ignore the signal, then unblock it.

    ``variables`` are added to its environment, before it imports anything.

    A child inherits the signal mask. Ignoring the signal here would prevent that too, but lose one that is meant for
    this process. Without ``variables`` a process of :func:`prestart` is used, if there is one.
    """
    if variables is None and (started := _use_waiting(target, args)) is not None:
        return started
    process = multiprocessing.get_context("spawn").Process(target=target, args=args, name=name)
    resource_tracker.ensure_running()  # the first child would start it, and that would unblock the signal
    before, mask = dict(os.environ), signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    os.environ.update(variables or {})
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for variable in variables or {}:
            if variable in before:
                os.environ[variable] = before[variable]
            else:
                del os.environ[variable]
    return process


def ignore_interrupts() -> None:
    """In the child: ignore SIGINT, which a terminal sends to all processes of its group."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def exit_reason(code: int | None) -> str:
    """How a process ended: "was killed by SIGKILL" or "ended with exit code 1"."""
    if code is not None and code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"
