"""``colonnade verify`` on models with experts: correct grids pass, and each injected fault is found."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from colonnade.config import ModelConfig, MoeConfig, Plan, RouterConfig
from colonnade.parallel.pipeline import schedule_supported
from colonnade.verify import TOLERANCE, all_plans, covering
from tests.parity import expert_faults as faults
from tests.parity.test_verify import compared, in_parts
from tests.worlds import run

MODEL = ModelConfig(
    vocab_size=53, layers=3, width=16, heads=4, head_width=4, ffn_width=29, context=64, tied=True, ffn_bias=True,
    moe=MoeConfig(
        experts=4, active=2, ffn_width=8, shared_width=5, first_k_dense_replace=1, balance_weight=0.3, z_weight=0.1,
        bias_rate=0.01,
        router=RouterConfig(noise=1.0, jitter=0.1),
    ),
)  # fmt: skip
FAULTS = [
    (faults.copies_not_summed, Plan(dp=2), "gradients", "experts"),
    (faults.output_bias_of_own_tokens, Plan(dp=2, etp=2), "gradients", "experts.down_bias"),
    (faults.copies_counted, Plan(dp=2), "norm", ""),
    (faults.every_slice_adds_the_bias, Plan(tp=2, etp=2, adaptive_r=2), "loss", ""),
    (faults.own_tokens_balanced, Plan(dp=2, ep=2), "gradients", r"router|blocks\.[01]"),  # or an earlier layer
    (faults.hidden_units_by_their_place_here, Plan(dp=2, etp=2, adaptive_r=2), "loss", ""),
    (faults.bias_by_own_load, Plan(dp=2, ep=2), "step", ""),  # another bias changes the choices, and so all weights
    (faults.shadows_keep_their_gradient, Plan(dp=2, ep=2, shadows=1), "gradients", "experts"),
    (faults.rows_in_the_order_of_arrival, Plan(dp=2, ep=2), "loss", ""),
]  # fmt: skip


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("fault", "plan", "check", "where"), FAULTS, ids=[f"{fault.__name__}-{plan}" for fault, plan, *_ in FAULTS]
)
def test_broken_layout_is_found(fault: Callable, plan: Plan, check: str, where: str, tmp_path: Path) -> None:
    for (result,) in run(2, compared, MODEL, [plan], tmp_path, fault):
        failed = {name for name, error in result.errors.items() if not error <= TOLERANCE}
        assert check in failed, result.errors
        assert re.search(where, result.where[check]), result.where


@pytest.mark.slow
def test_same_comparison_passes_without_a_fault(tmp_path: Path) -> None:
    plans = list(dict.fromkeys(plan for _, plan, *_ in FAULTS))
    for results in run(2, compared, MODEL, plans, tmp_path, None):
        assert {str(result.plan): result.errors for result in results if not result.ok} == {}


@pytest.mark.slow
def test_first_covering_plans_of_four_processes(tmp_path: Path) -> None:
    """The plans that combine the most choices."""
    plans = covering(all_plans(4, MODEL.replace(layers=4)))[:1]
    plans += [Plan(cp=2, dp=2, ep=2, etp=2, hierarchical_a2a_size=2, adaptive_r=2)]
    plans += [Plan(pp=2, tp=2, etp=2, schedule="zero_bubble")]  # gathered weights, whose gradients arrive transposed
    in_parts(4, MODEL, list(filter(schedule_supported, plans)), tmp_path, 3)


POOLED = MODEL.replace(
    layers=4,
    moe=MODEL.moe.replace(balance_over="model", balance_weight=3.0, mlp_only_layers=(3,)),  # type: ignore[union-attr]
)
"""One balance loss over layers 1 and 2; the first and last of four stages have no experts."""
POOLED_PLANS = [
    Plan(dp=2, ep=2),
    Plan(cp=2, etp=2),
    Plan(tp=2, ep=2, sequence_parallel=True),
    Plan(pp=2),
    Plan(pp=2, schedule="gpipe"),
    Plan(pp=2, schedule="interleaved", stages=2),
    Plan(pp=2, schedule="zero_bubble", stages=2),
]


@pytest.mark.slow
def test_balance_loss_over_all_layers(tmp_path: Path) -> None:
    """With every kind of rank and schedule."""
    for results in run(2, compared, POOLED, list(filter(schedule_supported, POOLED_PLANS)), tmp_path, None):
        assert {str(result.plan): result.errors for result in results if not result.ok} == {}


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("fault", "plan"),
    [
        (faults.own_tokens_pooled, Plan(cp=2)),
        (faults.own_tokens_pooled, Plan(dp=2, ep=2)),
        (faults.own_stage_pooled, Plan(pp=2)),
    ],
)
def test_balance_loss_missing_layers_or_ranks_is_found(fault: Callable, plan: Plan, tmp_path: Path) -> None:
    for (result,) in run(2, compared, POOLED, [plan], tmp_path, fault):
        assert not result.errors["gradients"] <= TOLERANCE


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_covering_set_of_four_processes(tmp_path: Path) -> None:
    plans = covering(all_plans(4, MODEL.replace(layers=8)))
    assert len(plans) > 40
    in_parts(4, MODEL, plans, tmp_path, 3)


ROUTERS: dict[str, dict[str, Any]] = {
    "capacity": {"capacity": 0.75, "priority": True, "dropped_token_output": "residual"},
    "gshard": {"router": RouterConfig(kind="gshard", jitter=0.1), "capacity": 1.0, "balance": "gshard"},
    "noisy": {"router": RouterConfig(kind="noisy"), "bias_rate": 0.0, "balance": "importance"},
    "cosine": {"router": RouterConfig(kind="cosine", projection=8, noise=1.0)},
    "sigmoid": {"router": RouterConfig(kind="sigmoid", groups=2, groups_kept=2), "balance": "sequence"},
    "expert_choice": {"router": RouterConfig(kind="expert_choice"), "bias_rate": 0.0},
    "hash": {"router": RouterConfig(kind="hash"), "bias_rate": 0.0},
    "sequence": {"router": RouterConfig(kind="sequence"), "balance": "sequence"},
    "topology": {"router": RouterConfig(kind="topology", nodes=2), "bias_rate": 0.0},
}
ROUTER_CASES = [
    Plan(cp=2, ep=2),
    Plan(pp=2),
    Plan(dp=2, etp=2, adaptive_r=0),
    Plan(tp=2, ep=2, sequence_parallel=True, overlap=2),
]


@pytest.mark.long
@pytest.mark.parametrize("name", ROUTERS)
def test_full_models_with_each_router(name: str, tmp_path: Path) -> None:
    """Over context, data, tensor and pipeline ranks; test_moe_covering.py tests one layer of each in more ways."""
    model = MODEL.replace(moe=MODEL.moe.replace(**ROUTERS[name]))  # type: ignore[union-attr]
    for results in run(2, compared, model, ROUTER_CASES, tmp_path, None):
        assert {str(result.plan): result.errors for result in results if not result.ok} == {}
