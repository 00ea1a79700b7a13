"""Training under every plan equals one process: loss, gradients, clip norm and weights, to 1e-10."""

import pytest
import torch

from colonnade.config import Plan, TrainConfig
from colonnade.parallel.distributed_context import DistributedContext
from tests.parity.train_cases import CASES, PLANS, TRAIN, Run, alone, raw, raw_alone
from tests.worlds import assert_same, run

STEPS = 3


def _check_training(plan: Plan, case: str, train: TrainConfig = TRAIN) -> None:
    one, expected = alone(CASES[case], STEPS)
    with DistributedContext.build(plan) as context:
        several = Run.start(CASES[case], context, train)
        found = several.go(0, STEPS)
        assert all(norm > 0.1 for _, norm in expected), "clipping must be active"
        for (loss, norm), (loss_1, norm_1) in zip(found, expected, strict=True):
            assert abs(loss - loss_1) <= 1e-10 * max(1, loss_1)
            assert abs(norm - norm_1) <= 1e-10 * max(1, norm_1)
        for name, weight in several.masters.local.items():
            assert_same(weight, several.shard_of(name, one.masters.local[name]), what=name)
        for key, moment in several.optimizer.state.items():
            assert_same(moment, several.shard_of(key.partition("/")[2], one.optimizer.state[key]), what=key)


def _check_gradients(plan: Plan, case: str) -> None:
    """Every gradient before clipping, relative to the largest."""
    one = raw_alone(CASES[case], 0)
    with DistributedContext.build(plan) as context:
        several = raw(CASES[case], context, 0)
        for name, weight in several.masters.local.items():
            whole = one.masters.local[name].grad
            assert whole is not None and weight.grad is not None and whole.abs().max() > 0, name
            assert_same(weight.grad, several.shard_of(name, whole), what=name)


SHARED = {"llama": slice(None, None, 2), "megatron-bert": slice(1, None, 2)}
"""Where four processes combine two axes, gpt2 trains under every plan, and these two take turns: each is tested with
each axis alone on two and three processes.
"""


def _check_all_plans(world: int, case: str) -> None:
    for plan in PLANS[world][SHARED.get(case, slice(None)) if world == 4 else slice(None)]:
        _check_gradients(plan, case)
        _check_training(plan, case)


MARKS = {
    **{key: [pytest.mark.long] for key in (("qwen3", 4), ("bert", 4))},
    **{(case, 1): [pytest.mark.slow] for case in CASES},
    **{key: [pytest.mark.slow] for key in (("gpt2", 3), ("megatron-bert", 3), ("llama", 4), ("megatron-bert", 4))},
}
"""Without these every family still trains on two processes, and on three or four; gpt2 under every plan of four."""


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("case", "world"),
    [pytest.param(case, world, marks=MARKS.get((case, world), [])) for case in CASES for world in (1, 2, 3, 4)],
)
def test_training_equals_one_process(case: str, world: int) -> None:
    run(world, _check_all_plans, world, case)
    assert torch.get_default_dtype() == torch.float32


def _fused_adamw() -> None:
    for plan in (Plan(tp=2), Plan(dp=2), Plan(pp=2)):
        _check_training(plan, "gpt2", TRAIN.replace(fused_adamw=True))


def test_fused_adamw_updates_shards_like_full_tensors() -> None:
    run(2, _fused_adamw)
