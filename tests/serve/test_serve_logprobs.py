"""Log-probabilities of generated tokens and of prompts equal those of one long forward pass."""

import math

import pytest
import torch

from colonnade.config import Plan, ServeConfig
from colonnade.errors import RequestError
from colonnade.model import loss
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.serve import Completion, Engine, SamplingParams
from colonnade.serve.ipc import decode_message, encode_message, output_from_list, output_to_list
from colonnade.serve.request import TokenLogprob
from tests.serve import tiny
from tests.worlds import run

PROMPTS = [[5, 9, 100, 7, 20, 31, 44, 2, 250, 17, 3], [5, 9, 100, 7, 20, 31, 44, 2, 8], [42], list(range(40, 57))]
PARAMS = [
    SamplingParams(temperature=0.7, top_k=9, seed=3, max_tokens=9, ignore_eos=True, logprobs=5, prompt_logprobs=2),
    SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, logprobs=0),
    SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, prompt_logprobs=0, logprobs=20),
    SamplingParams(temperature=1, seed=1, max_tokens=9, ignore_eos=True),
]
TIGHT = ServeConfig(pages=12, page_tokens=3, token_budget=7, max_requests=3)
"""Chunked prefills, preemption and recomputation."""


def check(entries: tuple[TokenLogprob, ...], tokens: list[int], logp_TV: torch.Tensor, count: int) -> None:
    assert [each.token for each in entries] == tokens
    for each, logp_V in zip(entries, logp_TV, strict=True):
        assert each.logprob == pytest.approx(logp_V[each.token].item(), abs=1e-9)
        assert [other.logprob for other in each.top] == pytest.approx(logp_V.topk(count).values.tolist(), abs=1e-9)
        assert [other.token for other in each.top] == logp_V.topk(count).indices.tolist()
        if count:
            assert each.greedy == (int(logp_V.argmax()) == each.token)


def check_all(completions: list[Completion]) -> None:
    model = tiny.model()
    for prompt, params, done in zip(PROMPTS, PARAMS, completions, strict=True):
        logp_TV = tiny.logits(model, [*prompt, *done.token_ids]).log_softmax(-1)
        if params.logprobs is None:
            assert done.logprobs is None
        else:
            assert done.logprobs is not None
            check(done.logprobs, list(done.token_ids), logp_TV[len(prompt) - 1 : -1], params.logprobs)
        if params.prompt_logprobs is None:
            assert done.prompt_logprobs is None
        else:
            assert done.prompt_logprobs is not None
            first, *rest = done.prompt_logprobs
            assert (first.token, first.logprob, first.top) == (prompt[0], None, ())
            check(tuple(rest), prompt[1:], logp_TV[: len(prompt) - 1], params.prompt_logprobs)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("limits", [ServeConfig(), TIGHT], ids=["roomy", "tight"])
def test_logprobs_are_those_of_one_forward_pass(limits: ServeConfig, ahead: bool):
    engine = Engine(tiny.model(), tiny.tokenizer(), limits.replace(async_scheduling=ahead, graph_capture=ahead))
    check_all(engine.generate(PROMPTS, PARAMS))
    check_all(engine.generate(PROMPTS, PARAMS))  # with prompts in the prefix cache
    assert (engine.stats.preemptions > 0) == (limits is TIGHT)
    engine.scheduler.audit()


def test_prompts_are_scored_in_chunks(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(loss.CHUNK_ROWS, "cpu", 2)
    check_all(Engine(tiny.model(), tiny.tokenizer(), ServeConfig()).generate(PROMPTS, PARAMS))


def test_batch_invariant_logprobs_have_the_same_bits_alone():
    engine = Engine(tiny.model(dtype=torch.float32), tiny.tokenizer(), ServeConfig(batch_invariant=True))
    together = engine.generate(PROMPTS, PARAMS)
    assert together == [engine.generate([prompt], one)[0] for prompt, one in zip(PROMPTS, PARAMS, strict=True)]


def _serve(world: int) -> list[Completion]:
    with DistributedContext.build(Plan(tp=world)) as context:
        engine = Engine(tiny.model(context.axes.serving()), tiny.tokenizer(), TIGHT.replace(async_scheduling=True))
        if context.rank:
            engine.follow()
            return []
        done = engine.generate(PROMPTS, PARAMS)
        engine.stop()
        return done


def test_logprobs_under_tensor_parallelism():
    check_all(run(2, _serve, 2)[0])


def test_sampling_is_the_same_without_logprobs():
    engine = Engine(tiny.model(), tiny.tokenizer(), ServeConfig())
    plain = [SamplingParams(**{**vars_of(each), "logprobs": None, "prompt_logprobs": None}) for each in PARAMS]
    assert [c.token_ids for c in engine.generate(PROMPTS, plain)] == [
        c.token_ids for c in engine.generate(PROMPTS, PARAMS)
    ]


def vars_of(params: SamplingParams) -> dict[str, object]:
    return {name: getattr(params, name) for name in SamplingParams.__dataclass_fields__}


def test_a_request_may_only_score_its_prompt():
    engine = Engine(tiny.model(), tiny.tokenizer(), ServeConfig())
    whole = [i % 300 for i in range(engine.model.config.context)]
    params = SamplingParams(max_tokens=0, echo=True, prompt_logprobs=1)
    (done,) = engine.generate([whole], params)
    assert done.token_ids == () and done.finish_reason == "length" and done.logprobs is None
    assert done.prompt_logprobs is not None and len(done.prompt_logprobs) == len(whole)
    assert done.text == engine.tokenizer.decode(whole)
    assert engine.stats.generation_tokens == 0 and engine.stats.prompt_tokens == len(whole)
    with pytest.raises(RequestError, match="max_tokens is 0; it must be 1 or more"):
        SamplingParams(max_tokens=0)


def test_echo_offsets_and_bytes_spell_the_text():
    engine = Engine(tiny.model(), tiny.tokenizer(), ServeConfig())
    prompt = "größer 🙂 als naïve"
    params = SamplingParams(max_tokens=20, seed=1, echo=True, prompt_logprobs=0, logprobs=0, ignore_eos=True)
    (echoed,) = engine.generate([prompt], params)
    (plain,) = engine.generate([prompt], SamplingParams(max_tokens=20, seed=1, ignore_eos=True))
    assert echoed.text == prompt + plain.text
    assert echoed.prompt_logprobs is not None and echoed.logprobs is not None
    assert b"".join(each.data for each in echoed.prompt_logprobs) == prompt.encode()
    offsets = [each.offset for each in (*echoed.prompt_logprobs, *echoed.logprobs)]
    assert offsets == sorted(offsets) and offsets[0] == 0 and echoed.logprobs[0].offset == len(prompt)


def test_outputs_travel_between_processes():
    engine = Engine(tiny.model(), tiny.tokenizer(), ServeConfig())
    engine.add("ö and 🙂", PARAMS[0])
    while engine.busy:
        for output in engine.step():
            assert output_from_list(decode_message(encode_message(output_to_list(output)))) == output


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
@pytest.mark.parametrize("value", [-1, 21, 1.5, True])
def test_bad_values_are_refused(name: str, value: object):
    with pytest.raises(RequestError, match=name) as refusal:
        SamplingParams(**{name: value})  # type: ignore[arg-type]
    assert refusal.value.param == name


def test_improbable_tokens_stay_finite_in_json():
    from colonnade.serve.api.reply_builders import _finite

    assert _finite(-math.inf) == -9999.0
