"""The choice of degree and overlap: what is cheap where, and that it does not go to and fro."""

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
    ep=2, sh=4, choices=32768, busiest=131072, token_bytes=8192, weight_bytes=1 << 26, flops=6 * 4096 * 1024
)  # fmt: skip


def ways(layer: LayerLoad) -> dict[tuple[int, int], float]:
    return {
        (r, p): modelled_seconds(DispatchOptions(r, p), layer, COSTS)
        for r in (0, 1, 2, 4)
        for p in OVERLAPS
        if r or p == 1
    }


def settled(now: DispatchOptions, layer: LayerLoad) -> DispatchOptions:
    """Where trials say what the formula says."""
    return pick_spread(now, {way: modelled_seconds(way, layer, COSTS) for way in candidates(now, layer, COSTS)})


@pytest.mark.parametrize("now", [DispatchOptions(0, 1), DispatchOptions(1, 1), DispatchOptions(4, 4)], ids=str)
@pytest.mark.parametrize("choices", [1, 64, 4096, 1 << 20])
@pytest.mark.parametrize("weights", [1 << 16, 1 << 24, 1 << 32])
def test_it_is_within_the_gain_of_the_best(now: DispatchOptions, choices: int, weights: int) -> None:
    layer = replace(EVEN, choices=choices, busiest=4 * choices, weight_bytes=weights)
    best = min(ways(layer).values())
    found = settled(now, layer)
    assert best <= modelled_seconds(found, layer, COSTS) <= best / (1 - MIN_GAIN)
    assert settled(found, layer) == found, "it does not go to and fro"


def test_few_tokens_travel_and_small_weights_do() -> None:
    few = replace(EVEN, choices=16, busiest=64)
    assert settled(DispatchOptions(0), few).degree == 4, "all of the expert's ranks share a token, and no weight moves"
    small = replace(EVEN, weight_bytes=1 << 12)
    assert settled(DispatchOptions(1), small).degree == 0


def test_a_skewed_load_prefers_degree_0() -> None:
    """Where every rank has all experts the load is even."""
    even, skewed = (replace(EVEN, busiest=n) for n in (131072, 262144))
    assert modelled_seconds(DispatchOptions(0), even, COSTS) == modelled_seconds(DispatchOptions(0), skewed, COSTS)
    assert modelled_seconds(DispatchOptions(1), skewed, COSTS) > modelled_seconds(DispatchOptions(1), even, COSTS)


def test_overlap_hides_the_shorter_of_two() -> None:
    one, four = (modelled_seconds(DispatchOptions(4, p), EVEN, COSTS) for p in (1, 4))
    sent_s = 4 * 8192 * 32768 * 4 * 7 / 8 / 100e9
    compute_s = 3 * 131072 / 4 * EVEN.flops / 400e12
    assert one == pytest.approx(sent_s + compute_s + 4 * 20e-6)
    assert one - four == pytest.approx(5 / 6 * min(sent_s, compute_s) - 3 * 4 * 20e-6)


def test_what_is_tried_decides_among_the_hopeful() -> None:
    ways = candidates(DispatchOptions(0, 1), EVEN, COSTS)
    cost = {way: modelled_seconds(way, EVEN, COSTS) for way in ways}
    assert ways[0] == DispatchOptions(0, 1) and len(ways) > 2
    assert all(s <= CANDIDATE_FACTOR * min(cost.values()) for s in list(cost.values())[1:])
    took = dict.fromkeys(ways, 1.0) | {ways[2]: 0.9}
    assert pick_spread(ways[0], took) == ways[2]
    assert pick_spread(ways[0], took | {ways[2]: 0.99}) == ways[0], "noise moves nothing"


def test_weights_are_gathered_for_each_part() -> None:
    one, two = (modelled_seconds(DispatchOptions(1, p), replace(EVEN, choices=0, busiest=0), COSTS) for p in (1, 2))
    gather_s = 3 * LINK.seconds(EVEN.weight_bytes * 3)
    assert two - one == pytest.approx(gather_s + 4 * LINK.latency_s)


def test_the_first_and_the_last_part_are_the_smallest() -> None:
    assert [part_sizes(p) for p in (1, 2, 3, 4, 6)] == [[1], [1, 1], [1, 2, 1], [1, 2, 2, 1], [1, 2, 4, 4, 2, 1]]
    assert part_sizes(9) == [1, 2, 4, 8, 8, 8, 4, 2, 1]
    assert [_split_tokens(30, 4), _split_tokens(3, 3), _split_tokens(0, 2), _split_tokens(7, 1)] == [
        [5, 10, 10, 5],
        [0, 2, 1],
        [0, 0],
        [7],
    ]


def _trials(load: list[int]) -> list[int]:
    """How many ways were tried at each of some calls."""
    with DistributedContext.build(Plan(dp=2, ep=2)) as context:
        model = build(MOES["gated"], context.axes)
        module = model.blocks.get_submodule("0.ffn")
        assert isinstance(module, MixtureOfExperts)
        trials, tried = SpreadTimings(model), []
        right = trials._measure

        def counted(ways: list[DispatchOptions], *rest: Any) -> list[float]:
            tried.append(len(ways))
            return right(ways, *rest)

        trials._measure = counted  # type: ignore[method-assign]
        before = [p.detach().clone() for p in model.parameters()]
        one = trials.seconds([DispatchOptions(1, 1), DispatchOptions(0, 1)], module, 20, load)
        assert set(one) == {DispatchOptions(1, 1), DispatchOptions(0, 1)} and min(one.values()) > 0
        assert trials.seconds([DispatchOptions(1, 1)], module, 20, [n + 1 for n in load]) == {
            DispatchOptions(1, 1): one[DispatchOptions(1, 1)]
        }
        trials.seconds([DispatchOptions(1, 1), DispatchOptions(1, 3)], module, 20, load)
        trials.seconds([DispatchOptions(1, 1)], module, 20, [100, 100, 100, 1, 1, 1])
        trials.seconds([DispatchOptions(1, 1)], module, 200, load)
        assert all(torch.equal(p, q) and p.grad is None for p, q in zip(model.parameters(), before, strict=True))
        return tried


@pytest.mark.xdist_group("worlds")
def test_a_load_like_one_that_was_tried_is_not_tried_again() -> None:
    """A new way is, a more skewed load is, more tokens are; the model's own weights stay as they are."""
    assert run(2, _trials, [30, 40, 35, 33, 31, 36])[0] == [2, 1, 1, 1]
