"""A router whose scores are no numbers: nothing hangs or moves, and the layer and the rank are named."""

import pytest
import torch
from torch import Tensor

from colonnade.config import MoeConfig, Plan, RunConfig
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.train.metrics import Meter
from colonnade.train.session import Session
from tests.worlds import run as in_world

pytestmark = pytest.mark.xdist_group("worlds")


def _spoil(module: object, inputs: object, scores: Tensor) -> Tensor:
    return scores * torch.nan


def _said(config: RunConfig, guilty: int, layer: int) -> list[str]:
    """The diagnoses of three steps, in the second of which the scores of ``layer`` break on rank ``guilty``."""
    said: list[str] = []
    with DistributedContext.build(config.plan, "cpu") as context:
        session = Session(config, context)
        meter = Meter(config, context, lambda steps, diagnosis: said.append(diagnosis))
        for number in (1, 2, 3):
            hook = None
            if number == 2 and context.rank == guilty and str(layer) in dict(session.model.blocks.named_children()):
                gate = session.model.get_submodule(f"blocks.{layer}.ffn.router.gates.0")
                hook = gate.register_forward_hook(_spoil)
            before = {name: x.clone() for name, x in session.model.named_buffers()}
            meter.add(number, session.step())
            moved = [name for name, x in session.model.named_buffers() if not torch.equal(x, before[name])]
            assert bool(moved) == (number != 2), "the balancing biases move but in a bad step"
            if hook is not None:
                hook.remove()
        meter.read()
    return said


@pytest.mark.parametrize(
    ("plan", "guilty", "layer"), [(Plan(dp=2, ep=2), 1, 0), (Plan(tp=2), 0, 1), (Plan(pp=2, dp=2, sh=2), 3, 1)], ids=str
)
def test_the_layer_and_the_rank_are_named_on_all_ranks(plan: Plan, guilty: int, layer: int, config: RunConfig) -> None:
    moe = MoeConfig(experts=4, active=2, ffn_width=8, bias_rate=0.01)
    laid = config.replace(plan=plan, model=config.model.replace(moe=moe, layers=2))
    for said in in_world(plan.world, _said, laid, guilty, layer):
        (diagnosis,) = said
        assert diagnosis.startswith("step 2: the loss is nan on data rank")
        whom = f"the router's scores in layer {layer} are not finite on rank {guilty} of {plan.world}"
        assert diagnosis.endswith(f"; {whom}")
