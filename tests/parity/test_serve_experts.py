"""Experts in an engine over several ranks: greedy tokens are the reference forward's, whoever holds which experts."""

import pytest
import torch

from colonnade.config import Plan
from colonnade.kernels.experts import reference
from colonnade.kernels.registry import LOOKUP
from colonnade.model.moe import MixtureOfExperts
from colonnade.parallel.distributed_context import DistributedContext
from tests.serve import tiny
from tests.serve.ranks import LIMITS, MODELS, expected, serve
from tests.worlds import assert_same, run

pytestmark = pytest.mark.xdist_group("worlds")


@pytest.mark.parametrize(
    ("name", "plan", "ahead"),
    [
        ("experts", {"tp": 2}, True),
        ("experts", {"tp": 2, "ep": 2}, True),
        ("biased", {"tp": 2, "sh": 2}, False),
        ("four_heads", {"tp": 4, "ep": 2, "sh": 2}, True),
        pytest.param("experts", {"tp": 2, "ep": 2}, False, marks=pytest.mark.long),
        pytest.param("four_heads", {"tp": 4}, True, marks=pytest.mark.long),
        pytest.param("four_heads", {"tp": 4, "ep": 4}, False, marks=pytest.mark.long),
        pytest.param("four_heads", {"tp": 4, "ep": 2}, True, marks=pytest.mark.long),
    ],
    ids=lambda x: " ".join(f"{k}={v}" for k, v in x.items()) if isinstance(x, dict) else str(x),
)
def test_greedy_is_the_reference_forward(name: str, plan: dict[str, int], ahead: bool) -> None:
    """Preempted, with a shared prefix, waiting for each step or running ahead in steps of fixed shape."""
    limits = LIMITS.replace(run_ahead=ahead, fixed_steps=ahead)
    texts, preemptions, found, _ = run(plan["tp"], serve, plan, limits, MODELS[name])[0]
    assert texts == expected(MODELS[name])
    assert preemptions > 0
    assert found > 0


def _exchanged(plan: dict[str, int]) -> int:
    """What travels between experts in a forward pass of a serving model, told by its layers; the least of all."""
    with DistributedContext.build(Plan(**plan)) as context:
        axes = context.axes.serving()
        assert axes.cp_replicated
        told: list[int] = []
        model = tiny.model(axes, **MODELS["experts"])
        for block in model.blocks:
            block.ffn.register_forward_hook(lambda *seen: told.append(int(seen[2][1].sent_bytes)))
        tiny.logits(model, list(range(5)))
        assert len(told) == 2
        return min(told)


def test_all_ranks_hold_the_tokens_so_that_only_a_sum_travels() -> None:
    """Of 5 tokens of 24 numbers in float64."""
    assert run(2, _exchanged, {"tp": 2, "ep": 2}) == [5 * 24 * 8] * 2


def _few(plan: dict[str, int], name: str, fetched: bool) -> int:
    """Logits with choices of few tokens as they come, where the reference stands for the kernel, are those without;
    how many layers did so. ``fetched``: from elsewhere, where experts that nobody chose are not numbers.
    """
    calls = []

    def counted(*given: object) -> torch.Tensor:
        calls.append(given)
        return reference.routed_unsorted(*given)  # type: ignore[arg-type]

    def fetch_of(layer: MixtureOfExperts):
        def fetch(ends_e: torch.Tensor | None, rows: int) -> reference.Weights:
            stored = layer.experts.stored
            assert ends_e is not None and isinstance(stored, reference.Weights)
            none_e = ends_e.diff(prepend=ends_e.new_zeros(1)) == 0
            return stored.map(lambda w: torch.where(none_e.view(-1, *[1] * (w.dim() - 1)), torch.nan, w.detach()))

        return fetch

    with DistributedContext.build(Plan(**plan)) as context, torch.no_grad():
        model = tiny.model(context.axes.serving(), **MODELS[name])
        wanted = tiny.logits(model, [5, 2, 7])
        key = "few_token_experts", "cpu", torch.float64, "auto"
        LOOKUP[key] = counted
        for layer in model.modules():
            if fetched and isinstance(layer, MixtureOfExperts):
                layer.experts.fetch = fetch_of(layer)
        try:
            assert_same(tiny.logits(model, [5, 2, 7]), wanted)
        finally:
            del LOOKUP[key]
    return len(calls)


@pytest.mark.parametrize(
    ("plan", "name", "fetched"),
    [
        ({}, "biased", True), ({"tp": 2, "ep": 2}, "experts", True), ({"tp": 2, "sh": 2}, "biased", False),
        ({"tp": 4, "ep": 2, "sh": 2}, "four_heads", False),
    ],
)  # fmt: skip
def test_choices_of_few_tokens_as_they_come(plan: dict[str, int], name: str, *, fetched: bool) -> None:
    assert all(count > 0 for count in run(plan.get("tp", 1), _few, plan, name, fetched))
