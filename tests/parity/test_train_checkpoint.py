"""A checkpoint written under any plan loads under any other: weights, optimizer and the next step agree.

World 8 is tp=4 with dp=2; smaller plans run on the first ranks of smaller worlds. Each plan trains two steps, saves,
and takes one more; every plan then loads every checkpoint and must take that same step.
"""

import json
from pathlib import Path

import pytest
import torch

from colonnade.checkpoint import native
from colonnade.config import Plan
from colonnade.model import Transformer
from colonnade.parallel.distributed_context import DistributedContext
from tests.parity.train_cases import CASES as ALL
from tests.parity.train_cases import Run
from tests.worlds import assert_same, run

CASES = {name: config for name, config in ALL.items() if name != "bert"}
"""One of the two BERTs is enough: their layouts are the same."""

PLANS = [Plan(tp=tp, dp=dp) for tp in (1, 2, 4) for dp in (1, 2)] + [
    Plan(pp=2, tp=2, sequence_parallel=True),
    Plan(cp=2, dp=2),
    Plan(pp=2, replicate=2, schedule="gpipe"),
]


def label(plan: Plan) -> str:
    return str(plan).replace(" ", "-")


def _save(plan: Plan, root: Path) -> dict[str, list[tuple[float, float]]]:
    with DistributedContext.build(plan) as context:
        losses = {}
        for case, config in CASES.items():
            it = Run.start(config, context)
            it.go(0, 2)
            meta = native.Meta(model=config, step=2)
            folder = root / case / label(plan)
            native.save(folder, it.model, meta, context, masters=it.masters, optimizer=it.optimizer)
            losses[case] = it.go(2, 4)
        return losses


def _load(plan: Plan, root: Path, expected: dict[str, dict[str, list[tuple[float, float]]]]) -> int:
    with DistributedContext.build(plan) as context:
        pairs = 0
        for number, (saved, cases) in enumerate(expected.items()):
            # Each pair of plans loads one of the families, in turn, so that every plan loads all of them.
            case = list(CASES)[(number + PLANS.index(plan)) % len(CASES)]
            it = Run.start(CASES[case], context, seed=99)
            meta = native.load(root / case / saved, it.model, context, masters=it.masters, optimizer=it.optimizer)
            assert meta.step == it.optimizer.steps == 2
            for got, want in zip(it.go(2, 4), cases[case], strict=True):
                if saved == label(plan):
                    assert got == tuple(want), f"{saved} is not bitwise the uninterrupted run"
                assert abs(got[0] - want[0]) <= 1e-10, f"{case} {saved} -> {plan}: loss {got[0]} for {want[0]}"
                assert abs(got[1] - want[1]) <= 1e-10, f"{case} {saved} -> {plan}: norm {got[1]} for {want[1]}"
            pairs += 1
        return pairs


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "plans",
    [
        pytest.param([p for p in PLANS[:6] if p.world < 8], id="tp_dp"),
        pytest.param(PLANS, id="all", marks=pytest.mark.long),
    ],
)
def test_every_plan_loads_every_checkpoint(plans: list[Plan], tmp_path: Path) -> None:
    expected = {label(p): run(p.world, _save, p, tmp_path)[0] for p in plans}
    one = expected[label(Plan())]
    for cases in expected.values():
        for case, steps in cases.items():
            losses, reference = (torch.tensor(numbers, dtype=torch.float64) for numbers in (steps, one[case]))
            assert_same(losses, reference, what=case)
    for plan in plans:
        assert run(plan.world, _load, plan, tmp_path, expected)[0] == len(plans)


def _load_weights_only(root: Path) -> None:
    """Two ranks save; each then loads alone, without the group, and both load tensor-parallel, cast to float32."""
    plan, config = Plan(tp=2), CASES["gpt2"]
    with DistributedContext.build(plan) as context:
        it = Run.start(config, context)
        native.save(root / "step-0", it.model, native.Meta(model=config), context, masters=it.masters)
        alone = Transformer(config, dtype=torch.float64)
        native.load(root / "step-0", alone, DistributedContext.solo())
        one = Run.start(config, DistributedContext.solo())
        for (name, got), want in zip(alone.named_parameters(), one.model.parameters(), strict=True):
            assert_same(got.detach(), want.detach(), what=name)
        as_float32 = Transformer(config, context.axes, dtype=torch.float32)
        native.load(root / "step-0", as_float32, context)
        for name, got in as_float32.named_parameters():
            assert_same(got.detach(), it.masters.local[name].detach().float(), 1e-12, what=name)


def test_weights_load_without_optimizer_or_group(tmp_path: Path) -> None:
    run(2, _load_weights_only, tmp_path)
    index = json.loads((tmp_path / "step-0" / "tensors.json").read_text())["tensors"]
    assert all(key.startswith("weights/") for key in index)
    pieces = index["weights/embed.tokens.weight"]["pieces"]
    assert [(p["offsets"], p["sizes"]) for p in pieces] == [([0, 0], [51, 24]), ([51, 0], [50, 24])]
