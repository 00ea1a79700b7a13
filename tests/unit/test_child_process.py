"""Processes that are started before their target is known."""

import os
import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnContext

import pytest

from colonnade.config import Plan
from colonnade.cores import child_placement, set_openmp_unpinned
from colonnade.serve import child_process
from colonnade.serve.child_process import discard_waiting, ignore_interrupts, prestart, start_child, waiting
from colonnade.serve.replica_placement import has_gpu_devices, place_engines

pytestmark = pytest.mark.skipif(has_gpu_devices(), reason="the settings of an engine on a GPU are not known before")


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = dict(os.environ)
    set_openmp_unpinned(os.environ)
    yield
    discard_waiting()
    os.environ.clear()
    os.environ.update(before)


def report(to_parent: Connection) -> None:
    """The target: says what it has, and fails."""
    ignore_interrupts()
    to_parent.send((os.getpid(), "zipapp" in sys.modules, dict(os.environ)))
    to_parent.close()
    sys.exit(3)


def run(*, threads: int | None = None) -> tuple[int, tuple[int, bool, dict[str, str]]]:
    """(exit code, what the target reported) with the settings of a single engine, or with other ones."""
    ours, theirs = SpawnContext().Pipe(duplex=False)
    cpus = place_engines(1, 1, Plan(), "cpu")[0][0][0].cpus
    assert cpus is not None
    with child_placement(cpus._replace(threads=threads or cpus.threads), os.environ):
        os.environ["COLONNADE_TEST"] = "later"
        process = start_child(report, (theirs,), "engine")
    theirs.close()
    reported = ours.recv()
    process.join()
    assert reported[0] == process.pid and process.exitcode is not None
    return process.exitcode, reported


def test_a_waiting_process_runs_the_target_with_the_environment_of_then() -> None:
    prestart(["zipapp"])
    pid = waiting[0].process.pid
    code, (used, imported, environment) = run()
    assert code == 3 and not waiting, "the target's error is not lost"
    assert used == pid and imported
    assert environment["COLONNADE_TEST"] == "later" and environment["OMP_NUM_THREADS"] == os.environ["OMP_NUM_THREADS"]


def test_other_settings_start_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS")
    prestart(["zipapp"])
    process = waiting[0].process
    code, (used, imported, environment) = run(threads=1 if os.environ.get("OMP_NUM_THREADS") != "1" else 2)
    assert code == 3 and not waiting and process.exitcode == -9
    assert used != process.pid and not imported and environment["OMP_NUM_THREADS"] in "12"


def test_a_process_without_a_target_ends() -> None:
    prestart(["zipapp"])
    process = waiting[0].process
    assert process.is_alive()
    discard_waiting()
    assert process.exitcode == -9 and not waiting


def test_a_process_that_has_died_is_replaced() -> None:
    prestart(["zipapp"])
    process = waiting[0].process
    process.kill()
    code, (used, imported, _) = run()
    assert code == 3 and used != process.pid and not imported


def test_nothing_waits_without_the_verb() -> None:
    assert not child_process.waiting
