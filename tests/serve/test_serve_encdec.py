"""The engine serves encoder–decoders: the same tokens alone and together, preempted, cancelled, with shared sources."""

from dataclasses import replace
from functools import cache

import pytest
import tokenizers
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from colonnade.config import ServeConfig
from colonnade.data.tokenizer import Tokenizer
from colonnade.errors import CapacityError, ConfigError, RequestError
from colonnade.kernels.cpu import kernels as cpu_kernels
from colonnade.model import Rows, Transformer
from colonnade.serve import Engine, SamplingParams
from colonnade.serve.model_inputs import pack_work, unpack_work
from colonnade.serve.work import Work
from tests.encdec import inputs, nllb, random_model, switch, t5
from tests.serve import tiny

CONTEXT, START = 40, 3


@cache
def model() -> Transformer:
    config = t5("1.1", vocab_size=301)
    assert config.encoder is not None
    return random_model(config.replace(context=64, encoder=config.encoder.replace(context=CONTEXT, start_token=START)))


def engine(**limits: object) -> Engine:
    return Engine(model(), tiny.tokenizer(), ServeConfig(**{"pages": 64, "page_tokens": 4, **limits}))


@cache
def greedy(source: tuple[int, ...], count: int, of: Transformer | None = None) -> list[int]:
    """The reference: one whole forward pass a token."""
    ids = [START]
    for _ in range(count):
        stream, attend = inputs([torch.tensor([*source, 0])], [torch.tensor(ids)])
        ids.append(int((of or model())(stream, attend, Rows())[-1].argmax()))
    return ids[1:]


def test_experts_drop_by_source_whatever_is_encoded_with_it() -> None:
    config = switch(vocab_size=301, context=64)
    assert config.encoder is not None
    sparse = random_model(config.replace(encoder=config.encoder.replace(context=CONTEXT, start_token=START)))
    it = Engine(sparse, tiny.tokenizer(), ServeConfig(pages=64, page_tokens=4))
    asked = [tuple(range(10, 29)), tuple(range(40, 47)), (8, 9)]
    found = it.generate(asked, params(7))
    assert [list(each.token_ids) for each in found] == [greedy(source, 7, sparse) for source in asked]
    assert config.moe is not None
    ample = random_model(sparse.config.replace(moe=config.moe.replace(capacity_tokens=100)))
    assert greedy(asked[0], 7, ample) != greedy(asked[0], 7, sparse), "the capacity binds"
    audit(it)


def params(count: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)


def run_schedule(
    it: Engine, requests: list[tuple[tuple[int, ...], SamplingParams, int]], cancelled: set[int]
) -> dict[str, list[int]]:
    """The tokens of each request (source, params, steps until the next one arrives); audits after each step."""
    found: dict[str, list[int]] = {}

    def step() -> None:
        for output in it.step():
            assert output.token is not None
            found[output.id].append(output.token)
        it.scheduler.audit()

    for i, (source, each, wait) in enumerate(requests):
        found[it.add(source, each, request_id=str(i))] = []
        for _ in range(wait):
            step()
        if i in cancelled:
            it.cancel(str(i))
            it.scheduler.audit()
    while it.busy:
        step()
    return found


def audit(it: Engine) -> None:
    it.scheduler.audit()
    assert not it.busy
    assert it.scheduler.pool.free == it.scheduler.pool.pages


sources = st.lists(st.integers(1, 300), min_size=1, max_size=20).map(tuple)


@settings(max_examples=25, deadline=None)
@given(
    pool=st.lists(sources, min_size=1, max_size=3),
    arrivals=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 8), st.integers(0, 3)), min_size=1, max_size=6),
    page_tokens=st.integers(1, 7),
    spare_pages=st.integers(0, 12),
    token_budget=st.integers(1, 20),
    max_requests=st.integers(1, 5),
    cancelled=st.sets(st.integers(0, 5), max_size=2),
    async_scheduling=st.booleans(),
)
def test_any_schedule_gives_the_same_tokens(
    pool, arrivals, page_tokens, spare_pages, token_budget, max_requests, cancelled, async_scheduling
) -> None:
    pages = lambda n: -(-n // page_tokens)  # noqa: E731
    asked = [(pool[which % len(pool)], count, wait) for which, count, wait in arrivals]
    it = engine(
        page_tokens=page_tokens, pages=max(pages(len(s) + 1) + pages(n) for s, n, _ in asked) + spare_pages,
        token_budget=token_budget, max_requests=max_requests, async_scheduling=async_scheduling,
    )  # fmt: skip
    found = run_schedule(it, [(source, params(count), wait) for source, count, wait in asked], cancelled)
    for i, (source, count, _) in enumerate(asked):
        expected = greedy(source, count)
        assert found[str(i)] == (expected[: len(found[str(i)])] if i in cancelled else expected)
    audit(it)


def test_padded_decode_batches_give_the_same_tokens() -> None:
    """The buffers of CUDA graphs, which a CPU fills and reads too: rows change hands, sources grow and shrink."""
    it = engine(graph_capture=True, max_requests=3, pages=40)
    asked = [tuple(range(10, 10 + 3 * n)) for n in (1, 5, 2, 11, 4, 3)]
    counts = [9, 3, 12, 7, 1, 8]
    found = it.generate(asked, [params(count) for count in counts])
    assert [list(each.token_ids) for each in found] == [
        greedy(source, n) for source, n in zip(asked, counts, strict=True)
    ]
    audit(it)


def test_fused_steps_of_a_cpu_give_the_same_tokens() -> None:
    """In float32 a CPU runs its C++ kernels, also within blocks that have cross attention."""
    if not cpu_kernels.available(torch.float32):
        pytest.skip("the C++ kernels are not available here")
    config = nllb(vocab_size=301, moe=None, width=64)
    assert config.encoder is not None
    plain = random_model(config.replace(encoder=config.encoder.replace(languages=False, start_token=START))).float()
    asked = [tuple(range(10, 29)), (8, 9)]
    expected = [greedy(source, 9, plain) for source in asked]
    it = Engine(plain, tiny.tokenizer(), ServeConfig(pages=64, page_tokens=4))
    assert plain.blocks[0].fused
    found = it.generate(asked, params(9))
    assert [list(each.token_ids) for each in found] == expected
    audit(it)


def test_preemption_encodes_again() -> None:
    it = engine(pages=9, page_tokens=4, max_requests=3)
    asked = [tuple(range(10, 17)), tuple(range(30, 35)), (8, 9)]
    found = it.generate(asked, params(12))
    assert it.stats.preemptions > 0
    assert [list(each.token_ids) for each in found] == [greedy(source, 12) for source in asked]
    assert [each.prompt_tokens for each in found] == [8, 6, 3]
    audit(it)


def test_equal_sources_are_encoded_once() -> None:
    it, source = engine(), tuple(range(10, 29))
    found = it.generate([source] * 4, params(6))
    assert all(list(each.token_ids) == greedy(source, 6) for each in found)
    manager = it.scheduler.kv_cache
    assert (manager.source_tokens, manager.shared_source_tokens) == (80, 60)
    audit(it)


def test_a_prefix_of_the_target_belongs_to_its_source() -> None:
    """Regression guard: pages of the target are found by the source's hash, too."""
    it = engine(page_tokens=1)
    for source in ((5, 6, 7), (7, 6, 5), (5, 6, 7)):
        (found,) = it.generate([source], params(5))
        assert list(found.token_ids) == greedy(source, 5)
    audit(it)


def test_text_and_speculation() -> None:
    tokens = tiny.tokenizer().encode("The quick brown fox")
    for draft in (None, "ngram"):
        (found,) = engine(draft=draft).generate(["The quick brown fox"], params(9))
        assert list(found.token_ids) == greedy(tuple(tokens), 9)


def test_work_is_packed_whole() -> None:
    it = engine()
    for source in ((4, 5), (4, 5), (6, 7, 8, 9, 10)):
        it.add(source, params(3))
    work = it.scheduler.schedule()
    assert [len(piece.source) for piece in work.slices] == [3, 0, 6]
    assert unpack_work(*pack_work(work)) == Work(work.slices)


@cache
def translator() -> Engine:
    tokenizer = tiny.tokenizer().with_special(["eng_Latn", "fra_Latn", "deu_Latn", "<mask>"])
    return Engine(random_model(nllb(vocab_size=305)), tokenizer, ServeConfig(pages=64, page_tokens=4))


def test_languages_begin_the_source_and_the_target() -> None:
    """``</s> language`` begins the target; a language that is first in a prompt of ids is replaced."""
    it = translator()
    english, french, german = (it.tokenizer.token_id(name) for name in ("eng_Latn", "fra_Latn", "deu_Latn"))
    assert english is not None
    text = it.tokenizer.encode("The quick fox")
    ids = [2, french]
    for _ in range(6):
        stream, attend = inputs([torch.tensor([english, *text, 0])], [torch.tensor(ids)])
        ids.append(int(it.model(stream, attend, Rows())[-1].argmax()))
    asked = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, source_lang="eng_Latn", target_lang="fra_Latn")
    none = replace(asked, source_lang=None)
    for prompt, params in (("The quick fox", asked), ([german, *text], asked), ([english, *text], none)):
        (found,) = it.generate([prompt], params)
        assert list(found.token_ids) == ids[2:]
        assert found.prompt_tokens == len(text) + 2
    audit(it)


@pytest.mark.parametrize("template", ["eng_Latn $A END", "$A END eng_Latn"])
def test_tokenizers_that_name_a_language_of_their_own(template: str) -> None:
    """Published files put eng_Latn before each text, older ones after its end; a request's language counts instead."""
    plain = translator().tokenizer
    core = tokenizers.Tokenizer.from_str(plain.json)
    end = plain.token(plain.eos_ids[0])
    core.post_processor = tokenizers.processors.TemplateProcessing(
        single=template.replace("END", end), special_tokens=[(name, plain.token_id(name)) for name in ("eng_Latn", end)]
    )
    it = Engine(translator().model, Tokenizer(core, None, plain.eos_ids), ServeConfig(pages=64, page_tokens=4))
    asked = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, source_lang="deu_Latn", target_lang="fra_Latn")
    german, english = plain.token_id("deu_Latn"), plain.token_id("eng_Latn")
    text = plain.encode("The quick fox")
    for prompt, params, language in (
        ("The quick fox", asked, german),
        (it.tokenizer.encode("The quick fox"), asked, german),
        (it.tokenizer.encode("The quick fox"), replace(asked, source_lang=None), english),
    ):
        it.add(prompt, params)
        (piece,) = it.scheduler.schedule().slices
        assert piece.source == (language, *text, plain.eos_ids[0])
        it.cancel(next(iter(it._live)))
    with pytest.raises(RequestError, match="source_lang is missing"):
        it.add("The quick fox", replace(asked, source_lang=None))
    for empty in ("", [english], [0], [english, 0]):
        with pytest.raises(RequestError, match=r"the (prompt|source) is empty"):
            it.add(empty, asked)
    audit(it)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "target_lang is missing: this model translates between eng_Latn, fra_Latn, deu_Latn; name one"),
        ({"target_lang": "fra_Latn"}, "source_lang is missing"),
        ({"target_lang": "fra_Latin"}, r"not one of this model's 3 languages \(.*\); did you mean 'fra_Latn'\?"),
        ({"target_lang": "<mask>"}, "'<mask>' is not one of this model's 3 languages .*; name one of them"),
        ({"target_lang": 7}, "target_lang is 7; it must be a language, as a string"),
    ],
)
def test_unknown_languages_are_one_line(options: dict, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        translator().add("The quick fox", SamplingParams(temperature=0, **options))
    assert "\n" not in str(caught.value)
    audit(translator())


@pytest.mark.parametrize(
    ("prompt", "options", "error", "message"),
    [
        ([5], {"target_lang": "fra_Latn"}, RequestError, "target_lang is for models that translate between named"),
        ([], {}, RequestError, "the prompt is empty"),
        ([0], {}, RequestError, "the source is empty; pass the text for the encoder"),
        ([5] * 40, {}, RequestError, "the source has 41 tokens with its end, but this model's encoder accepts 40"),
        ([5], {"max_tokens": 64}, RequestError, "maximum context length is 64 tokens"),
        ([5], {"echo": True}, RequestError, "echo is for models that continue the prompt"),
        ([5] * 30, {"max_tokens": 63}, CapacityError, "take 24 pages of 4 tokens; this server has 20"),
    ],
)
def test_bad_requests(prompt: list[int], options: dict, error: type[Exception], message: str) -> None:
    it = engine(pages=20)
    with pytest.raises(error, match=message):
        it.add(prompt, SamplingParams(temperature=0, **options))
    audit(it)


def test_what_is_not_served() -> None:
    with pytest.raises(ConfigError, match="batch_invariant does not cover an encoder's attention"):
        engine(batch_invariant=True)
