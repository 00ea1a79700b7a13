"""Serving experts over several ranks: greedy tokens equal the reference forward's on any expert grid."""

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


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("name", "plan", "ahead"),
    [
        ("experts", {"tp": 2}, True),
        ("experts", {"tp": 2, "ep": 2}, True),
        ("biased", {"tp": 2, "etp": 2}, False),
        ("four_heads", {"tp": 4, "ep": 2, "etp": 2}, True),
        pytest.param("experts", {"tp": 2, "ep": 2}, False, marks=pytest.mark.long),
        pytest.param("four_heads", {"tp": 4}, True, marks=pytest.mark.long),
        pytest.param("four_heads", {"tp": 4, "ep": 4}, False, marks=pytest.mark.long),
        pytest.param("four_heads", {"tp": 4, "ep": 2}, True, marks=pytest.mark.long),
    ],
    ids=lambda x: " ".join(f"{k}={v}" for k, v in x.items()) if isinstance(x, dict) else str(x),
)
def test_greedy_tokens_equal_the_reference_forward(name: str, plan: dict[str, int], ahead: bool) -> None:
    """With preemption and a shared prefix, waiting for each step or running ahead in steps of fixed shape."""
    limits = LIMITS.replace(async_scheduling=ahead, graph_capture=ahead)
    texts, preemptions, found, _ = run(plan["tp"], serve, plan, limits, MODELS[name])[0]
    assert texts == expected(MODELS[name])
    assert preemptions > 0
    assert found > 0


def _exchanged(plan: dict[str, int]) -> int:
    """The smallest number of bytes that an expert layer exchanges in a serving forward pass."""
    with DistributedContext.build(Plan(**plan)) as context:
        axes = context.axes.serving()
        assert axes.cp_replicated
        sent_bytes: list[int] = []
        model = tiny.model(axes, **MODELS["experts"])
        for block in model.blocks:
            block.ffn.register_forward_hook(lambda *seen: sent_bytes.append(int(seen[2][1].sent_bytes)))
        tiny.logits(model, list(range(5)))
        assert len(sent_bytes) == 2
        return min(sent_bytes)


def test_serving_experts_exchange_only_a_sum() -> None:
    """Of 5 tokens of 24 float64 values."""
    assert run(2, _exchanged, {"tp": 2, "ep": 2}) == [5 * 24 * 8] * 2


def _few(plan: dict[str, int], name: str, fetched: bool) -> int:
    """Compare the few-token expert path with the normal one; returns the number of layers that used it.

    The reference stands in for the kernel. With ``fetched`` the weights come from a fetch function, and those of
    experts that no token chose are NaN.
    """
    calls = []

    def counted(*args_: object) -> torch.Tensor:
        calls.append(args_)
        return reference.routed_unsorted(*args_)  # type: ignore[arg-type]

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


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("plan", "name", "fetched"),
    [
        ({}, "biased", True), ({"tp": 2, "ep": 2}, "experts", True), ({"tp": 2, "etp": 2}, "biased", False),
        ({"tp": 4, "ep": 2, "etp": 2}, "four_heads", False),
    ],
)  # fmt: skip
def test_few_token_path_gives_the_same_logits(plan: dict[str, int], name: str, *, fetched: bool) -> None:
    assert all(count > 0 for count in run(plan.get("tp", 1), _few, plan, name, fetched))
