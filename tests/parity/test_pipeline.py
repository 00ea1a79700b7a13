"""A pipeline equals one process: loss, clip norm, weights and moments after three steps, validation."""

import pytest

from colonnade.config import DataConfig, Plan, RunConfig, TrainConfig
from colonnade.errors import ConfigError, PlanError
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.parallel.pipeline import schedule_supported
from colonnade.train.train_step import evaluate
from tests.parity.train_cases import CASES, Run, alone, micro_batches
from tests.worlds import assert_same, run

LAYERS = 5
PLANS = {
    2: [
        Plan(pp=2, schedule="gpipe"),
        Plan(pp=2),
        Plan(pp=2, schedule="interleaved", stages=2),
        Plan(pp=2, schedule="zero_bubble"),
        Plan(pp=2, schedule="zero_bubble", stages=2, layers=(2, 1, 1, 1)),
    ],
    3: [Plan(pp=3), Plan(pp=3, schedule="gpipe", layers=(1, 3, 1))],
    4: [
        Plan(pp=2, tp=2, sequence_parallel=True),
        Plan(pp=2, dp=2),
        Plan(pp=2, cp=2, schedule="gpipe"),
        Plan(pp=2, dp=2, schedule="interleaved", stages=2),
        Plan(pp=2, dp=2, schedule="zero_bubble"),
        Plan(pp=4),
        Plan(pp=2, replicate=2),
    ],
    8: [
        Plan(pp=2, cp=2, tp=2, sequence_parallel=True),
        Plan(pp=2, dp=2, cp=2),
        Plan(pp=2, schedule="gpipe", replicate=2, dp=2),
    ],
}


def _check_training(plan: Plan, case: str) -> None:
    config = CASES[case].replace(layers=LAYERS)
    one, expected = alone(config, 3)
    with DistributedContext.build(plan) as context:
        several = Run.start(config, context)
        found = several.go(0, 3)
        for (loss, norm), (loss_1, norm_1) in zip(found, expected, strict=True):
            assert abs(loss - loss_1) <= 1e-10 * max(1, loss_1), (plan, loss, loss_1)
            assert abs(norm - norm_1) <= 1e-10 * max(1, norm_1), (plan, norm, norm_1)
        for name, weight in several.masters.local.items():
            assert_same(weight, several.shard_of(name, one.masters.local[name]), what=f"{plan}: {name}")
        for key, moment in several.optimizer.state.items():
            whole = one.optimizer.state[key]
            assert_same(moment, several.shard_of(key.partition("/")[2], whole), what=f"{plan}: {key}")
        mine = micro_batches(9, context.axes.dp, config)
        every = micro_batches(9, DistributedContext.solo().axes.dp, config)
        assert_same(evaluate(several.model, mine, several.step.pipeline), evaluate(one.model, every), what="validation")


def _check_all_plans(world: int) -> None:
    """Every family over two processes, where the schedules are tested by themselves; families in turn elsewhere."""
    families = list(CASES)
    for i, plan in enumerate(filter(schedule_supported, PLANS[world])):
        for case in families if world == 2 and i < 2 else [families[i % len(families)]]:
            _check_training(plan, case)


@pytest.mark.sample(1)
@pytest.mark.parametrize("world", [pytest.param(n, marks=pytest.mark.long) if n > 4 else n for n in PLANS])
def test_pipeline_equals_one_process(world: int) -> None:
    run(world, _check_all_plans, world)


def test_stages_cover_all_layers_with_fewer_at_the_ends() -> None:
    assert [len(s) for s in Plan(pp=4).stage_layers(10)] == [2, 3, 3, 2]
    assert [list(s) for s in Plan(pp=2, layers=(1, 2)).stage_layers(3)] == [[0], [1, 2]]
    for layers in range(6, 20):
        spans = Plan(pp=3, stages=2, schedule="interleaved").stage_layers(layers)
        assert [i for span in spans for i in span] == list(range(layers))


def test_impossible_pipelines_are_refused() -> None:
    with pytest.raises(PlanError, match="2 stages per rank need a pipeline"):
        Plan(stages=2)
    with pytest.raises((PlanError, ConfigError), match="1f1b has one stage per rank, not 2"):
        Plan(pp=2, stages=2)
    with pytest.raises(PlanError, match="2 layers do not fill 4 pipeline stages"):
        Plan(pp=4).check(CASES["gpt2"])
    with pytest.raises(PlanError, match="are 5 blocks, and the model has 2"):
        Plan(pp=2, layers=(2, 3)).check(CASES["gpt2"])
    with pytest.raises(PlanError, match="needs at least 4 micro-batches per step and has 2"):
        Plan(pp=4).check_micro_batches(2)
    with pytest.raises(
        ConfigError, match="zero_bubble computes the gradients of the weights separately, and a compiled"
    ):
        RunConfig(
            model=CASES["gpt2"], plan=Plan(pp=2, schedule="zero_bubble"), data=DataConfig(sequence=8),
            train=TrainConfig(batch=4, micro_batch=1, compile=True),
        )  # fmt: skip
    with pytest.raises(PlanError, match="needs a multiple of 2 micro-batches"):
        Plan(pp=2, schedule="interleaved", stages=2).check_micro_batches(5)
