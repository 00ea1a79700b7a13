"""Runs tests in forks of the process that collected them.

On a fresh machine collection takes more than a minute of CPU time: it compiles modules and rewrites assertions.
pytest-xdist collects in each worker. Here one process collects, and its forks run one file of tests at a time. Warnings
are errors (``filterwarnings``), so workers send reports only.
"""

import atexit
import gc
import itertools
import os
import signal
import threading
import traceback
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, NoReturn

import pytest


class Worker:
    """A fork, and the tests that it has been given and has not finished."""

    def __init__(self, session: pytest.Session, number: int, prepare: Callable[[], None]) -> None:
        self.number, self.tests = number, deque[pytest.Item]()
        self.connection, theirs = Pipe()
        self.pid = os.fork()
        if not self.pid:
            self.connection.close()
            _run(session, theirs, number, prepare)
        theirs.close()

    def give(self, tests: list[pytest.Item]) -> None:
        self.tests.extend(tests)
        self.connection.send([test.nodeid for test in tests])

    def end(self) -> int:
        """Wait for its end; returns the exit code, or minus the signal."""
        self.connection.close()
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


class _Reporter:
    """Sends a worker's reports."""

    def __init__(self, config: pytest.Config, connection: Connection) -> None:
        self.config, self.connection = config, connection

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.connection.send(self.config.hook.pytest_report_to_serializable(config=self.config, report=report))

    def pytest_runtest_logfinish(self) -> None:
        self.connection.send("finished")


def run(session: pytest.Session, workers: int, prepare: Callable[[], None]) -> None:
    """Run the collected tests in ``workers`` forks, each of which calls ``prepare`` first."""
    waiting = deque(list(tests) for _, tests in itertools.groupby(session.items, lambda item: item.path))
    numbers = itertools.count()
    gc.collect()
    gc.freeze()  # forks need not search what was imported for garbage
    running = [Worker(session, next(numbers), prepare) for _ in range(min(workers, len(waiting)))]
    try:
        while running:
            ready = wait([worker.connection for worker in running])
            for worker in [worker for worker in running if worker.connection in ready]:
                try:
                    _receive(session, worker, waiting)
                except (EOFError, ConnectionResetError):
                    running.remove(worker)
                    if (code := worker.end()) or worker.tests:
                        _report_death(session, worker, code)
                        if worker.tests:
                            waiting.appendleft(list(worker.tests))
                        if waiting:
                            running.append(Worker(session, next(numbers), prepare))
                if session.shouldfail:
                    raise session.Failed(session.shouldfail)
    finally:
        for worker in running:
            os.kill(worker.pid, signal.SIGINT)
        for worker in running:
            worker.end()
        gc.unfreeze()


def _receive(session: pytest.Session, worker: Worker, waiting: deque[list[pytest.Item]]) -> None:
    message = worker.connection.recv()
    if message == "next":
        worker.give(waiting.popleft() if waiting else [])
    elif message == "finished":
        worker.tests.popleft()
    else:
        report = session.config.hook.pytest_report_from_serializable(config=session.config, data=message)
        session.config.hook.pytest_runtest_logreport(report=report)


def _report_death(session: pytest.Session, worker: Worker, code: int) -> None:
    """Report a failure of the test that a worker ran when it died."""
    name, location = "the end of a worker", ("", None, "")
    if worker.tests:
        test = worker.tests.popleft()
        name, location = test.nodeid, test.location
    message = f"worker {worker.number} died with exit code {code}"
    report = pytest.TestReport(name, location, {}, "failed", message, "call")
    session.config.hook.pytest_runtest_logreport(report=report)


def _run(session: pytest.Session, connection: Connection, number: int, prepare: Callable[[], None]) -> NoReturn:
    """Run the tests that ``connection`` names, one file after the other, and end this process."""
    code = 1
    try:
        _separate(session, connection, number)
        prepare()
        _run_files(session, connection)
        session.config._ensure_unconfigure()
        code = 0
    except KeyboardInterrupt:
        pass
    except BaseException:
        traceback.print_exc()
    finally:
        threading._shutdown()  # pyrefly: ignore[missing-attribute]
        atexit._run_exitfuncs()
        os._exit(code)


def _separate(session: pytest.Session, connection: Connection, number: int) -> None:
    """Give this fork its own captured output, temporary folder and reports."""
    plugins, factory = session.config.pluginmanager, session.config._tmp_path_factory  # pyrefly: ignore
    capture: Any = plugins.getplugin("capturemanager")
    capture.stop_global_capturing()
    capture.start_global_capturing()
    factory._basetemp = factory.getbasetemp() / f"worker{number}"
    factory._basetemp.mkdir()
    plugins.unregister(name="terminalreporter")
    plugins.register(_Reporter(session.config, connection))


def _run_files(session: pytest.Session, connection: Connection) -> None:
    by_name = {test.nodeid: test for test in session.items}

    def next_file() -> list[pytest.Item]:
        connection.send("next")
        return [by_name[name] for name in connection.recv()]

    tests = deque(next_file())
    while tests:
        test = tests.popleft()
        if not tests:
            tests.extend(next_file())  # known before the last test, whose teardown keeps what the next file needs
        test.ihook.pytest_runtest_protocol(item=test, nextitem=tests[0] if tests else None)
