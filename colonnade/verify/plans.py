"""Selects the plans to verify, and shrinks the model to verify them on.

Plans are all valid ones of a world, or a covering array: most faults of composed layouts need two choices to meet (a
schedule and sharding, a window and a ring), so a set in which each pair of choices meets somewhere finds them at a
fraction of the cost. This is pairwise testing (Kuhn, Wallace & Gallo, IEEE TSE 30(6), 2004).

The shrunken model has the same choices and ratios, in sizes that a laptop takes through forty plans. What can go wrong
in a layout depends on how heads, hidden units and vocabulary divide, and on norms, biases, ties and windows; not on how
wide a head is. So the numbers of heads and key/value heads stay, head width and hidden width shrink together, the
vocabulary size becomes a prime number, and the depth is the least that fills the deepest pipeline.
"""

import itertools
import math
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from colonnade.config import ModelConfig, MoeConfig, Plan
from colonnade.config.model import divisors
from colonnade.config.plan import MULTI_STAGE_SCHEDULES
from colonnade.errors import PlanError
from colonnade.parallel.pipeline import schedule_supported

AXES = ("pp", "replicate", "dp", "cp", "tp")
OVERLAP = 2
"""Chunks of the experts' all-to-all."""
SHADOWS = 1
"""Shadow experts, which every rank gathers."""
STAGES = 2
"""Pipeline stages per rank, for schedules with several."""


def all_plans(world: int, model: ModelConfig | None = None) -> list[Plan]:
    """Return all distinct plans of ``world`` processes that ``model`` and this version of torch allow."""
    plans = [plan for plan in _dense_plans(world) if schedule_supported(plan) and (model is None or _fits(plan, model))]
    if model is None or model.moe is None:
        return plans
    return [expanded for plan in plans for expanded in _with_experts(plan) if _fits(expanded, model)]


def _with_experts(plan: Plan) -> Iterator[Plan]:
    """Yield ``plan`` with each ep, etp, degree and overlap; without an all-to-all there is one overlap."""
    for ep, etp in itertools.product(divisors(plan.stage_ranks), divisors(plan.stage_ranks)):
        if plan.stage_ranks % (ep * etp) == 0:
            for degree in (0, *divisors(etp)) if ep * etp > 1 else (1,):
                exchanges = degree and ep * etp > 1
                node_sizes = (0, *divisors(ep * etp)[1:-1][:1]) if exchanges else (0,)
                overlaps, shadows = ((1, OVERLAP), (0, SHADOWS)) if exchanges else ((1,), (0,))
                for overlap, node_size, shadow in itertools.product(overlaps, node_sizes, shadows):
                    laid = {
                        "ep": ep,
                        "etp": etp,
                        "adaptive_r": degree,
                        "overlap": overlap,
                        "hierarchical_a2a_size": node_size,
                        "shadows": shadow,
                    }
                    with suppress(PlanError):  # some cannot be combined
                        yield plan.replace(**laid)


def _dense_plans(world: int) -> Iterator[Plan]:
    for sizes in itertools.product(*[[d for d in range(1, world + 1) if world % d == 0]] * len(AXES)):
        grid: dict[str, Any] = dict(zip(AXES, sizes, strict=True))
        if grid["pp"] * grid["replicate"] * grid["dp"] * grid["cp"] * grid["tp"] != world:
            continue
        pipelines: list[dict[str, Any]] = [{}]
        if grid["pp"] > 1:
            pipelines = [{"schedule": name} for name in ("gpipe", "1f1b", "zero_bubble")]
            pipelines += [{"schedule": name, "stages": STAGES} for name in MULTI_STAGE_SCHEDULES]
        sharded = grid["replicate"] * grid["dp"] * grid["cp"] > 1
        reshards = [True, False] if sharded and grid["pp"] == 1 else [True]
        sequences = [(False, False), (True, False), (True, True)] if grid["tp"] > 1 else [(False, False)]
        for pipeline, reshard, (sequence, overlap) in itertools.product(pipelines, reshards, sequences):
            yield Plan(**grid, **pipeline, reshard=reshard, sequence_parallel=sequence, tp_overlap=overlap)


def _fits(plan: Plan, model: ModelConfig) -> bool:
    try:
        plan.check(model)
    except PlanError:
        return False
    return True


def covering(plans: list[Plan]) -> list[Plan]:
    """Return a few of ``plans`` that cover every pair of choices in any of them; the most useful first."""
    covered = [pairs(plan) for plan in plans]
    missing = set().union(*covered)
    chosen: list[Plan] = []
    while missing:
        best = max(range(len(plans)), key=lambda i: len(covered[i] & missing))  # the first of equals: deterministic
        chosen.append(plans[best])
        missing -= covered[best]
    return chosen


def pairs(plan: Plan) -> set[tuple[tuple[str, object], ...]]:
    """Return all pairs of choices in a plan."""
    choices = plan.model_dump(exclude={"layers"})
    if plan.pp == 1:  # these have no effect
        choices |= {"schedule": None, "stages": None}
    return set(itertools.combinations(sorted(choices.items()), 2))


HEAD_WIDTH, VOCABULARY, CONTEXT = 4, 211, 64
MIN_HIDDEN = 57
"""With this many no rank of 8 or fewer is without hidden units."""
EXPERTS, EXPERT_WIDTH = 16, 24
"""Maximum number of experts, and of their hidden units; both can be divided over 2, 3, 4 and 8 ranks."""
CAPACITY_TOKENS = 2
"""A capacity that the sequences of a step exceed."""


def shrink(model: ModelConfig, layers: int) -> ModelConfig:
    """Return ``model`` with ``layers`` blocks and heads of :data:`HEAD_WIDTH`."""
    scale = min(1.0, HEAD_WIDTH / model.head_width)
    # Odd, so that no even tensor-parallel degree divides it: the uneven case covers the even one.
    hidden = max(model.heads, MIN_HIDDEN, round(model.ffn_width * scale)) | 1
    moe = model.moe and _shrink_experts(model.moe)
    return model.replace(
        layers=layers,
        head_width=round(model.head_width * scale),
        width=max(2, round(model.width * scale) // 2 * 2),
        ffn_width=hidden,
        moe=moe,
        latent=model.latent
        and model.latent.replace(kv_rank=7, q_rank=model.latent.q_rank and 9, rope_width=2, v_width=3),
        vocab_size=min(model.vocab_size, VOCABULARY),
        context=CONTEXT,
        relative_positions=model.relative_positions and model.relative_positions.replace(buckets=8, distance=9),
        encoder=model.encoder
        and model.encoder.replace(
            layers=min(model.encoder.layers, layers),
            ffn_width=model.encoder.ffn_width and hidden,
            context=CONTEXT,
            first_k_dense_replace=min(model.encoder.first_k_dense_replace, 1),
        ),
        window=None if model.window is None else min(model.window, 7),
        window_from_layer=min(model.window_from_layer, layers - 1),
        task_head=model.task_head
        if model.causal or model.predicts_masked
        else "pretraining",  # verify trains, on tokens
        classes=0,
    )


def _shrink_experts(moe: MoeConfig) -> MoeConfig:
    """Keep the choices of ``moe`` with at most :data:`EXPERTS` experts, in as many router groups as divide them."""
    experts, router = min(moe.experts, EXPERTS), moe.router
    groups = math.gcd(experts, router.groups)
    kept = min(router.groups_kept, groups)
    return moe.replace(
        experts=experts,
        merged=min(moe.merged, experts // 2),
        active=min(moe.active, kept * (experts // groups)),
        ffn_width=EXPERT_WIDTH,
        shared_width=moe.shared_width and EXPERT_WIDTH + 1,
        first_k_dense_replace=min(moe.first_k_dense_replace, 1),
        capacity_tokens=moe.capacity_tokens and CAPACITY_TOKENS,
        # The texts of verify have no task.
        router=router.replace(groups=groups, groups_kept=kept, task=0 if router.kind == "task" else router.task),
    )
