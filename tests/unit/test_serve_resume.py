"""A request that another engine has begun goes on from its last token as if nothing had happened."""

from dataclasses import astuple, replace

import pytest

from colonnade.config import ServeConfig
from colonnade.errors import RequestError
from colonnade.serve import Engine, SamplingParams
from colonnade.serve.request import Output
from colonnade.serve.structured_outputs import StructuredOutputs
from tests.serve import tiny

PROMPT = "The quick brown fox jumps"
PARAMS = {
    "greedy": SamplingParams(temperature=0),
    "multi-byte characters": SamplingParams(seed=5, logit_bias=dict.fromkeys(range(190, 256), 9.0)),
    "stop strings, after min_tokens": SamplingParams(seed=3, stop=["e", "zzz"], min_tokens=9),
    "penalties and bad words": SamplingParams(
        seed=1, repetition_penalty=1.3, frequency_penalty=0.5, presence_penalty=0.5, bad_words=["the fox", "ab"]
    ),
    "a grammar": SamplingParams(seed=2, structured_outputs=StructuredOutputs(regex="[a-f]{4,12}(xyz)+[0-9]{2,8}")),
    "log-probabilities and echo": SamplingParams(seed=4, echo=True, logprobs=2, prompt_logprobs=1),
}


def new_engine(**config: object) -> Engine:
    return Engine(tiny.model(), tiny.tokenizer(), ServeConfig(pages=32, **config))


def outputs(engine: Engine, params: SamplingParams, resume: list[int] | None = None) -> list[Output]:
    engine.add(PROMPT, params, request_id="a", resume=resume)
    found: list[Output] = []
    while engine.busy:
        found += engine.step()
        engine.scheduler.audit()
    return found


@pytest.mark.sample(2)
@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
def test_resumed_request_equals_the_undisturbed_one(params: SamplingParams, async_scheduling: bool):
    params = replace(params, max_tokens=24, ignore_eos=params.structured_outputs is None)
    whole = outputs(new_engine(), params)
    assert len(whole) > 6
    for cut in (0, 1, 2, len(whole) // 2, len(whole) - 1):
        engine = new_engine(async_scheduling=async_scheduling)
        resume = [each.token for each in whole[:cut]]
        rest = outputs(engine, params, resume)
        assert [_told(each) for each in rest] == [_told(each) for each in whole[cut:]], f"after {cut} tokens"
        assert rest[-1].timing is not None and min(astuple(rest[-1].timing)) >= 0
        assert engine.stats.finished == {whole[-1].finish_reason: 1}


def _told(output: Output) -> tuple:
    """What a client sees of ``output``; log-probabilities rounded, since chunks of another size round differently."""
    scores = [each for each in (output.logprobs, *(output.prompt_logprobs or ())) if each]
    return (
        output.text, output.token, output.finish_reason, output.prompt_tokens, output.generated_tokens,
        [(each.token, each.offset, round(each.logprob or 0, 9)) for each in scores],
    )  # fmt: skip


def test_resumed_requests_come_first_also_into_a_full_queue():
    engine = new_engine(max_requests=1, max_waiting=1)
    params = SamplingParams(seed=0, max_tokens=8, ignore_eos=True)
    begun = [each.token for each in outputs(new_engine(), params)][:3]
    engine.add(PROMPT, params, request_id="runs")
    engine.step()
    engine.add("another", params, request_id="waits", client="x")
    with pytest.raises(RequestError, match="the queue is full"):
        engine.add(PROMPT, params, request_id="refused")
    engine.add(PROMPT, params, request_id="first", resume=begun, client="x")
    engine.add(PROMPT, params, request_id="second", resume=begun)
    engine.add(PROMPT, params, request_id="unstarted", resume=[])
    ends: list[str] = []
    while engine.busy:
        ends += [each.id for each in engine.step() if each.finish_reason]
    assert ends == ["runs", "first", "second", "waits", "unstarted"]
    assert engine.scheduler.pool.used == 0 and not len(engine.scheduler.waiting)


def test_cancelled_resumed_request_leaves_nothing():
    engine = new_engine(max_requests=1)
    params = SamplingParams(seed=0, max_tokens=8, ignore_eos=True)
    for key in ("a", "b"):
        engine.add(PROMPT, params, request_id=key, resume=[5, 6, 7])
    engine.step()
    assert engine.cancel("b") and engine.cancel("a") and not engine.busy
    assert engine.scheduler.pool.used == 0 and not len(engine.scheduler.waiting)
