"""Experts in an engine over several ranks: greedy tokens are the reference forward's, whoever holds which experts."""

import pytest

from colonnade.config import Plan
from colonnade.parallel.mesh import Ground
from tests.serve import tiny
from tests.serve.ranks import LIMITS, MODELS, expected, serve
from tests.worlds import run

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
    limits = LIMITS.but(run_ahead=ahead, fixed_steps=ahead)
    texts, preemptions, found, _ = run(plan["tp"], serve, plan, limits, MODELS[name])[0]
    assert texts == expected(MODELS[name])
    assert preemptions > 0
    assert found > 0


def _exchanged(plan: dict[str, int]) -> int:
    """What travels between experts in a forward pass of a serving model, told by its layers; the least of all."""
    with Ground.build(Plan(**plan)) as ground:
        axes = ground.axes.serving()
        assert axes.alike
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
