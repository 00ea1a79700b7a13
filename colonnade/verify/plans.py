"""Which plans to try: all valid ones of a world, or a few that together have every pair of choices.

Most faults of composed layouts need two choices to meet (a schedule and sharding, a window and a ring), so a set in
which each pair of choices meets somewhere finds them at a fraction of the cost: pairwise testing (Kuhn, Wallace &
Gallo, IEEE TSE 30(6), 2004).
"""

import itertools
from collections.abc import Iterator
from typing import Any

from colonnade.config import ModelConfig, Plan
from colonnade.config.plan import SEVERAL
from colonnade.errors import PlanError

AXES = ("pp", "replicate", "dp", "cp", "tp")
STAGES = 2
"""Stages on a rank, where a schedule can have several."""


def all_plans(world: int, model: ModelConfig | None = None) -> list[Plan]:
    """Every plan of ``world`` processes that differs from the others in what it does, and that ``model`` allows."""
    return [plan for plan in _every(world) if model is None or _fits(plan, model)]


def _every(world: int) -> Iterator[Plan]:
    for sizes in itertools.product(*[[d for d in range(1, world + 1) if world % d == 0]] * len(AXES)):
        grid: dict[str, Any] = dict(zip(AXES, sizes, strict=True))
        if grid["pp"] * grid["replicate"] * grid["dp"] * grid["cp"] * grid["tp"] != world:
            continue
        pipelines: list[dict[str, Any]] = [{}]
        if grid["pp"] > 1:
            pipelines = [{"schedule": name} for name in ("gpipe", "1f1b", "zero_bubble")]
            pipelines += [{"schedule": name, "stages": STAGES} for name in SEVERAL]
        sharded = grid["replicate"] * grid["dp"] * grid["cp"] > 1
        reshards = [True, False] if sharded and grid["pp"] == 1 else [True]
        sequences = [False, True] if grid["tp"] > 1 else [False]
        for pipeline, reshard, sequence in itertools.product(pipelines, reshards, sequences):
            yield Plan(**grid, **pipeline, reshard=reshard, sequence_parallel=sequence)


def _fits(plan: Plan, model: ModelConfig) -> bool:
    try:
        plan.check(model)
    except PlanError:
        return False
    return True


def covering(plans: list[Plan]) -> list[Plan]:
    """A few of ``plans`` in which each pair of choices that occurs in any of them occurs; the most useful first."""
    wanted = set().union(*(pairs(plan) for plan in plans)) if plans else set()
    chosen: list[Plan] = []
    while wanted:
        best = max(plans, key=lambda plan: len(pairs(plan) & wanted))  # the first of equals: always the same set
        chosen.append(best)
        wanted -= pairs(best)
    return chosen


def pairs(plan: Plan) -> set[tuple[tuple[str, object], ...]]:
    """The pairs of choices that meet in a plan."""
    choices = plan.model_dump(exclude={"layers"})
    if plan.pp == 1:  # what it would be has no effect
        choices |= {"schedule": None, "stages": None}
    return set(itertools.combinations(sorted(choices.items()), 2))
