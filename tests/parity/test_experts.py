"""A model with experts on any grid, degree and overlap equals the model in one process."""

import itertools
import re

import pytest
import torch

from colonnade.config import ModelConfig, MoeConfig, Plan
from colonnade.errors import PlanError
from colonnade.model import Dropout, DropoutRates, Loss, Packed, Rows, Stream, Transformer
from colonnade.model.moe import DispatchOptions, Routing
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.parallel.hierarchical_all_to_all import ExchangeSizes, HierarchicalAllToAll
from colonnade.parallel.layout import PARTIAL, layout_of, local_part
from colonnade.train.optimizer_step import sum_expert_grads
from tests.models import MOES, build, ragged
from tests.worlds import assert_same, run

NONE = DropoutRates()


def _steps(etp: int) -> list[DispatchOptions]:
    degrees = [0] + [r for r in range(1, etp + 1) if etp % r == 0]
    options = [DispatchOptions(r, p) for r, p in itertools.product(degrees, (1, 3))]
    return [*options, DispatchOptions(degrees[-1], 1, shadows=1), DispatchOptions(1, 2, shadows=4)]


def _forward(
    model: Transformer,
    stream: Stream,
    attend: Packed,
    targets: torch.Tensor,
    step: DispatchOptions,
    rates: DropoutRates = NONE,
) -> list[float]:
    """Forward and backward; returns the losses."""
    model.zero_grad()
    index_T = torch.arange(len(targets)) + 9
    routing = Routing(index_T, weight=torch.tensor(0.7), dispatch=(step,))
    noise = Dropout.of(3, 4, model.config.layers, index_T, rates)
    total, count = model(stream._replace(routing=routing, dropout=noise), attend, Loss(targets))
    (total / count).backward()
    return [total.item(), *(float(x) for report in routing.reports.values() for x in (report.balance, report.z))]


def _check(config: ModelConfig, plan: Plan, rates: DropoutRates) -> None:
    with DistributedContext.build(plan) as context:
        axes = context.axes
        whole, mine = build(config), build(config, axes)
        layout = layout_of(mine)
        for name, p in whole.named_parameters():
            assert_same(mine.get_parameter(name), local_part(p, layout[name], axes), what=f"initial {name}")
        stream, attend, targets = ragged(config)
        expected = torch.tensor(_forward(whole, stream, attend, targets, DispatchOptions(), rates))
        plain = torch.tensor(_forward(build(config), stream, attend, targets, DispatchOptions()))
        assert rates.expert == 0 or (expected - plain).abs()[0] > 1e-8, "dropout has an effect"
        for step in _steps(plan.etp):
            found = torch.tensor(_forward(mine, stream, attend, targets, step, rates))
            assert_same(found, expected, what=f"losses, {step}")
            sum_expert_grads(dict(mine.named_parameters()), layout, axes.experts)
            for name, p in mine.named_parameters():
                assert p.grad is not None, f"{name}, {step}"
                grad = axes.tp.sum_(p.grad) if layout[name] is PARTIAL else p.grad
                reference = whole.get_parameter(name).grad
                assert reference is not None
                assert_same(grad, local_part(reference, layout[name], axes), what=f"gradient of {name}, {step}")
        with torch.no_grad():
            logits = whole(stream, attend, Rows())
            assert_same(mine(stream, attend, Rows()), logits, what="logits")
            if axes.serving().cp_replicated:
                served = build(config, axes.serving())(stream, attend, Rows())
                assert_same(served, logits, what="logits of a serving model")


PLANS = [
    (Plan(tp=2, ep=2), ["gated"]),
    (Plan(tp=2, etp=2, sequence_parallel=True), ["gated", "biased_shared"]),
    (Plan(tp=3, ep=3), ["capacity"]),
    (Plan(tp=4, ep=2, etp=2), ["gated"]),
    (Plan(tp=4, etp=4, sequence_parallel=True), ["biased_shared"]),
    (Plan(tp=4, ep=2, sequence_parallel=True), ["capacity"]),
    (Plan(tp=4, ep=2, etp=2, hierarchical_a2a_size=2), ["gated", "capacity"]),
    (Plan(tp=6, ep=6, hierarchical_a2a_size=3), ["biased_shared"]),
    (Plan(tp=6, ep=3, etp=2, hierarchical_a2a_size=2, sequence_parallel=True), ["capacity"]),
    (Plan(tp=3, ep=3, hierarchical_a2a_size=1), ["gated"]),
]
"""Every grid, and the kinds of models that CI runs with it: each kind meets ep, etp, near and sequence parallelism. The
rest of the product is `long`.
"""


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("name", "plan"),
    [
        pytest.param(name, plan, id=f"{name}-{plan}", marks=[] if name in often else [pytest.mark.long])
        for plan, often in PLANS
        for name in MOES
    ],
)
def test_any_grid_equals_one_process(name: str, plan: Plan) -> None:
    """On half of the grids with dropout of expert hidden units, with the same masks as in one process."""
    rates = DropoutRates(residual=0.1, expert=0.4) if plan.world % 4 else DropoutRates()
    run(plan.world, _check, MOES[name], plan, rates)


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan", [Plan(tp=4, ep=2, etp=2), Plan(tp=4, ep=2, etp=2, hierarchical_a2a_size=2, sequence_parallel=True)]
)
def test_expert_dropout_equals_one_process(plan: Plan) -> None:
    run(plan.world, _check, MOES["biased_shared"], plan, DropoutRates(expert=0.4))


def _refusal(plan: Plan, step: DispatchOptions) -> str:
    config = MOES["gated"]
    with DistributedContext.build(plan) as context:
        model, (stream, attend, targets) = build(config, context.axes), ragged(config)
        with pytest.raises(PlanError) as refused:
            _forward(model, stream, attend, targets, step)
        return str(refused.value)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("plan", "step", "message_pattern"),
    [
        (
            Plan(tp=4, etp=4),
            DispatchOptions(3),
            r"adaptive_r 3 does not divide the etp=4 .* use 0 or one of \[1, 2, 4\]",
        ),
        (Plan(tp=2, ep=2), DispatchOptions(2), r"adaptive_r 2 does not divide the etp=1 .* use 0 or one of \[1\]"),
        (Plan(tp=2, etp=2), DispatchOptions(-1), "adaptive_r -1 does not divide"),
        (Plan(tp=2, ep=2), DispatchOptions(1, 0), "cannot be sent in 0 parts"),
        (Plan(tp=2, ep=2), DispatchOptions(1, 1, 7), "7 of 6 experts cannot be shadowed"),
    ],
    ids=str,
)
def test_bad_dispatch_options_are_refused_on_all_ranks(plan: Plan, step: DispatchOptions, message_pattern: str) -> None:
    (message,) = set(run(plan.world, _refusal, plan, step))
    assert re.search(message_pattern, message)


def _dispatch_and_return(plan: Plan) -> int:
    """Dispatch and return rows in one step and in two; returns the number of received rows."""
    with DistributedContext.build(plan) as context:
        grid = context.axes.experts
        assert grid.intra_node is not None
        table = torch.randint(0, 4, (plan.ep, plan.ep), generator=torch.Generator().manual_seed(0))
        table[1], table[:, 2] = 0, 0  # a rank that sends nothing, and one that receives nothing
        send = table[grid.all.rank]
        x_RD = torch.randn(int(send.sum()), 3, generator=torch.Generator().manual_seed(grid.all.rank))
        found: list[list[torch.Tensor]] = []
        for web in (HierarchicalAllToAll(grid.all), HierarchicalAllToAll(grid.all, grid.intra_node, grid.inter_node)):
            theirs, between = web.exchange_counts(send)
            crossing = [] if between is None else web.intermediate_counts(between.flatten().tolist())
            sizes = ExchangeSizes(send.tolist(), theirs.tolist(), *crossing)
            leaf = x_RD.clone().requires_grad_()
            received = web.finish(web.begin(leaf, sizes), sizes)
            back = web.finish_return(web.begin_return(received * 2, sizes), sizes)
            back.backward(x_RD.sin())
            assert leaf.grad is not None and torch.equal(back.detach(), x_RD * 2)
            found.append([theirs, received.detach(), leaf.grad])
        assert all(torch.equal(one, two) for one, two in zip(*found, strict=True))
        assert torch.equal(found[0][0], table[:, grid.all.rank])
        return len(found[0][1])


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "plan", [Plan(dp=6, ep=6, hierarchical_a2a_size=3), Plan(dp=6, ep=6, hierarchical_a2a_size=2)], ids=str
)
def test_two_step_exchange_is_bitwise_equal_to_one_step(plan: Plan) -> None:
    received = run(plan.world, _dispatch_and_return, plan)
    assert received[2] == 0 and min(received[:2] + received[3:]) > 0


def test_moes_differ() -> None:
    assert all(isinstance(config.moe, MoeConfig) for config in MOES.values())
