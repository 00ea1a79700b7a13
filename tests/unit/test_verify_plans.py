"""The plans that `verify` tries, and the reduced model on which it tries them."""

import itertools
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colonnade.config import EncoderConfig, ModelConfig, MoeConfig, Plan, RouterConfig
from colonnade.config.presets import PRESETS, preset
from colonnade.errors import PlanError
from colonnade.parallel.pipeline import schedule_supported
from colonnade.verify import all_plans, covering, shrink
from colonnade.verify.plans import pairs


def enumerated(world: int) -> set[Plan]:
    """The same plans by trying all combinations and keeping those that differ."""
    plans = set()
    for pp, replicate, dp, cp, tp in itertools.product(range(1, world + 1), repeat=5):
        if pp * replicate * dp * cp * tp != world:
            continue
        orders = [("1f1b", 1)] if pp == 1 else [
            ("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zero_bubble", 1), ("zero_bubble", 2)
        ]  # fmt: skip
        for schedule, stages in orders:
            for sequence_parallel, tp_overlap in {(False, False), (tp > 1, False), (tp > 1, tp > 1)}:
                for reshard in {True, not (pp == 1 and replicate * dp * cp > 1)}:
                    plans.add(
                        Plan(
                            pp=pp, replicate=replicate, dp=dp, cp=cp, tp=tp, schedule=schedule, stages=stages,
                            sequence_parallel=sequence_parallel, tp_overlap=tp_overlap, reshard=reshard,
                        )
                    )  # fmt: skip
    return plans


@pytest.mark.parametrize(("world", "count"), [(1, 1), (2, 14), (4, 68), (6, 122)])
def test_all_plans_are_enumerated(world: int, count: int) -> None:
    plans = all_plans(world)
    assert len(plans) == len(set(plans)) == count
    assert set(plans) == enumerated(world)
    assert len({str(plan) for plan in plans}) == count, "different plans must differ in the matrix"


MODELS = st.builds(
    lambda kv_heads, layers: ModelConfig(
        vocab_size=53, layers=layers, width=24, heads=4 * kv_heads, kv_heads=kv_heads, head_width=4, ffn_width=29
    ),
    st.integers(1, 8),
    st.integers(1, 16),
)


@settings(max_examples=40)
@given(st.sampled_from([1, 2, 3, 4, 6, 8]), MODELS)
def test_every_valid_pair_of_choices_is_covered(world: int, model: ModelConfig) -> None:
    plans = all_plans(world, model)
    chosen = covering(plans)
    assert set(chosen) <= set(plans) and len(set(chosen)) == len(chosen)
    met = set().union(*(pairs(plan) for plan in chosen))
    assert met == set().union(*(pairs(plan) for plan in plans))
    for plan in chosen:
        assert plan.world == world
        plan.check(model)
    left_out = [plan for plan in all_plans(world) if plan not in plans]
    for plan in left_out:
        with pytest.raises(PlanError):
            plan.check(model)


def test_pairs_of_choices() -> None:
    """By hand, to check that the property above is not vacuous."""
    met = pairs(Plan(pp=2, tp=2, sequence_parallel=True, schedule="gpipe"))
    assert (("schedule", "gpipe"), ("sequence_parallel", True)) in met
    assert len(met) == 16 * 15 // 2
    assert (("pp", 1), ("schedule", "gpipe")) not in pairs(Plan(schedule="gpipe")), (
        "without a pipeline it is not a choice"
    )


def test_plan_set_is_deterministic_and_starts_with_the_useful() -> None:
    plans = all_plans(4)
    assert covering(plans) == covering(plans)
    assert len(covering(plans)) < len(plans)
    first, last = covering(plans)[0], covering(plans)[-1]
    assert len(pairs(first)) >= len(pairs(last) - set().union(*(pairs(plan) for plan in covering(plans)[:-1]))) > 0
    assert covering([]) == []


MODEL_CHANGES = {
    "layers", "width", "head_width", "ffn_width", "vocab_size", "context", "window", "window_from_layer", "task_head",
    "classes", "moe", "latent", "encoder", "relative_positions",
}  # fmt: skip
ENCODER_CHANGES = {"layers", "ffn_width", "context", "first_k_dense_replace"}
MOE_CHANGES = {
    "experts", "active", "ffn_width", "shared_width", "first_k_dense_replace", "router", "capacity_tokens",
}  # fmt: skip


@pytest.mark.sample(41)
@pytest.mark.parametrize("name", PRESETS)
def test_reduced_model_keeps_what_decides_layouts(name: str) -> None:
    model = preset(name)
    small = shrink(model, 5)
    unchanged = set(ModelConfig.model_fields) - MODEL_CHANGES
    assert {field: getattr(small, field) for field in unchanged} == {
        field: getattr(model, field) for field in unchanged
    }
    assert (small.moe is None) == (model.moe is None)
    assert (small.latent is None) == (model.latent is None)
    assert (small.relative_positions is None) == (model.relative_positions is None)
    assert (small.encoder is None) == (model.encoder is None)
    if small.encoder is not None and model.encoder is not None:
        unchanged = set(EncoderConfig.model_fields) - ENCODER_CHANGES
        assert {field: getattr(small.encoder, field) for field in unchanged} == {
            field: getattr(model.encoder, field) for field in unchanged
        }
    if small.moe is not None and model.moe is not None:
        unchanged = set(MoeConfig.model_fields) - MOE_CHANGES
        assert {field: getattr(small.moe, field) for field in unchanged} == {
            field: getattr(model.moe, field) for field in unchanged
        }
        assert bool(small.moe.capacity_tokens) == bool(model.moe.capacity_tokens)
        assert small.moe.experts <= 16
        assert all(small.moe.experts % n == 0 for n in (2, 4, 8) if model.moe.experts % n == 0)
    assert small.layers == 5
    assert (small.window is None) == (model.window is None)
    assert small.parameters < min(model.parameters, 5_000_000)
    assert small.ffn_width % 2 and small.vocab_size % 2, "shares are uneven"
    assert small.causal or small.predicts_masked, "there must be something to train on"
    for plan in covering(all_plans(2, small)):
        plan.check(small)
    allowed = [tp for tp in (1, 2, 3, 4, 8) if model.kv_heads % tp == 0]
    for tp in allowed:
        Plan(tp=tp).check(small)


def test_late_window_start_is_kept() -> None:
    model = preset("mistral-7b").replace(window_from_layer=20)
    small = shrink(model, 5)
    assert [small.window_of(i) for i in range(5)] == [None] * 4 + [7]


def test_other_heads_become_the_two_losses() -> None:
    bert = preset("bert-base")
    for top in ("encoder", "classes", "spans"):
        whole = bert.replace(task_head=top, classes=5) if top == "classes" else bert.replace(task_head=top)
        assert shrink(whole, 2).task_head == "pretraining"
    assert shrink(bert.replace(task_head="masked"), 2).task_head == "masked"


def test_task_router_gets_a_task() -> None:
    tour = preset("tour-moe")
    assert tour.moe is not None
    likeness = shrink(tour.replace(moe=tour.moe.replace(router=RouterConfig(kind="task", tasks=3))), 4)
    assert likeness.moe is not None and likeness.moe.router.task == 0


def test_readme_has_the_current_number_of_plans() -> None:
    tour, readme = preset("tour"), (Path(__file__).parents[2] / "README.md").read_text("utf-8")
    plans = covering(all_plans(2, shrink(tour, 4)))
    (number,) = re.findall(r"under (\d+) plans of 2 processes", readme)
    assert f"{number} of {number} plans equal one process" in readme
    every = schedule_supported(Plan(pp=2, schedule="zero_bubble"))  # which needs torch 2.13
    assert int(number) == len(plans) if every else int(number) > len(plans)
