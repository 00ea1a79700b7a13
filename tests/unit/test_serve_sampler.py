"""The sampler draws from the documented distribution, determined by the seed alone."""

import io
import math
import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from colonnade.errors import RequestError
from colonnade.kernels import sampling
from colonnade.parallel.axis import SOLO, world_axis
from colonnade.serve import sampler
from colonnade.serve.sample_args import NOT_FINITE, SampleArgs
from colonnade.serve.sampler import SamplingTensors, top_candidates
from colonnade.serve.sampling_params import SamplingParams
from tests.sample_cases import sample_cases
from tests.worlds import run


def request(seed: int = 0, generated: int = 0, **params: Any) -> SampleArgs:
    return SampleArgs.of(SamplingParams(**params), seed, generated)


def sample(logits_RV: torch.Tensor, draws: list[SampleArgs]) -> list[int]:
    return sampler.sample(logits_RV, draws).tolist()


def truncate(x_RV: torch.Tensor, draws: list[SampleArgs]) -> torch.Tensor:
    """``x_RV`` with -inf for filtered tokens."""
    values, ids = top_candidates(x_RV, SamplingTensors.of(draws, x_RV), 0, SOLO)
    return torch.full_like(x_RV, -math.inf).scatter_(1, ids, values)


def frequencies(logits_V: torch.Tensor, draws: int = 4000, **params: Any) -> torch.Tensor:
    """Share of each token in ``draws`` consecutive draws of one seeded request."""
    rows = [request(5, i, **params) for i in range(draws)]
    return torch.bincount(torch.tensor(sample(logits_V.expand(draws, -1), rows)), minlength=len(logits_V)) / draws


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_greedy_takes_the_largest_logit(dtype):
    logits_RV = torch.tensor([[0.0, 3.0, 1.0], [5.0, 3.0, 1.0]], dtype=dtype)
    assert sample(logits_RV, [request(temperature=0)] * 2) == [1, 0]


def test_sorting_all_tokens_gives_the_same_tokens():
    """The reference of the GPU kernel against the sampler, which sorts as few tokens as possible."""
    for logits_RV, args_RA in sample_cases(1001):
        draws = []
        for temperature, top_k, top_p, log_min_p, low, high, index in args_RA.tolist():
            seed, min_p = int(low) | int(high) << 32, math.exp(log_min_p)
            draws.append(SampleArgs(temperature, int(top_k), top_p, min_p, seed, int(index)))
        if len(logits_RV.unique()) == logits_RV.numel():  # which of equal logits the sampler keeps is not specified
            assert sampling.sample(logits_RV, args_RA, NOT_FINITE).tolist() == sample(logits_RV, draws)


@pytest.mark.parametrize("rowwise", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_few_rows_on_one_thread_give_the_same_tokens(
    dtype: torch.dtype, rowwise: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also rows that are not finite; seeds and positions use all of their bits. A draft model's rows begin at -1."""
    generator = torch.Generator().manual_seed(1)
    for rows, V in ((1, 1), (3, 65), (40, 2048)):
        logits_RV = (3 * torch.randn(rows, V, generator=generator)).to(dtype)
        if rows == 3:
            logits_RV[1, 64], logits_RV[2] = math.nan, -math.inf
        for temperature in (1.0, 0.7):
            args = [request((i * 7919 << 38) + i, i % 3 - 1, temperature=temperature) for i in range(rows)]
            monkeypatch.setattr(sampler, "FEW_LOGITS", 0)
            expected = sampler.sample(logits_RV, args, rowwise=rowwise)
            monkeypatch.setattr(sampler, "FEW_LOGITS", rows * V)
            with monkeypatch.context() as patch:
                patch.setattr(sampler, "log_exponential_noise", None)  # the other path is not taken
                assert torch.equal(sampler.sample(logits_RV, args, rowwise=rowwise), expected)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_softmax(temperature):
    logits_V = torch.linspace(-2, 2, 12)
    p_V = (logits_V / temperature).softmax(-1)
    got_V = frequencies(logits_V, temperature=temperature)
    chi2 = (4000 * (got_V - p_V) ** 2 / p_V).sum()
    assert chi2 < 31.3  # 11 degrees of freedom: 0.1% of true samples lie above


def test_draws_over_many_seeds_follow_the_softmax():
    """Neighbouring seeds must give independent noise: people choose 0, 1, 2, …"""
    logits_V = torch.linspace(-1, 1, 8)
    tokens = sample(logits_V.expand(4000, -1), [request(seed) for seed in range(4000)])
    p_V = logits_V.softmax(-1)
    got_V = torch.bincount(torch.tensor(tokens), minlength=8) / 4000
    assert (4000 * (got_V - p_V) ** 2 / p_V).sum() < 24.3  # 7 degrees of freedom, 0.1%


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({}, 6),
        ({"top_k": 2}, 2),
        ({"top_k": 100}, 6),
        ({"top_p": 0.4}, 1),
        ({"top_p": 0.41}, 2),
        ({"top_p": 0.7}, 3),
        ({"top_p": 1e-9}, 1),
        ({"min_p": 0.5}, 2),
        ({"min_p": 0.26}, 2),
        ({"min_p": 0.2499}, 3),
        ({"min_p": 1.0}, 1),
        ({"top_k": 2, "top_p": 0.66}, 1),  # 0.4 of 0.6 is two thirds
        ({"top_k": 2, "top_p": 0.67}, 2),
        ({"top_k": 3, "min_p": 0.3}, 2),
    ],
)
def test_filters_keep_the_likeliest_tokens(params, kept):
    """p = 0.4, 0.2, 0.1, … in a shuffled order: which tokens remain, with unchanged ratios."""
    p_V = torch.tensor([0.4, 0.2, 0.1, 0.1, 0.1, 0.1]) * torch.tensor([1, 1, 1.0, 0.999, 0.998, 0.997])
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    x_V = (p_V / p_V.max()).log()[order]
    out_V = truncate(x_V[None].clone(), [request(**params)])[0]
    alive = [int(order[i]) for i in range(6) if out_V[i] > -math.inf]
    assert sorted(alive) == list(range(kept))
    assert torch.equal(out_V[out_V > -math.inf], x_V[out_V > -math.inf])


def test_top_p_drops_tokens_after_exactly_its_share():
    """Two of four equal tokens have half of the probability: the others are dropped, in both implementations."""
    logits_RV = torch.zeros(200, 4)
    assert len(set(sample(logits_RV, [request(i, top_p=0.5) for i in range(200)]))) == 2  # which two is not specified
    rows = [(1.0, 0, 0.5, -math.inf, i, 0, 0) for i in range(200)]
    assert set(sampling.sample(logits_RV, torch.tensor(rows, dtype=torch.float64), -1).tolist()) == {0, 1}


def by_sorting(x_V: torch.Tensor, k: int, p: float, min_p: float) -> set[int]:
    """The remaining tokens, by the definitions."""
    order = x_V.argsort(descending=True)[: k or None]
    shares = x_V[order].softmax(0)
    before = shares.cumsum(0) - shares
    nucleus = order[(before < p) | (torch.arange(len(order)) == 0)]
    return {int(i) for i in nucleus if x_V[i] - x_V.max() >= (math.log(min_p) if min_p else -math.inf)}


@pytest.mark.parametrize("spread", [0.01, 1.0, 4.0], ids=["flat", "usual", "peaked"])
def test_large_vocabularies_are_filtered_by_the_same_rules(spread: float):
    """Flat rows, whose nucleus is most of the vocabulary, with peaked ones, and every combination of filters."""
    x_RV = torch.randn(8, 5000, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * spread
    x_RV -= x_RV.amax(-1, keepdim=True)
    top_k, top_p = [0, 0, 3, 700, 6000, 0, 900, 1], [0.5, 1.0, 1.0, 0.8, 0.9, 0.999, 0.3, 0.5]
    min_p = [0.0, 0.2, 0.0, 0.0, 0.1, 0.0, 0.01, 0.0]
    filters = zip(top_k, top_p, min_p, strict=True)
    out_RV = truncate(x_RV, [request(top_k=k, top_p=p, min_p=m) for k, p, m in filters])
    for r in range(8):
        remaining = set((out_RV[r] > -math.inf).nonzero().flatten().tolist())
        assert remaining == by_sorting(x_RV[r], top_k[r], top_p[r], min_p[r]), r
        assert torch.equal(out_RV[r, list(remaining)], x_RV[r, list(remaining)])


def test_draws_stay_within_the_filtered_tokens():
    logits_V = torch.linspace(-2, 2, 12)
    got_V = frequencies(logits_V, 500, top_k=3)
    assert (got_V > 0).nonzero().flatten().tolist() == [9, 10, 11]


def test_rows_are_independent():
    """Each request of a mixed batch gets the tokens it gets alone."""
    torch.manual_seed(0)
    logits_RV = torch.randn(7, 50) * 3
    rows = [
        request(1, temperature=0),
        request(1),
        request(2, top_k=5),
        request(3, 9, top_p=0.5),
        request(4, min_p=0.1, temperature=1.7),
        request(-5, top_k=7, top_p=0.9, min_p=0.01),
        request(2**63 - 1, temperature=0.3),
    ]
    together = sample(logits_RV, rows)
    assert together == [sample(logits_RV[i : i + 1], rows[i : i + 1])[0] for i in range(7)]
    assert sample(logits_RV.flip(0), rows[::-1]) == together[::-1]


def test_draws_depend_on_seed_and_position():
    logits_RV = torch.zeros(1, 1000)
    draws = {sample(logits_RV, [request(seed, i)])[0] for seed in range(5) for i in range(5)}
    assert len(draws) > 20
    assert len({sample(logits_RV, [request(7, 3)])[0] for _ in range(3)}) == 1


def test_tiny_temperature_is_greedy_and_huge_is_uniform():
    logits_V = torch.tensor([1.0, 1.001, -3.0])
    assert frequencies(logits_V, 50, temperature=1e-30).tolist() == [0, 1, 0]
    assert (frequencies(logits_V, 3000, temperature=1e308) - 1 / 3).abs().max() < 0.04


def test_nan_logits_give_no_token():
    logits_RV = torch.tensor([[0.0, math.nan], [-math.inf, -math.inf], [math.inf, 0.0], [-math.inf, 1.0]])
    for temperature in (0, 1):
        got = sample(logits_RV, [request(temperature=temperature)] * 4)
        assert got == [NOT_FINITE, NOT_FINITE, NOT_FINITE, 1]


MIXED = [
    request(1, temperature=0),
    request(1),
    request(2, top_k=5),
    request(3, 9, top_p=0.9),
    request(4, min_p=0.1, temperature=1.7),
    request(-5, top_k=7, top_p=0.9, min_p=0.01),
    request(8, top_p=0.999, temperature=40.0),
    request(2**63 - 1, top_k=300),
]


def _shares_of(logits_RV: torch.Tensor) -> list[int]:
    tp, V = world_axis(), logits_RV.shape[1]
    mine = logits_RV[:, slice(*tp.part(V))]
    return sampler.sample(mine, MIXED, tp, V).tolist()


@pytest.mark.sample(3)
@pytest.mark.parametrize("V", [1, 2, 5, 7, 1001, 3000])
def test_vocabulary_parallel_ranks_choose_as_one_rank(V: int):
    """Shares of 1 token or none, nuclei wider than each rank's first candidates; a NaN on one rank only."""
    logits_RV = torch.randn(len(MIXED), V, generator=torch.Generator().manual_seed(V)) * 2
    logits_RV[1, -1], logits_RV[3, 0] = -math.inf, math.nan if V == 1001 else 3.0
    expected = sample(logits_RV, MIXED)
    assert expected.count(NOT_FINITE) == (V in (1, 1001))
    for world in (2, 3):
        assert run(world, _shares_of, logits_RV) == [expected] * world


def test_draw_round_trips_through_packing():
    draw = request(-(2**63), 7, temperature=0.1, top_p=1 / 3, min_p=1e-300, top_k=40)
    assert SampleArgs.unpack(iter(draw.pack()), io.BytesIO()) == draw and all(isinstance(n, int) for n in draw.pack())


def test_batch_without_rows():
    assert sample(torch.zeros(0, 5), []) == []


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", 1.5),
        ("seed", 2**63),
        ("stop", [""]),
        ("stop", ["x"] * 65),
        ("stop_token_ids", range(65)),
        ("max_tokens", 0),
        ("max_tokens", "5"),
        ("max_tokens", 5.0),
        ("max_tokens", True),
        ("temperature", "hot"),
        ("temperature", None),
        ("temperature", 10**400),
        ("top_k", None),
        ("top_k", 2**63),
        ("seed", 1.5),
        ("stop", 5),
        ("stop", None),
        ("stop", [b"x"]),
        ("stop_token_ids", 5),
        ("stop_token_ids", "12"),
        ("stop_token_ids", [1.0]),
        ("ignore_eos", "no"),
    ],
)
def test_invalid_values_are_named(param, value):
    with pytest.raises(RequestError, match=param) as refusal:
        SamplingParams(**{param: value})
    assert refusal.value.param == param and refusal.value.status == 400


def test_parameters_accept_numpy_values_and_pickle() -> None:
    given = SamplingParams(temperature=np.float32(0.5), top_k=np.int64(3), stop_token_ids=np.array([1, 2]))
    assert (given.temperature, given.top_k, list(given.stop_token_ids)) == (0.5, 3, [1, 2])
    assert pickle.loads(pickle.dumps(given)) == given == replace(given, seed=None)
    with pytest.raises(RequestError, match="unknown parameter 'max_new_tokens'; did you mean 'max_tokens'"):
        SamplingParams.from_kwargs({"temperature": 0, "max_new_tokens": 5})


def test_stop_accepts_a_single_string():
    assert SamplingParams(stop="end").stop == ("end",)


def test_one_pass_truncation_equals_two_passes() -> None:
    """On a GPU, without synchronising: it sorts everything, or as many as the largest top-k."""
    x_RV = torch.randn(4, 3000, generator=torch.Generator().manual_seed(0)) * torch.tensor([[0.01], [1], [3], [9]])
    x_RV = x_RV - x_RV.amax(1, keepdim=True)
    for filters in ([{"top_p": 0.9}, {"top_p": 0.99, "min_p": 0.01}, {"top_k": 5}, {"top_p": 0.5, "top_k": 700}],
                  [{"top_k": 5}, {"top_k": 2999, "top_p": 0.9}, {"top_k": 300}, {"top_k": 1}]):  # fmt: skip
        tensors = SamplingTensors.of([request(**one) for one in filters], x_RV)
        filtered = []
        for look_again in (True, False):
            values, ids = top_candidates(x_RV, tensors, 0, SOLO, allow_retry=look_again)
            filtered.append(torch.full_like(x_RV, -math.inf).scatter_(1, ids, values))
        assert torch.equal(*filtered)
        assert (filtered[0] > -math.inf).sum(1).tolist()[-1] < 3000
