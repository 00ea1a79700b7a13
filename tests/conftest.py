"""Common test setup: one thread per process, no network, fixed examples."""

import importlib.util
import os
import signal
from collections.abc import Generator
from contextlib import nullcontext
from pathlib import Path

# Set before torch is imported, here and in child processes: workers share the cores, one thread each.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("MPLBACKEND", "agg")

import httpx
import hypothesis
import pytest
import torch

from tests import fork_server, forked_workers, interpreter

# httpx gives up after 5 s by default, less than a busy machine may need.
httpx._config.DEFAULT_TIMEOUT_CONFIG.connect = httpx._config.DEFAULT_TIMEOUT_CONFIG.read = 120.0
httpx._config.DEFAULT_TIMEOUT_CONFIG.write = httpx._config.DEFAULT_TIMEOUT_CONFIG.pool = 120.0

# No deadline, because shared machines are slow; the same examples on every run, so that failures reproduce.
# pytest --hypothesis-profile=explore searches for new examples.
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, database=None)
hypothesis.settings.register_profile("explore", deadline=None, max_examples=1000)
hypothesis.settings.load_profile("ci")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-failed", type=Path, help="write the ids of failed tests to this file, one a line")
    parser.addoption("--workers", type=int, default=1, help="run files of tests in that many processes")
    parser.addoption("--exec", action="store_true", help="start all programs by exec, as users do; takes twice as long")


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # a job in the background, whose programs inherit it
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_sessionstart(session: pytest.Session) -> None:
    """In a run of all tests, begin with the interpreted kernels: collection leaves the other cores idle."""
    config = session.config
    everything = config.args_source == pytest.Config.ArgsSource.TESTPATHS and not config.option.keyword
    if config.getoption("--workers") > 1 and everything and importlib.util.find_spec("triton"):
        interpreter.started = interpreter.Interpreter(*interpreter.CHECKS)


def pytest_sessionfinish() -> None:
    if interpreter.started is not None:
        interpreter.started.end()


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    def prepare() -> None:
        # After collection: packages that test modules import set variables, and programs are forked only with the
        # same ones.
        if not session.config.getoption("--exec"):
            fork_server.install()

    workers = session.config.getoption("--workers")
    if workers == 1 or session.testsfailed or session.config.option.collectonly:
        prepare()
        return None
    forked_workers.run(session, workers, prepare)
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    torch.manual_seed(0)
    with fork_server.start_by_exec() if item.get_closest_marker("exec") else nullcontext():
        return (yield)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if path := config.getoption("--write-failed"):
        reports = [*terminalreporter.getreports("failed"), *terminalreporter.getreports("error")]
        ids = dict.fromkeys(report.nodeid for report in reports if "::" in report.nodeid)
        path.write_text("".join(f"{name}\n" for name in ids), encoding="utf-8")


def pytest_make_parametrize_id(val: object) -> str | None:
    # Contents of files may hold the time at which they were made. Workers must collect the same names.
    return f"{len(val)} bytes" if isinstance(val, bytes) else None


TESTS = Path(__file__).parent
SLOWEST = (
    "serve/test_serve_fronts.py", "unit/test_speech.py", "serve/test_serve_pooling.py",
    "parity/test_verify.py", "look/test_viewer_page.py", "unit/test_refine_run.py", "parity/test_traps.py",
    "unit/test_triton_compiles.py", "faults/test_disk_space.py", "parity/test_grpo.py", "unit/test_cli.py",
)  # fmt: skip
"""The files that take longest, in order.

Each worker takes one file at a time; a long file started last would leave the others idle."""


def mark_unsampled_cases(items: list[pytest.Item]) -> None:
    """Mark all but ``count`` evenly spaced cases of each test with ``sample(count)`` as slow.

    One case is the middle one: the first is often that of a single rank.
    Cases that are slow or long by their own marks are not counted.
    """
    groups: dict[tuple[Path, str], list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sample") and not any(map(item.get_closest_marker, ("slow", "long"))):
            groups.setdefault((item.path, item.nodeid.partition("[")[0]), []).append(item)
    for cases in groups.values():
        mark = cases[0].get_closest_marker("sample")
        assert mark is not None
        (count,) = mark.args
        count = min(count, len(cases))
        kept = {(2 * i + 1) * len(cases) // (2 * count) for i in range(count)}
        for i, case in enumerate(cases):
            if i not in kept:
                case.add_marker(pytest.mark.slow)


@pytest.hookimpl(tryfirst=True)  # before -m selects by the marks that this adds
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_unsampled_cases(items)
    order = {TESTS / name: i for i, name in enumerate(SLOWEST)}
    items.sort(key=lambda item: order.get(item.path, len(order)))
