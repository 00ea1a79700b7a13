"""Training under every plan is training in one process: loss, gradients, clip norm and updated weights, to 1e-10."""

import pytest
import torch

from colonnade.config import Plan, TrainConfig
from colonnade.parallel.distributed_context import DistributedContext
from tests.parity.train_cases import CASES, PLANS, TRAIN, Run, alone, raw, raw_alone
from tests.worlds import assert_same, run

STEPS = 3


def _trains_as_one(plan: Plan, case: str, train: TrainConfig = TRAIN) -> None:
    one, expected = alone(CASES[case], STEPS)
    with DistributedContext.build(plan) as context:
        several = Run.start(CASES[case], context, train)
        found = several.go(0, STEPS)
        assert all(norm > 0.1 for _, norm in expected), "the clip must be active"
        for (loss, norm), (loss_1, norm_1) in zip(found, expected, strict=True):
            assert abs(loss - loss_1) <= 1e-10 * max(1, loss_1)
            assert abs(norm - norm_1) <= 1e-10 * max(1, norm_1)
        for name, weight in several.masters.local.items():
            assert_same(weight, several.shard_of(name, one.masters.local[name]), what=name)
        for key, moment in several.optimizer.state.items():
            assert_same(moment, several.shard_of(key.partition("/")[2], one.optimizer.state[key]), what=key)


def _gradients_as_one(plan: Plan, case: str) -> None:
    """Every gradient before the clip, in units of the largest."""
    one = raw_alone(CASES[case], 0)
    with DistributedContext.build(plan) as context:
        several = raw(CASES[case], context, 0)
        for name, weight in several.masters.local.items():
            whole = one.masters.local[name].grad
            assert whole is not None and weight.grad is not None and whole.abs().max() > 0, name
            assert_same(weight.grad, several.shard_of(name, whole), what=name)


SHARED = {"llama": slice(None, None, 2), "megatron-bert": slice(1, None, 2)}
"""Where four processes combine two axes, gpt2 trains under every plan, and these two take turns: each meets each axis
alone among two and three processes.
"""


def _every_plan(world: int, case: str) -> None:
    for plan in PLANS[world][SHARED.get(case, slice(None)) if world == 4 else slice(None)]:
        _gradients_as_one(plan, case)
        _trains_as_one(plan, case)


LONG = ("qwen3", 4), ("bert", 4)
"""What these have beyond llama and megatron-bert three processes have to show, too."""


@pytest.mark.parametrize(
    ("case", "world"),
    [
        pytest.param(case, world, marks=[pytest.mark.long] if (case, world) in LONG else [])
        for case in CASES
        for world in (1, 2, 3, 4)
    ],
)
@pytest.mark.xdist_group("worlds")
def test_training_equals_one_process(case: str, world: int) -> None:
    run(world, _every_plan, world, case)
    assert torch.get_default_dtype() == torch.float32


def _one_pass() -> None:
    for plan in (Plan(tp=2), Plan(dp=2), Plan(pp=2)):
        _trains_as_one(plan, "gpt2", TRAIN.replace(fused_adamw=True))


@pytest.mark.xdist_group("worlds")
def test_adamw_in_one_pass_moves_shards_as_it_moves_the_whole() -> None:
    run(2, _one_pass)
