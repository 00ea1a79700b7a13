"""A router with non-finite scores: no hang or update, and the layer and rank are named."""

import pytest
import torch
from torch import Tensor

from colonnade.config import MoeConfig, Plan, RunConfig
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.train.metrics import Meter
from colonnade.train.training_state import TrainingState
from tests.worlds import run as in_world


def _nan_scores(module: object, inputs: object, scores: Tensor) -> Tensor:
    return scores * torch.nan


def _diagnoses(config: RunConfig, bad_rank: int, layer: int) -> list[str]:
    """The diagnoses of three steps; in the second, the scores of ``layer`` are NaN on rank ``bad_rank``."""
    diagnoses: list[str] = []
    with DistributedContext.build(config.plan, "cpu") as context:
        training = TrainingState(config, context)
        meter = Meter(config, context, lambda steps, diagnosis: diagnoses.append(diagnosis))
        for number in (1, 2, 3):
            hook = None
            if number == 2 and context.rank == bad_rank and str(layer) in dict(training.model.blocks.named_children()):
                gate = training.model.get_submodule(f"blocks.{layer}.ffn.router.gates.0")
                hook = gate.register_forward_hook(_nan_scores)
            before = {name: x.clone() for name, x in training.model.named_buffers()}
            meter.add(number, training.step())
            moved = [name for name, x in training.model.named_buffers() if not torch.equal(x, before[name])]
            assert bool(moved) == (number != 2), "the balancing biases change except in a bad step"
            if hook is not None:
                hook.remove()
        meter.read()
    return diagnoses


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("plan", "bad_rank", "layer"),
    [(Plan(dp=2, ep=2), 1, 0), (Plan(tp=2), 0, 1), (Plan(pp=2, dp=2, etp=2), 3, 1)],
    ids=str,
)
def test_layer_and_rank_are_named_on_all_ranks(plan: Plan, bad_rank: int, layer: int, config: RunConfig) -> None:
    moe = MoeConfig(experts=4, active=2, ffn_width=8, bias_rate=0.01)
    with_plan = config.replace(plan=plan, model=config.model.replace(moe=moe, layers=2))
    for diagnoses in in_world(plan.world, _diagnoses, with_plan, bad_rank, layer):
        (diagnosis,) = diagnoses
        assert diagnosis.startswith("step 2: the loss is nan on data rank")
        expected = f"the router's scores in layer {layer} are not finite on rank {bad_rank} of {plan.world}"
        assert diagnosis.endswith(f"; {expected}")
