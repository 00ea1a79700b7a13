"""Contexts built one after another over one process group leak neither groups nor threads."""

import threading
from pathlib import Path

import pytest
import torch
from torch import distributed as dist

from colonnade.config import Plan
from colonnade.parallel.distributed_context import DistributedContext
from tests.parity.train_cases import CASES, Run
from tests.worlds import run

PLANS = [Plan(dp=2), Plan(tp=2, sequence_parallel=True), Plan(replicate=2), Plan(pp=2), Plan(dp=2, ep=2)]


def _groups() -> int:
    return len(dist.distributed_c10d._world.pg_map)


def _threads() -> int:
    """Thread count from /proc: gloo's threads are not Python threads."""
    tasks = Path("/proc/self/task")
    return len(list(tasks.iterdir())) if tasks.exists() else threading.active_count()


def _many_contexts() -> list[int]:
    """Thread counts before, and after each of two rounds; FSDP models and pipelines hold their groups in reference
    cycles.
    """
    counts = [_threads()]
    for _ in range(2):
        for plan in PLANS:
            _train(plan)
            assert _groups() == 1, plan
        counts.append(_threads())
    return counts


def _train(plan: Plan) -> None:
    with DistributedContext.build(plan) as context:
        assert _groups() > 1
        for case in ("gpt2", "llama"):
            _one_step(case, context)


def _one_step(case: str, context: DistributedContext) -> None:
    """In a function of its own, so that only reference cycles hold the model when the context ends."""
    Run.start(CASES[case], context).go(0, 1)


@pytest.mark.slow
def test_contexts_leak_no_groups_or_threads() -> None:
    for before, first, second in run(2, _many_contexts):
        assert second <= first <= before + 2, "a gloo group has three threads"


def _fail() -> None:
    with DistributedContext.build(Plan(tp=2)) as context:
        context.axes.tp.sum_(torch.ones(1))
        raise ValueError("here")


def _fails() -> None:
    """After a failure the ranks do not meet to destroy groups; the next context must work with the remaining ones."""
    with pytest.raises(ValueError, match="here"):
        _fail()
    assert _groups() > 1, "they are destroyed with the default group"
    with DistributedContext.build(Plan(dp=2)) as context:
        assert context.axes.dp.sum_(torch.ones(1)).item() == 2


def test_context_of_a_failed_rank_does_not_wait_for_others() -> None:
    run(2, _fails)
    run(2, _fails)
