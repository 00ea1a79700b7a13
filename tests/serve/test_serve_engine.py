"""The engine generates the model's tokens under chunking, interleaving, preemption and cancellation."""

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from colonnade.config import ServeConfig
from colonnade.errors import CapacityError, RequestError
from colonnade.serve import Engine, Output, SamplingParams
from tests.serve import tiny

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def model():
    return tiny.model()


def engine(model, **limits) -> Engine:
    return Engine(model, tiny.tokenizer(), ServeConfig(**{"pages": 64, "page_tokens": 4, **limits}))


def audit(it: Engine) -> None:
    it.scheduler.audit()
    assert not it.busy and it.scheduler.pool.free == it.scheduler.pool.pages and not it._live and not it._queues


prompts = st.lists(st.integers(0, 300), min_size=1, max_size=24)


@settings(max_examples=40)
@given(
    arrivals=st.lists(st.tuples(prompts, st.integers(1, 10), st.integers(0, 4)), min_size=1, max_size=6),
    page_tokens=st.integers(1, 7),
    spare_pages=st.integers(0, 12),
    token_budget=st.integers(1, 20),
    max_requests=st.integers(1, 5),
    cancelled=st.sets(st.integers(0, 5), max_size=2),
    async_scheduling=st.booleans(),
    graph_capture=st.booleans(),
)
def test_greedy_is_the_argmax_of_one_long_forward(
    model, arrivals, page_tokens, spare_pages, token_budget, max_requests, cancelled, async_scheduling, graph_capture
):
    """Any arrival order, chunk and page size; pools small enough to preempt; some requests are cancelled."""
    needed = max(-(-(len(prompt) + count - 1) // page_tokens) for prompt, count, _ in arrivals)
    it = engine(
        model,
        page_tokens=page_tokens,
        pages=needed + spare_pages,
        token_budget=token_budget,
        max_requests=max_requests,
        async_scheduling=async_scheduling,
        graph_capture=graph_capture,
    )
    texts: dict[str, list[int]] = {}
    ended: dict[str, str] = {}

    def step() -> None:
        for output in it.step():
            texts[output.id].append(output.token)
            if output.finish_reason:
                ended[output.id] = output.finish_reason
        it.scheduler.audit()

    for number, (prompt, count, pause) in enumerate(arrivals):
        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        texts[it.add(prompt, params, request_id=str(number))] = []
        for _ in range(pause):
            step()
        if number in cancelled:
            it.cancel(str(number))
    while it.busy:
        step()

    for number, (prompt, count, _) in enumerate(arrivals):
        got = texts[str(number)]
        assert got == tiny.greedy_tokens(model, prompt, len(got))
        assert (ended.get(str(number)), len(got)) == ("length", count) or number in cancelled
    audit(it)


def test_preemption_does_not_change_text(model):
    prompts = [[7 * i + j for j in range(8)] for i in range(4)]
    roomy, tight = engine(model), engine(model, pages=8)
    whole = roomy.generate(prompts, GREEDY)
    assert tight.generate(prompts, GREEDY) == whole
    assert [list(c.token_ids) for c in whole] == [tiny.greedy_tokens(model, p, 12) for p in prompts]
    assert tight.stats.preemptions > 0 and roomy.stats.preemptions == 0
    audit(tight)


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_async_scheduling_does_not_change_text(model, temperature: float):
    """Stop strings and end tokens are noticed one step late; a failing request does not affect the batch."""
    params = [
        SamplingParams(temperature=temperature, max_tokens=count, seed=count, stop=stop, top_p=p)
        for count, stop, p in ((1, (), 1.0), (30, ("e", "o"), 1.0), (9, (), 0.9), (30, ("the",), 1.0), (2, (), 0.5))
    ]
    prompts = ["The quick", "My fellow", "ö", "dog", "dog sleeps"]
    here, ahead = engine(model, pages=20), engine(model, pages=20, async_scheduling=True)
    assert ahead.generate(prompts, params) == here.generate(prompts, params)
    assert ahead.stats.generation_tokens == here.stats.generation_tokens
    audit(ahead)


def test_cached_prefix_is_not_recomputed(model):
    """A shared system prompt and a continued conversation, both also from pages that no request holds."""
    system = list(range(40, 62))  # five and a half pages of 4
    it, plain = engine(model), engine(model, prefix_cache=False)
    for prompts in ([[*system, 1]], [[*system, 2, 3], [*system, 4]], [[*system, 1, 5, 6]], [[9, *system]]):
        answers = it.generate(prompts, GREEDY)
        assert answers == plain.generate(prompts, GREEDY)
        assert [list(c.token_ids) for c in answers] == [tiny.greedy_tokens(model, prompt, 12) for prompt in prompts]
    assert it.stats.prefix_hits == 3 * 20 and plain.stats.prefix_hits == 0
    (answer,) = it.generate([[*system, 1]], GREEDY)
    it.generate([[*system, 1, *answer.token_ids, 7]], GREEDY)
    assert it.stats.prefix_hits == 3 * 20 + 20 + 32  # of 34 conversation tokens, 32 are in full pages
    audit(it)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_seed_repeats_in_any_batch(dtype):
    model = tiny.model(dtype=dtype)
    wild = SamplingParams(temperature=1.3, top_p=0.95, top_k=50, seed=11, max_tokens=20, ignore_eos=True)
    prompt = "The quick"
    alone = engine(model).generate([prompt], wild)[0]
    others = [SamplingParams(temperature=1, seed=s, max_tokens=10 + s, ignore_eos=True) for s in range(5)]
    crowd = engine(model, token_budget=9, pages=12)
    crowded = crowd.generate(["dog " * i + "fox" for i in range(5)] + [prompt], [*others, wild])
    assert crowd.stats.preemptions > 0
    assert crowded[-1] == alone
    other_seed = engine(model).generate([prompt], SamplingParams(**{**wild.__dict__, "seed": 12}))[0]
    assert other_seed.token_ids != alone.token_ids


def test_without_a_seed_samples_differ(model):
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    assert len({c.token_ids for c in engine(model).generate(["fox"] * 4, params)}) == 4


def test_streams_interleave_and_equal_generate(model):
    it = engine(model)
    whole = engine(model).generate(["The quick", "My fellow"], GREEDY)
    pieces = zip(it.stream("The quick", GREEDY), it.stream("My fellow", GREEDY), strict=True)
    for completion, outputs in zip(whole, zip(*pieces, strict=True), strict=True):
        assert "".join(o.text for o in outputs) == completion.text == tiny.tokenizer().decode(completion.token_ids)
        assert [o.generated_tokens for o in outputs] == list(range(1, 13))
        assert outputs[-1].finish_reason == "length" and outputs[-1].timing is not None
    audit(it)


def test_closing_a_stream_cancels_its_request(model):
    it = engine(model)
    stream = it.stream("The quick", GREEDY)
    next(stream)
    assert it.scheduler.pool.used > 0
    stream.close()
    audit(it)
    assert it.stats.finished == {"cancelled": 1}


def test_one_bad_prompt_cancels_its_batch(model):
    it = engine(model)
    with pytest.raises(RequestError):
        it.generate(["fine", [999]], GREEDY)
    audit(it)


def test_stop_string_across_tokens_is_not_emitted(model):
    text = engine(model).generate(["The quick"], GREEDY)[0].text
    for start in range(1, len(text) - 5):
        stop = text[start : start + 4]
        it = engine(model)
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, stop=[stop])
        outputs = list(it.stream("The quick", params))
        assert "".join(o.text for o in outputs) == text[: text.index(stop)]
        assert outputs[-1].finish_reason == "stop"
        audit(it)


def test_partial_stop_string_is_emitted_at_the_end(model):
    text = engine(model).generate(["The quick"], GREEDY)[0].text
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, stop=[text[-3:] + "never"])
    outputs = list(engine(model).stream("The quick", params))
    assert "".join(o.text for o in outputs) == text and outputs[-1].finish_reason == "length"


def test_end_tokens_stop_and_count_but_are_not_emitted(model):
    tokens = engine(model).generate(["The quick"], GREEDY)[0].token_ids
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, stop_token_ids=[tokens[5]])
    first = tokens.index(tokens[5])
    done = engine(model).generate(["The quick"], params)[0]
    assert done.token_ids == tokens[: first + 1] and done.finish_reason == "stop"
    assert done.text == tiny.tokenizer().decode(tokens[:first])


def test_tokenizer_end_token_stops():
    model = tiny.model()
    with torch.no_grad():  # makes the model generate token 0 after a few others
        model.get_parameter("unembed.weight")[0] += 0.35
    reference = tiny.greedy_tokens(model, [5, 6, 7], 40)
    assert 0 in reference
    done = engine(model).generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=40))[0]
    assert list(done.token_ids) == reference[: reference.index(0) + 1] and done.finish_reason == "stop"
    on = engine(model).generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))[0]
    assert list(on.token_ids) == reference and on.finish_reason == "length"


def test_default_max_tokens_is_the_rest_of_context_or_cache(model):
    on = SamplingParams(temperature=0, ignore_eos=True)
    assert len(engine(model).generate([[1] * 10], on)[0].token_ids) == 128 - 10
    assert len(engine(model, pages=5).generate([[1] * 10], on)[0].token_ids) == 20 + 1 - 10


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], {}, r"the prompt is empty"),
        ([1, 301], {}, r"token 301 is not in the vocabulary of 301"),
        ([1] * 128, {}, r"context length is 128 tokens; the prompt has 128: shorten .* at most 127"),
        ([1] * 120, {"max_tokens": 9}, r"the prompt has 120, and max_tokens 9 make them 129: ask for at most 8"),
    ],
)
def test_refusals_give_the_reason(model, prompt, params, message):
    it = engine(model)
    with pytest.raises(RequestError, match=message) as refusal:
        it.add(prompt, SamplingParams(**params))
    assert refusal.value.param == "prompt" and refusal.value.status == 400
    audit(it)


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda it: it.generate("The quick"), r"^prompts is 'The quick'; pass a list of prompts"),
        (lambda it: it.generate([1, 2, 3]), r"^prompts is \[1, 2, 3\]; pass a list of prompts"),
        (lambda it: it.generate(torch.tensor([1, 2])), r"^prompts is tensor.*; pass a list of prompts"),
        (lambda it: it.generate(None), "^prompts is None; pass a list"),
        (lambda it: it.generate(["a"], {"temperature": 0}), r"^params is {.*}; pass SamplingParams\(\*\*params\)"),
        (lambda it: it.generate(["a", "b"], [GREEDY, 3]), r"^params is 3; pass SamplingParams"),
        (lambda it: it.generate(["a", "b"], [GREEDY]), "^2 prompts but 1 sampling params"),
        (lambda it: it.add(None), "^the prompt is None; pass a single string or list of token ids"),
        (lambda it: it.add("a", {"temperature": 0}), "^params is "),
        (lambda it: it.add([1.5]), r"^the prompt is \[1.5\]; pass a single string"),
        (lambda it: it.add(torch.zeros(2, 3, dtype=torch.int64)), r"^the prompt is tensor.*\]\]\); pass a single"),
        (lambda it: it.stream(["a", "b"]), r"^the prompt is \['a', 'b'\]; pass a single.* \(generate takes several\)"),
        (lambda it: it.add("a", SamplingParams(stop_token_ids=[7, 301])), "^token 301 of stop_token_ids is not in the"),
        (lambda it: it.add("a", SamplingParams(stop_token_ids=[-1])), "^token -1 of stop_token_ids is not in the"),
    ],
)
def test_invalid_prompts_are_refused(model, ask, message):
    it = engine(model)
    with pytest.raises(RequestError, match=message) as refusal:
        ask(it)
    assert "\n" not in str(refusal.value)
    audit(it)


def test_token_ids_may_be_tensors(model):
    it = engine(model)
    ids = torch.tensor([5, 6, 7])
    assert it.generate([ids, tuple(ids)], GREEDY) == 2 * it.generate([[5, 6, 7]], GREEDY)


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_no_outputs_are_lost_by_mixing_step_stream_and_generate(model, async_scheduling: bool):
    """add, stream and generate side by side; driving the engine through any of them advances all requests."""
    it = engine(model, async_scheduling=async_scheduling)
    (whole,) = engine(model).generate(["The quick"], GREEDY)
    first, dropped = it.add("The quick", GREEDY), it.add("The quick", GREEDY)
    stream, unread = it.stream("The quick", GREEDY), it.stream("The quick", GREEDY)
    outputs = [next(stream), next(stream)]
    assert it.generate(["My fellow", "The quick"], GREEDY)[1] == whole
    it.cancel(dropped)
    assert it.busy, "buffered outputs must keep the engine busy"
    late = it.add("The quick", GREEDY)
    gained = {first: [], late: []}
    while it.busy:
        for output in it.step():
            gained[output.id].append(output)
    outputs += stream  # already finished by the steps above
    for pieces in (outputs, *gained.values()):
        assert tuple(piece.token for piece in pieces) == whole.token_ids
        assert "".join(piece.text for piece in pieces) == whole.text and pieces[-1].finish_reason == "length"
    assert it.step() == []
    unread.close()
    audit(it)


def test_cancelled_stream_ends(model):
    it = engine(model)
    tokens = []
    for output in it.stream("The quick", GREEDY):
        tokens.append(output.token)
        if len(tokens) == 3:
            assert it.cancel(output.id)
    assert len(tokens) == 3
    audit(it)


def test_capacity_errors_give_the_numbers_and_the_remedy(model):
    for sized, remedy in (
        ({"pages": 5}, "set --serve.pages to 11 or more"),
        ({"pages": None, "cache_bytes": 1536 * 5}, "set --serve.cache_bytes to 16896 or more"),
    ):
        it = engine(model, **sized)
        with pytest.raises(CapacityError, match=r"31 tokens and 11 to generate make 42; this server holds 21") as over:
            it.add([1] * 31, SamplingParams(max_tokens=11))
        assert over.value.message.endswith("for a request: shorten the prompt to at most 20")
        assert str(over.value).endswith(f"at most 20; {remedy}") and over.value.operator_hint == remedy


@pytest.mark.parametrize("pages", [5, 40], ids=["cache", "context"])
@pytest.mark.parametrize("prompt", [1, 15, 20, 21, 100, 127, 128, 200])
@pytest.mark.parametrize("wanted", [None, 0, 1, 30, 500])
def test_a_refusal_has_the_largest_number_that_is_accepted(model, pages: int, prompt: int, wanted: int | None):
    """What it asks for is accepted, and one token more is refused."""
    it = engine(model, pages=pages)

    def add(prompt: int, max_tokens: int | None) -> None:
        echo = {"echo": True, "prompt_logprobs": 0} if max_tokens == 0 else {}
        it.cancel(it.add([1] * prompt, SamplingParams(max_tokens=max_tokens, **echo)))

    try:
        add(prompt, wanted)
    except (RequestError, CapacityError) as refusal:
        kind, number = re.search(r"(ask for|prompt to) at most (\d+)", refusal.message).groups()
        requests = [
            (prompt, int(number) + more) if kind == "ask for" else (int(number) + more, wanted and 1) for more in (0, 1)
        ]
        add(*requests[0])
        with pytest.raises((RequestError, CapacityError)):
            add(*requests[1])


def test_a_cache_below_one_page_is_refused(model):
    with pytest.raises(
        CapacityError, match=r"cache_bytes 100 is less than one page of 4 tokens, .* 1536 bytes; use 49152"
    ):
        Engine(model, tiny.tokenizer(), ServeConfig(cache_bytes=100, page_tokens=4))
    with pytest.raises(CapacityError, match=r"key/value cache +\d+.*(.|\n)*--serve.(cache_bytes|pages) \d+"):
        engine(model, pages=1 << 50)


def test_cache_is_no_larger_than_usable(model):
    it = Engine(model, tiny.tokenizer(), ServeConfig(max_requests=2, page_tokens=16))
    assert it.cache.pages == 2 * 128 // 16
    assert Engine(model, tiny.tokenizer(), ServeConfig(cache_bytes=1536 * 5, page_tokens=4)).cache.pages == 5


def test_queue_is_bounded_for_add_but_not_for_generate(model):
    it = engine(model, max_waiting=2)
    for _ in range(2):
        it.add("fox", GREEDY)
    with pytest.raises(RequestError, match="2 requests are already waiting") as refusal:
        it.add("fox", GREEDY)
    assert refusal.value.status == 429
    assert len(engine(model, max_waiting=2).generate(["fox"] * 7, GREEDY)) == 7


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_non_finite_logits_fail_only_their_request(async_scheduling: bool):
    model = tiny.model()
    with torch.no_grad():
        model.get_parameter("embed.tokens.weight")[9] = torch.nan
    it = engine(model, async_scheduling=async_scheduling)
    params = SamplingParams(temperature=1, seed=1, max_tokens=3, ignore_eos=True)
    sick, well = it.add([9], params), it.add([8], params)
    ends: dict[str, Output] = {}
    while it.busy:
        ends |= {output.id: output for output in it.step()}
    assert (ends[sick].finish_reason, ends[sick].text) == ("error", "")
    assert (ends[well].finish_reason, ends[well].generated_tokens) == ("length", 3)
    for ask in (lambda: it.generate([[9], [8]], params), lambda: list(it.stream([9], params))):
        with pytest.raises(RequestError, match="logits were not finite") as failure:
            ask()
        assert failure.value.status == 500
    audit(it)


def test_stats_add_up(model):
    it = engine(model)
    it.generate([[1] * 5, [2] * 6], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    stats = it.stats
    assert (stats.prompt_tokens, stats.generation_tokens, stats.finished) == (11, 8, {"length": 2})
    assert stats.running == stats.waiting == stats.pages_used == 0 and stats.steps == 4 and stats.cache_usage == 0
