"""Pairwise coverage of MoE options: router, dropping, kernel, degree, overlap, shadowing and grid.

Each pair of options occurs in a case that equals one process in values, gradients, losses and the global norm. The
cases have one layer, so that a hundred take seconds. tests/parity/test_verify_moe.py tests full models under all plans;
tests/unit/test_expert_kernels.py and tests/gpu test the GPU kernels.
"""

import functools
import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from colonnade.config import Plan
from colonnade.config.model import divisors
from colonnade.kernels import registry as kernels
from colonnade.model import Dropout, DropoutRates, Transformer, initialise
from colonnade.model.moe import DispatchOptions, LayerRouting, MixtureOfExperts, Routing, TokenGroups, experts
from colonnade.model.moe.router import uses_noise
from colonnade.parallel.axis import SOLO_AXES, Axes, world_axis
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.parallel.layout import PARTIAL, Experts, layout_of, local_part
from colonnade.train.optimizer_step import gradient_norm, sum_expert_grads
from tests.routers import KINDS, TOKENS, WIDTH, config_of, moe_of, tokens
from tests.worlds import assert_same, run

DROPS: dict[str, dict[str, Any]] = {
    "dropless": {},
    "tight": {"capacity": 1.0},
    "tight by probability": {"capacity": 1.0, "priority": True},
    "dropped to the residual": {"capacity": 0.5, "dropped_token_output": "residual"},
    "as large as the largest load": {"capacity": 0.0, "priority": True},
    "bounded": {"capacity": -1.5},
}
COMPUTES = {"loop": torch.float64, "grouped": torch.float32}
"""Expert kernel and dtype: torch's grouped product does not support float64."""
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5}
PLANS = [
    Plan(dp=3, ep=3),
    Plan(dp=4, ep=2, etp=2),
    Plan(dp=2, tp=2, ep=2, etp=2, sequence_parallel=True, hierarchical_a2a_size=2),
    Plan(dp=2, tp=2, etp=2),
    Plan(tp=4, etp=4),
]
"""Experts over data and tensor ranks, copies of experts, and node groups; with three or four data ranks one is empty.
"""
SIZES = {1: [29], 2: [8, 21], 3: [17, 0, 12], 4: [3, 15, 0, 11]}
"""Tokens of each data rank."""


class Case(NamedTuple):
    router: str
    drop: str
    compute: str
    plan: Plan
    adaptive_r: int
    overlap: int
    shadows: int


def all_cases() -> list[Case]:
    cases: list[Case] = []
    for router, drop, compute, plan in itertools.product(KINDS, DROPS, COMPUTES, PLANS):
        for degree in (0, *divisors(plan.etp)):
            overlaps_and_shadows = [(1, 0)] if degree == 0 else list(itertools.product((1, 3), (0, 1)))
            cases += [Case(router, drop, compute, plan, degree, *way) for way in overlaps_and_shadows]
    return cases


def pairs(case: Case) -> set[tuple[Any, ...]]:
    return set(itertools.combinations(zip(Case._fields, map(str, case), strict=True), 2))


@functools.cache
def covering() -> list[Case]:
    """Cases in which every pair of compatible choices occurs."""
    cases, draw = all_cases(), random.Random(0)
    missing, chosen = set().union(*map(pairs, cases)), []
    while missing:
        candidates = draw.sample(cases, 30)
        best = max(candidates, key=lambda case: len(pairs(case) & missing))
        if not pairs(best) & missing:  # few pairs are left: take a case with one of them
            best = next(case for case in cases if min(missing) in pairs(case))
        chosen.append(best)
        missing -= pairs(best)
    return chosen


class Outputs(NamedTuple):
    y: Tensor
    x: Tensor
    """The gradient of the layer's input."""
    losses: Tensor
    """Balance and z losses."""
    load: Tensor
    dropped: Tensor
    gradients: dict[str, Tensor]


def layer_of(router: str, drop: str, axes: Axes, dtype: torch.dtype) -> MixtureOfExperts:
    moe = moe_of(router, **DROPS[drop], shared_width=5)
    config = config_of(moe).replace(init_std=0.5, ffn_bias=True, heads=4, kv_heads=4)
    model = initialise(Transformer(config, axes, dtype=dtype), seed=2)
    layer = model.get_submodule("blocks.0.ffn")
    assert isinstance(layer, MixtureOfExperts)
    shapes, layout = model.global_shapes(), layout_of(layer)
    with torch.no_grad():
        for name, p in (*layer.named_parameters(), *layer.named_buffers()):
            if name.endswith(("bias", "bias_E")):
                shape = shapes[f"blocks.0.ffn.{name}"]
                whole = torch.linspace(-0.2, 0.3, shape.numel(), dtype=p.dtype).view(shape)
                p.copy_(local_part(whole, layout.get(name, PARTIAL), axes))
    return layer


def run_layer(layer: MixtureOfExperts, mine: Tensor, step: DispatchOptions) -> Outputs:
    """Forward and backward of this data rank's tokens ``mine``."""
    axes, dtype = layer.axes, layer.experts.up.dtype
    x_TD, tokens_T, index_T, units = tokens()
    T, here = len(mine), axes.rows(len(mine))
    x_tD = x_TD[mine][here].to(dtype).requires_grad_()
    noise = Dropout.of(11, 4, 1, index_T[mine][here], DropoutRates()).at(0) if uses_noise(layer.moe) else None
    routing = Routing(index_T[mine], weight=0.7, token_groups=TokenGroups(units.group_T[mine], units.count))
    y_tD, report = layer(x_tD, T, LayerRouting(tokens_T[mine], routing, step), noise)
    counts_TD = (torch.outer(index_T[mine] % 7 - 2, torch.arange(1, WIDTH + 1)) % 5 - 1)[here]
    (y_tD * counts_TD.to(dtype)).sum().backward()
    assert x_tD.grad is not None
    gradients = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in layer.named_parameters()}
    outputs = torch.stack([report.balance, report.z]).detach()
    return Outputs(y_tD.detach(), x_tD.grad, outputs, report.load_E, report.dropped, gradients)


def use_kernel(compute: str) -> Callable[..., Any]:
    """A kernel lookup that returns this kernel for the experts."""

    def choose(operation: Any, device: str, dtype: torch.dtype) -> Callable[..., Any]:
        if operation != "routed_experts":
            return kernels.choose(operation, device, dtype)
        if compute in ("loop", "reference"):
            return kernels.choose(operation, device, dtype, compute)
        of_rows = kernels.choose("dropout_experts", device, dtype, compute)
        gather, combine = (kernels.choose(move, device, dtype) for move in ("gather_rows", "combine_rows"))

        def routed(x: Tensor, order: Tensor, ends: Tensor, weights: Tensor, stacks: Any, activation: str) -> Tensor:
            return combine(of_rows(gather(x, order, weights.shape[1]), ends, stacks, activation), order, weights)

        return routed

    return choose


def reference_outputs(router: str, drop: str, dtype: torch.dtype, patch: pytest.MonkeyPatch) -> Outputs:
    """Outputs of one process with the plain kernels."""
    patch.setattr(experts, "choose", use_kernel("reference"))
    return run_layer(layer_of(router, drop, SOLO_AXES, dtype), torch.arange(TOKENS), DispatchOptions())


def _norm(layer: MixtureOfExperts, context: DistributedContext, gradients: dict[str, Tensor]) -> Tensor:
    """The global norm as a run computes it, where FSDP shards the parameters that are not experts."""
    layout, weights = layout_of(layer), {}
    for name, gradient in gradients.items():
        rows = slice(None) if isinstance(layout[name], Experts) else slice(*context.shard.part(len(gradient)))
        weights[name] = torch.empty_like(gradient[rows])
        weights[name].grad = gradient[rows]
    return gradient_norm(weights, layout, layer.axes, world_axis())


def check(plan: Plan, cases: Sequence[Case]) -> None:
    order = torch.randperm(TOKENS, generator=torch.Generator().manual_seed(plan.dp))
    wholes: dict[tuple[Any, ...], Outputs] = {}
    with DistributedContext.build(plan) as context, pytest.MonkeyPatch.context() as patch:
        axes = context.axes
        mine = order.split(SIZES[plan.dp])[axes.dp.rank]
        for case in cases:
            dtype, description = COMPUTES[case.compute], str(case)
            key = case.router, case.drop, dtype
            whole = wholes.get(key) or reference_outputs(*key, patch)
            wholes[key] = whole
            patch.setattr(experts, "choose", use_kernel(case.compute))
            layer = layer_of(case.router, case.drop, axes, dtype)
            outputs = run_layer(layer, mine, DispatchOptions(case.adaptive_r, case.overlap, case.shadows))
            same = functools.partial(assert_same, tolerance=TOLERANCES[dtype])
            here = mine[axes.rows(len(mine))]
            same(outputs.y, whole.y[here], what=f"{description}: y")
            same(outputs.x, whole.x[here], what=f"{description}: gradient of x")
            same(outputs.losses, whole.losses, what=f"{description}: losses")
            assert torch.equal(axes.experts.tokens.sum_(outputs.load), whole.load), f"{description}: load"
            assert torch.equal(axes.experts.tokens.sum_(outputs.dropped), whole.dropped), f"{description}: dropped"
            layout = layout_of(layer)
            sum_expert_grads(dict(layer.named_parameters()), layout, axes.experts)
            gradients: dict[str, Tensor] = {}
            for name, p in layer.named_parameters():
                gradient = outputs.gradients[name] if p.grad is None else p.grad
                if not isinstance(layout[name], Experts):
                    gradient = axes.batch.sum_(axes.tp.sum_(gradient) if layout[name] is PARTIAL else gradient)
                reference = local_part(whole.gradients[name], layout[name], axes)
                same(gradient, reference, what=f"{description}: gradient of {name}")
                gradients[name] = gradient
            norm = torch.stack([g.double().square().sum() for g in whole.gradients.values()]).sum().sqrt()
            same(_norm(layer, context, gradients).double(), norm, what=f"{description}: norm")


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_each_pair_of_choices_equals_one_process(plan: Plan) -> None:
    run(plan.world, check, plan, [case for case in covering() if case.plan == plan])


def test_cases_cover_all_pairs_and_drop_tokens() -> None:
    met = set().union(*map(pairs, covering()))
    assert met == set().union(*map(pairs, all_cases())) and len(covering()) < 150
    assert (("router", "gshard"), ("drop", "tight")) in met and (("adaptive_r", "2"), ("overlap", "3")) in met
    with pytest.MonkeyPatch.context() as patch:
        lost = {drop: reference_outputs("softmax", drop, torch.float64, patch).dropped for drop in DROPS}
    assert {drop for drop, count in lost.items() if not count} == {"dropless", "as large as the largest load"}
