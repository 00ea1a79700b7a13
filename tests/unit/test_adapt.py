"""Choice of expert dispatch degree and overlap: the cheapest wins, and the choice is stable."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from colonnade.config import Plan
from colonnade.model.moe import DispatchOptions, MixtureOfExperts
from colonnade.model.moe.dispatch import _split_tokens, part_sizes
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.parallel.link_bandwidth import NO_TRAFFIC, Link
from colonnade.train.moe_autotune import (
    CANDIDATE_FACTOR,
    MIN_GAIN,
    OVERLAPS,
    LayerLoad,
    MeasuredCosts,
    SpreadTimings,
    candidates,
    modelled_seconds,
    pick_spread,
)
from tests.models import MOES, build
from tests.worlds import run

LINK = Link(latency_s=20e-6, bytes_per_s=100e9)
COSTS = MeasuredCosts(exchange=LINK, gathers={0: LINK, 1: LINK, 2: LINK, 4: NO_TRAFFIC}, flops_per_s=400e12)
EVEN = LayerLoad(
    ep=2, etp=4, choices=32768, busiest=131072, token_bytes=8192, weight_bytes=1 << 26, flops=6 * 4096 * 1024
)  # fmt: skip


def modelled_costs(layer: LayerLoad) -> dict[tuple[int, int], float]:
    return {
        (r, p): modelled_seconds(DispatchOptions(r, p), layer, COSTS)
        for r in (0, 1, 2, 4)
        for p in OVERLAPS
        if r or p == 1
    }


def choice_from_model(now: DispatchOptions, layer: LayerLoad) -> DispatchOptions:
    """The choice when measured times equal the modelled ones."""
    return pick_spread(
        now, {option: modelled_seconds(option, layer, COSTS) for option in candidates(now, layer, COSTS)}
    )


@pytest.mark.parametrize("now", [DispatchOptions(0, 1), DispatchOptions(1, 1), DispatchOptions(4, 4)], ids=str)
@pytest.mark.parametrize("choices", [1, 64, 4096, 1 << 20])
@pytest.mark.parametrize("weights", [1 << 16, 1 << 24, 1 << 32])
def test_choice_is_within_min_gain_of_the_best(now: DispatchOptions, choices: int, weights: int) -> None:
    layer = replace(EVEN, choices=choices, busiest=4 * choices, weight_bytes=weights)
    best = min(modelled_costs(layer).values())
    choice = choice_from_model(now, layer)
    assert best <= modelled_seconds(choice, layer, COSTS) <= best / (1 - MIN_GAIN)
    assert choice_from_model(choice, layer) == choice, "the choice must not oscillate"


def test_few_tokens_are_sent_and_small_weights_are_gathered() -> None:
    few = replace(EVEN, choices=16, busiest=64)
    assert choice_from_model(DispatchOptions(0), few).adaptive_r == 4, (
        "each token is sent to all ranks of its expert, and no weight is gathered"
    )
    small = replace(EVEN, weight_bytes=1 << 12)
    assert choice_from_model(DispatchOptions(1), small).adaptive_r == 0


def test_a_skewed_load_prefers_degree_0() -> None:
    """At degree 0 every rank has all experts, so its load is even."""
    even, skewed = (replace(EVEN, busiest=n) for n in (131072, 262144))
    assert modelled_seconds(DispatchOptions(0), even, COSTS) == modelled_seconds(DispatchOptions(0), skewed, COSTS)
    assert modelled_seconds(DispatchOptions(1), skewed, COSTS) > modelled_seconds(DispatchOptions(1), even, COSTS)


def test_overlap_hides_the_shorter_of_compute_and_exchange() -> None:
    one, four = (modelled_seconds(DispatchOptions(4, p), EVEN, COSTS) for p in (1, 4))
    sent_s = 4 * 8192 * 32768 * 4 * 7 / 8 / 100e9
    compute_s = 3 * 131072 / 4 * EVEN.flops / 400e12
    assert one == pytest.approx(sent_s + compute_s + 4 * 20e-6)
    assert one - four == pytest.approx(5 / 6 * min(sent_s, compute_s) - 3 * 4 * 20e-6)


def test_measured_times_decide_among_candidates() -> None:
    options = candidates(DispatchOptions(0, 1), EVEN, COSTS)
    cost = {option: modelled_seconds(option, EVEN, COSTS) for option in options}
    assert options[0] == DispatchOptions(0, 1) and len(options) > 2
    assert all(s <= CANDIDATE_FACTOR * min(cost.values()) for s in list(cost.values())[1:])
    seconds = dict.fromkeys(options, 1.0) | {options[2]: 0.9}
    assert pick_spread(options[0], seconds) == options[2]
    assert pick_spread(options[0], seconds | {options[2]: 0.99}) == options[0], (
        "a difference within noise changes nothing"
    )


def test_each_part_gathers_the_weights_again() -> None:
    one, two = (modelled_seconds(DispatchOptions(1, p), replace(EVEN, choices=0, busiest=0), COSTS) for p in (1, 2))
    gather_s = 3 * LINK.seconds(EVEN.weight_bytes * 3)
    assert two - one == pytest.approx(gather_s + 4 * LINK.latency_s)


def test_first_and_last_parts_are_the_smallest() -> None:
    assert [part_sizes(p) for p in (1, 2, 3, 4, 6)] == [[1], [1, 1], [1, 2, 1], [1, 2, 2, 1], [1, 2, 4, 4, 2, 1]]
    assert part_sizes(9) == [1, 2, 4, 8, 8, 8, 4, 2, 1]
    assert [_split_tokens(30, 4), _split_tokens(3, 3), _split_tokens(0, 2), _split_tokens(7, 1)] == [
        [5, 10, 10, 5],
        [0, 2, 1],
        [0, 0],
        [7],
    ]


def _count_timed_options(load: list[int]) -> list[int]:
    """The number of options timed by each of several calls."""
    with DistributedContext.build(Plan(dp=2, ep=2)) as context:
        model = build(MOES["gated"], context.axes)
        module = model.blocks.get_submodule("0.ffn")
        assert isinstance(module, MixtureOfExperts)
        timings, timed = SpreadTimings(model), []
        measure = timings._measure

        def counted(options: list[DispatchOptions], *rest: Any) -> list[float]:
            timed.append(len(options))
            return measure(options, *rest)

        timings._measure = counted  # type: ignore[method-assign]
        before = [p.detach().clone() for p in model.parameters()]
        one = timings.seconds([DispatchOptions(1, 1), DispatchOptions(0, 1)], module, 20, load)
        assert set(one) == {DispatchOptions(1, 1), DispatchOptions(0, 1)} and min(one.values()) > 0
        assert timings.seconds([DispatchOptions(1, 1)], module, 20, [n + 1 for n in load]) == {
            DispatchOptions(1, 1): one[DispatchOptions(1, 1)]
        }
        timings.seconds([DispatchOptions(1, 1), DispatchOptions(1, 3)], module, 20, load)
        timings.seconds([DispatchOptions(1, 1)], module, 20, [100, 100, 100, 1, 1, 1])
        timings.seconds([DispatchOptions(1, 1)], module, 200, load)
        assert all(torch.equal(p, q) and p.grad is None for p, q in zip(model.parameters(), before, strict=True))
        return timed


def test_a_similar_load_is_not_timed_again() -> None:
    """New options, a more skewed load or more tokens are timed; the model's weights do not change."""
    assert run(2, _count_timed_options, [30, 40, 35, 33, 31, 36])[0] == [2, 1, 1, 1]
