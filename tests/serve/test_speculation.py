"""Speculative decoding changes no text: not greedy, not sampled, not under preemption, not on several ranks."""

from typing import Any

import pytest
import torch

from colonnade.config import Plan, ServeConfig
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.serve import Completion, Engine, SamplingParams, StructuredOutputs, speculation
from colonnade.serve.request import Stats
from colonnade.serve.speculation import NgramDrafter
from tests.serve import tiny
from tests.worlds import run

FEW = {7: 60.0, 9: 60.0, 11: 60.0}
"""Three tokens are much more probable than the others, so that three tokens often occur again."""
TIGHT = ServeConfig(pages=24, page_tokens=3, token_budget=23, max_requests=6)


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts are tried however often they were wrong."""
    monkeypatch.setattr(speculation, "MIN_RATE", 0.0)


def requests(count: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts of several lengths, and parameters of several kinds."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 1.3},
        {"temperature": 0.8, "top_p": 0.9, "logprobs": 2},
        {"temperature": 1, "top_k": 2, "min_tokens": 9},
        {"temperature": 1, "stop_token_ids": [9]},
        {"temperature": 1, "frequency_penalty": 0.5},
        {"temperature": 1, "structured_outputs": StructuredOutputs(regex="[(*,]{14}")},
    ]
    prompts = [[5, *[7, 9, 11, 7] * (i % 4), i % 300] for i in range(count)]
    params = [
        SamplingParams(seed=i, max_tokens=14 + i % 9, logit_bias=FEW, **kinds[i % len(kinds)]) for i in range(count)
    ]
    return prompts, params


def generate(count: int, limits: ServeConfig, model: Any = None) -> tuple[list[Completion], Stats]:
    engine = Engine(tiny.model() if model is None else model, tiny.tokenizer(), limits)
    completions = engine.generate(*requests(count))
    engine.scheduler.audit()
    assert engine.scheduler.pool.free == engine.scheduler.pool.pages
    return completions, engine.stats


def check_same(count: int, drafted: tuple[list[Completion], Stats], plain: list[Completion]) -> None:
    completions, stats = drafted
    for params, got, expected in zip(requests(count)[1], completions, plain, strict=True):
        assert got.token_ids == expected.token_ids and got.text == expected.text, params
        assert got.finish_reason == expected.finish_reason
        if params.logprobs is not None:
            assert got.logprobs is not None and expected.logprobs is not None
            logprobs = [each.logprob for each in expected.logprobs]
            assert [each.logprob for each in got.logprobs] == pytest.approx(logprobs, abs=1e-9)
    assert 0 < stats.accepted_draft_tokens < stats.draft_tokens and stats.drafts >= count // 2


@pytest.mark.sample(1)
@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("limits", [ServeConfig(pages=400), TIGHT], ids=["roomy", "tight"])
def test_speculation_changes_no_text(limits: ServeConfig, ahead: bool):
    limits = limits.replace(async_scheduling=ahead, graph_capture=ahead)
    count = 70
    plain, _ = generate(count, limits)
    drafted = generate(count, limits.replace(draft="ngram"))
    check_same(count, drafted, plain)
    assert (drafted[1].preemptions > 0) == (limits.pages == TIGHT.pages)


@pytest.mark.long
@pytest.mark.usefixtures("eager")
def test_speculation_changes_no_text_of_a_thousand_requests():
    plain, _ = generate(1000, ServeConfig(pages=400))
    check_same(1000, generate(1000, ServeConfig(pages=400, draft="ngram")), plain)


@pytest.mark.usefixtures("eager")
def test_speculation_has_the_same_bits_under_batch_invariance():
    model = tiny.model(dtype=torch.float32)
    plain, _ = generate(20, ServeConfig(pages=99, batch_invariant=True), model)
    drafted, stats = generate(20, ServeConfig(pages=99, batch_invariant=True, draft="ngram"), model)
    assert drafted == plain and stats.accepted_draft_tokens > 0, "log-probabilities too"


def _serve(plan: dict[str, int], limits: ServeConfig) -> tuple[list[Completion], Stats]:
    speculation.MIN_RATE = 0.0
    with DistributedContext.build(Plan(**plan)) as context:
        engine = Engine(tiny.model(context.axes.serving()), tiny.tokenizer(), limits)
        if context.rank:
            engine.follow()
            return [], Stats()
        completions = engine.generate(*requests(21))
        engine.stop()
        return completions, engine.stats


@pytest.mark.sample(1)
@pytest.mark.parametrize("plan", [{"tp": 2}, {"cp": 2}], ids=["tp", "cp"])
def test_speculation_changes_no_text_on_two_ranks(plan: dict[str, int]):
    limits = ServeConfig(pages=60, page_tokens=3, max_requests=9, draft="ngram", graph_capture=True)
    plain, _ = generate(21, ServeConfig(pages=400))
    check_same(21, run(2, _serve, plan, limits)[0], plain)


def test_text_that_repeats_is_drafted_and_other_text_is_not():
    repeating = NgramDrafter([1, 2, 3, 4] * 9, 6)
    assert repeating.active and repeating.draft(9) == [1, 2, 3, 4, 1, 2]
    assert repeating.draft(2) == [1, 2]
    ids = list(range(100))
    drafter = NgramDrafter(ids, 6)
    assert not drafter.active and drafter.draft(6) == []
    for _ in range(3):
        ids += [50, 51, 52, 53, 54, 55, 56, 57]
        drafter.update()
    assert drafter.active and drafter.draft(3) == [50, 51], "the rate allows two"
    ids += range(200, 230)
    drafter.update()
    assert not drafter.active


def test_a_text_that_repeats_takes_fewer_steps():
    prompt, params = [7, 9, 11, 13] * 9, SamplingParams(temperature=0, max_tokens=60, logit_bias={7: 90})
    plain, drafted = (Engine(tiny.model(), tiny.tokenizer(), ServeConfig(draft=draft)) for draft in (None, "ngram"))
    assert plain.generate([prompt], params) == drafted.generate([prompt], params)
    assert drafted.stats.steps < plain.stats.steps / 3
    assert drafted.stats.accepted_draft_tokens > 0.8 * drafted.stats.draft_tokens


def test_a_text_without_repetition_is_never_drafted():
    engine = Engine(tiny.model(), tiny.tokenizer(), ServeConfig(draft="ngram"))
    engine.generate([[3, 4, 5]], SamplingParams(temperature=1, seed=1, max_tokens=60, ignore_eos=True))
    assert engine.stats.draft_tokens == 0
