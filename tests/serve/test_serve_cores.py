"""Engine processes have the threads and the affinity of their placement."""

import asyncio
import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from colonnade.config import Plan, ServeConfig
from colonnade.cores import OPENMP_VARIABLES, SPIN_COUNT, CpuPlacement, place_replicas, read_machine
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.serve.engine_process import engine_process
from colonnade.serve.replica_placement import ANYWHERE, Placement
from colonnade.serve.worker import Loaded
from tests.serve import tiny

MINE = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
pytestmark = [pytest.mark.skipif(len(MINE) < 2, reason="needs Linux and two CPUs"), pytest.mark.exec]


def record(folder: str, context: DistributedContext) -> Loaded:
    """Load the tiny model, and write down what the process may use."""
    torch.ones(1 << 20).sum()  # starts OpenMP's threads
    tasks = [task.name for task in Path("/proc/self/task").iterdir()]
    found = {
        "affinity": [sorted(os.sched_getaffinity(int(task))) for task in tasks],
        "threads": torch.get_num_threads(),
        "environ": {name: os.environ[name] for name in OPENMP_VARIABLES if name in os.environ},
    }
    Path(folder, f"{context.rank}.json").write_text(json.dumps(found))
    return tiny.load(context)


def measured(folder: Path, placement: Placement, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What :func:`record` found in each rank of an engine that starts on ``placement``."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", *OPENMP_VARIABLES):
        monkeypatch.delenv(name, raising=False)

    async def start() -> None:
        opened = partial(partial, record, str(folder))
        async with engine_process(opened, plan, ServeConfig(), "cpu", asyncio.Event(), placement=placement):
            pass

    asyncio.run(start())
    assert sorted(os.sched_getaffinity(0)) == MINE, "the HTTP process keeps its own affinity"
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(plan.world)]


@pytest.mark.sample(1)
@pytest.mark.parametrize("owned", [True, False])
def test_engine_is_pinned(tmp_path: Path, owned: bool, monkeypatch: pytest.MonkeyPatch):
    cpus = CpuPlacement((tuple(MINE[1:2]),), 1, owned)
    (found,) = measured(tmp_path, Placement(cpus), Plan(), monkeypatch)
    assert all(each == MINE[1:2] for each in found["affinity"]) and found["threads"] == 1
    assert found["environ"] == {"OMP_WAIT_POLICY": "PASSIVE"} | ({"GOMP_SPINCOUNT": str(SPIN_COUNT)} if owned else {})


@pytest.mark.slow
def test_threads_are_fewer_than_cpus_under_a_quota(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Nothing calls ``torch.set_num_threads`` in an engine of one rank: the number is set before torch is imported."""
    cpus = CpuPlacement((tuple(MINE),), 1, owned=False)
    (found,) = measured(tmp_path, Placement(cpus), Plan(), monkeypatch)
    assert all(each == MINE for each in found["affinity"]) and found["threads"] == 1


@pytest.mark.slow
def test_each_rank_has_its_own_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (cpus,) = place_replicas(read_machine(allowed=MINE[:2]), 1, 2)
    found = measured(tmp_path, Placement(cpus), Plan(tp=2), monkeypatch)
    assert [each["affinity"][0] for each in found] == [list(rank) for rank in cpus.ranks]
    assert [each["threads"] for each in found] == [cpus.threads] * 2


@pytest.mark.slow
def test_an_engine_without_a_placement_uses_all_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (found,) = measured(tmp_path, ANYWHERE, Plan(), monkeypatch)
    assert all(each == MINE for each in found["affinity"]) and found["threads"] == read_machine().usable
    assert found["environ"]["OMP_WAIT_POLICY"] == "PASSIVE"
