"""Grounds laid one after another over a standing group leave neither groups nor threads behind."""

import threading
from pathlib import Path

import pytest
import torch
from torch import distributed as dist

from colonnade.config import Plan
from colonnade.parallel.distributed_context import DistributedContext
from tests.parity.train_cases import CASES, Run
from tests.worlds import run

pytestmark = pytest.mark.xdist_group("worlds")

PLANS = [Plan(dp=2), Plan(tp=2, sequence_parallel=True), Plan(replicate=2), Plan(pp=2), Plan(dp=2, ep=2)]


def _groups() -> int:
    return len(dist.distributed_c10d._world.pg_map)


def _threads() -> int:
    """Those of gloo are not Python's."""
    tasks = Path("/proc/self/task")
    return len(list(tasks.iterdir())) if tasks.exists() else threading.active_count()


def _many_grounds() -> list[int]:
    """Threads before, and after each of two rounds; models under FSDP and in pipelines hold their groups in cycles."""
    found = [_threads()]
    for _ in range(2):
        for plan in PLANS:
            _train(plan)
            assert _groups() == 1, plan
        found.append(_threads())
    return found


def _train(plan: Plan) -> None:
    with DistributedContext.build(plan) as context:
        assert _groups() > 1
        for case in ("gpt2", "llama"):
            _one_step(case, context)


def _one_step(case: str, context: DistributedContext) -> None:
    """In a function of its own, so that nothing but cycles holds the model when the ground ends."""
    Run.start(CASES[case], context).go(0, 1)


def test_nothing_is_left_behind() -> None:
    for before, first, second in run(2, _many_grounds):
        assert second <= first <= before + 2, "a group of gloo is three threads"


def _fail() -> None:
    with DistributedContext.build(Plan(tp=2)) as context:
        context.axes.tp.sum_(torch.ones(1))
        raise ValueError("here")


def _fails() -> None:
    """After a failure nobody meets the others to take up groups; the next ground stands beside what is left."""
    with pytest.raises(ValueError, match="here"):
        _fail()
    assert _groups() > 1, "they end with the default group"
    with DistributedContext.build(Plan(dp=2)) as context:
        assert context.axes.dp.sum_(torch.ones(1)).item() == 2


def test_a_failure_waits_for_nobody() -> None:
    run(2, _fails)
    run(2, _fails)
