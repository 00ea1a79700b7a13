"""Starts child processes of the server in a way that Ctrl-C in a terminal does not reach them."""

import multiprocessing
import os
import signal
from collections.abc import Callable, Mapping
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess


def start_child(
    target: Callable[..., None], args: tuple, name: str, variables: Mapping[str, str] | None = None
) -> BaseProcess:
    """Start ``target(*args)`` in a new interpreter, with SIGINT blocked: it must ignore the signal, then unblock it.

    ``variables`` are added to its environment, before it imports anything.

    A child inherits the signal mask. Ignoring the signal here would prevent that too, but lose one that is meant for
    this process.
    """
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
