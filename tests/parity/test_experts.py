"""A model with experts on any grid of ranks, at any degree and overlap, equals the model in one process."""

import itertools

import pytest
import torch

from colonnade.config import ModelConfig, MoeConfig, Plan
from colonnade.model import Loss, Packed, Rows, Stream, Transformer
from colonnade.model.moe import Routing, Spread
from colonnade.parallel.layout import PARTIAL, layout_of, share
from colonnade.parallel.mesh import Ground
from colonnade.train.norm import sum_experts
from tests.models import MOES, build, ragged
from tests.worlds import assert_same, run

pytestmark = pytest.mark.xdist_group("worlds")


def _steps(sh: int) -> list[Spread]:
    degrees = [0] + [r for r in range(1, sh + 1) if sh % r == 0]
    ways = [Spread(r, p) for r, p in itertools.product(degrees, (1, 3))]
    return [*ways, Spread(degrees[-1], 1, shadows=1), Spread(1, 2, shadows=4)]


def _forward(model: Transformer, stream: Stream, attend: Packed, targets: torch.Tensor, step: Spread) -> list[float]:
    """Backward too; the losses."""
    model.zero_grad()
    routing = Routing(torch.arange(len(targets)), weight=torch.tensor(0.7), steps=(step,))
    total, count = model(stream._replace(routing=routing), attend, Loss(targets))
    (total / count).backward()
    return [total.item(), *(float(x) for report in routing.reports.values() for x in (report.balance, report.z))]


def _check(config: ModelConfig, plan: Plan) -> None:
    with Ground.build(plan) as ground:
        axes = ground.axes
        whole, mine = build(config), build(config, axes)
        layout = layout_of(mine)
        for name, p in whole.named_parameters():
            assert_same(mine.get_parameter(name), share(p, layout[name], axes), what=f"initial {name}")
        stream, attend, targets = ragged(config)
        expected = torch.tensor(_forward(whole, stream, attend, targets, Spread()))
        for step in _steps(plan.sh):
            found = torch.tensor(_forward(mine, stream, attend, targets, step))
            assert_same(found, expected, what=f"losses, {step}")
            sum_experts(dict(mine.named_parameters()), layout, axes.grid)
            for name, p in mine.named_parameters():
                assert p.grad is not None, f"{name}, {step}"
                grad = axes.tp.sum_(p.grad) if layout[name] is PARTIAL else p.grad
                reference = whole.get_parameter(name).grad
                assert reference is not None
                assert_same(grad, share(reference, layout[name], axes), what=f"gradient of {name}, {step}")
        with torch.no_grad():
            assert_same(mine(stream, attend, Rows()), whole(stream, attend, Rows()), what="logits")


@pytest.mark.parametrize(
    "plan",
    [
        Plan(tp=2, ep=2),
        Plan(tp=2, sh=2, sequence_parallel=True),
        Plan(tp=3, ep=3),
        Plan(tp=4, ep=2, sh=2),
        Plan(tp=4, sh=4, sequence_parallel=True),
        Plan(tp=4, ep=2, sequence_parallel=True),
        Plan(tp=4, ep=2, sh=2, near=2),
        Plan(tp=6, ep=6, near=3),
        Plan(tp=6, ep=3, sh=2, near=2, sequence_parallel=True),
        Plan(tp=3, ep=3, near=1),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", MOES)
def test_equals_one_process(name: str, plan: Plan) -> None:
    run(plan.world, _check, MOES[name], plan)


def test_moes_differ() -> None:
    assert all(isinstance(config.moe, MoeConfig) for config in MOES.values())
