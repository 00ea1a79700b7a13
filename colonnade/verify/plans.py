"""Which plans to try: all valid ones of a world, or a few that together have every pair of choices.

Most faults of composed layouts need two choices to meet (a schedule and sharding, a window and a ring), so a set in
which each pair of choices meets somewhere finds them at a fraction of the cost: pairwise testing (Kuhn, Wallace &
Gallo, IEEE TSE 30(6), 2004).

A model's small likeness: the same choices and the same ratios, in sizes that a laptop takes through forty plans.

What can go wrong in a layout is decided by how heads, hidden units and vocabulary divide, by norms, biases, ties and
windows; not by how wide a head is. So heads and key/value heads stay, head width and hidden width shrink together, the
vocabulary becomes a number that divides by nothing, and the depth just feeds the deepest pipeline.
"""

import itertools
import math
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from colonnade.config import ModelConfig, MoeConfig, Plan
from colonnade.config.model import divisors
from colonnade.config.plan import SEVERAL
from colonnade.errors import PlanError
from colonnade.parallel.pipeline import schedule_supported

AXES = ("pp", "replicate", "dp", "cp", "tp")
OVERLAP = 2
"""Parts in which tokens travel to experts."""
SHADOWS = 1
"""Experts that every rank gathers."""
STAGES = 2
"""Stages on a rank, where a schedule can have several."""


def all_plans(world: int, model: ModelConfig | None = None) -> list[Plan]:
    """Every plan of ``world`` processes that differs from the others in what it does, and that ``model`` and this torch
    allow.
    """
    plans = [plan for plan in _every(world) if schedule_supported(plan) and (model is None or _fits(plan, model))]
    if model is None or model.moe is None:
        return plans
    return [laid for plan in plans for laid in _with_experts(plan) if _fits(laid, model)]


def _with_experts(plan: Plan) -> Iterator[Plan]:
    """``plan`` with every grid of experts, degree and overlap; where no token travels there is one overlap."""
    for ep, sh in itertools.product(divisors(plan.stage), divisors(plan.stage)):
        if plan.stage % (ep * sh) == 0:
            for degree in (0, *divisors(sh)) if ep * sh > 1 else (1,):
                travels = degree and ep * sh > 1
                nears = (0, *divisors(ep * sh)[1:-1][:1]) if travels else (0,)
                overlaps, shadows = ((1, OVERLAP), (0, SHADOWS)) if travels else ((1,), (0,))
                for overlap, near, shadow in itertools.product(overlaps, nears, shadows):
                    laid = {"ep": ep, "sh": sh, "degree": degree, "overlap": overlap, "near": near, "shadows": shadow}
                    with suppress(PlanError):  # some do not go together
                        yield plan.but(**laid)


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
        sequences = [(False, False), (True, False), (True, True)] if grid["tp"] > 1 else [(False, False)]
        for pipeline, reshard, (sequence, beside) in itertools.product(pipelines, reshards, sequences):
            yield Plan(**grid, **pipeline, reshard=reshard, sequence_parallel=sequence, tp_overlap=beside)


def _fits(plan: Plan, model: ModelConfig) -> bool:
    try:
        plan.check(model)
    except PlanError:
        return False
    return True


def covering(plans: list[Plan]) -> list[Plan]:
    """A few of ``plans`` in which each pair of choices that occurs in any of them occurs; the most useful first."""
    meet = [pairs(plan) for plan in plans]
    wanted = set().union(*meet)
    chosen: list[Plan] = []
    while wanted:
        best = max(range(len(plans)), key=lambda i: len(meet[i] & wanted))  # the first of equals: always the same set
        chosen.append(plans[best])
        wanted -= meet[best]
    return chosen


def pairs(plan: Plan) -> set[tuple[tuple[str, object], ...]]:
    """The pairs of choices that meet in a plan."""
    choices = plan.model_dump(exclude={"layers"})
    if plan.pp == 1:  # what it would be has no effect
        choices |= {"schedule": None, "stages": None}
    return set(itertools.combinations(sorted(choices.items()), 2))


HEAD_WIDTH, VOCABULARY, CONTEXT = 4, 211, 64
LEAST_HIDDEN = 57
"""From here on no rank of 8 or fewer is left without hidden units."""
EXPERTS, EXPERT_WIDTH = 16, 24
"""Experts at most, and hidden units of each: they divide over 2, 3, 4 and 8 ranks."""


def shrink(model: ModelConfig, layers: int) -> ModelConfig:
    """``model`` with ``layers`` blocks and heads of :data:`HEAD_WIDTH`."""
    narrower = min(1.0, HEAD_WIDTH / model.head_width)
    # Odd, so that no tensor-parallel degree divides it: the uneven case holds for the even ones too.
    hidden = max(model.heads, LEAST_HIDDEN, round(model.ffn_width * narrower)) | 1
    moe = model.moe and _fewer_experts(model.moe)
    return model.but(
        layers=layers,
        head_width=round(model.head_width * narrower),
        width=max(2, round(model.width * narrower) // 2 * 2),
        ffn_width=hidden,
        moe=moe,
        latent=model.latent and model.latent.but(kv_rank=7, q_rank=model.latent.q_rank and 9, rope_width=2, v_width=3),
        vocab_size=min(model.vocab_size, VOCABULARY),
        context=CONTEXT,
        window=None if model.window is None else min(model.window, 7),
        window_from_layer=min(model.window_from_layer, layers - 1),
        top=model.top if model.causal or model.predicts_masked else "pretraining",  # verify trains, on tokens
        classes=0,
    )


def _fewer_experts(moe: MoeConfig) -> MoeConfig:
    """The same choices among at most :data:`EXPERTS` experts, in the same groups as far as there are so many."""
    experts, router = min(moe.experts, EXPERTS), moe.router
    groups = math.gcd(experts, router.groups)
    kept = min(router.groups_kept, groups)
    return moe.but(
        experts=experts,
        active=min(moe.active, kept * (experts // groups)),
        ffn_width=EXPERT_WIDTH,
        shared_width=moe.shared_width and EXPERT_WIDTH + 1,
        first=min(moe.first, 1),
        # Verify's texts are of no task.
        router=router.but(groups=groups, groups_kept=kept, task=0 if router.kind == "task" else router.task),
    )
