"""The engine serves encoder–decoders: the same tokens alone and together, preempted, cancelled, with shared sources."""

from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from colonnade.config import ServeConfig
from colonnade.errors import CapacityError, ConfigError, RequestError
from colonnade.model import Rows, Transformer
from colonnade.serve import Engine, SamplingParams
from colonnade.serve.model_inputs import pack_work, unpack_work
from colonnade.serve.scheduler import Work
from tests.encdec import inputs, t5
from tests.parity.test_encdec_paged import built
from tests.serve import tiny

CONTEXT, START = 40, 3


@cache
def model() -> Transformer:
    config = t5("1.1", vocab_size=301)
    assert config.encoder is not None
    return built(config.replace(context=64, encoder=config.encoder.replace(context=CONTEXT, start_token=START)))


def engine(**limits: object) -> Engine:
    return Engine(model(), tiny.tokenizer(), ServeConfig(**{"pages": 64, "page_tokens": 4, **limits}))


@cache
def greedy(source: tuple[int, ...], count: int) -> list[int]:
    """The reference: one whole forward pass a token."""
    ids = [START]
    for _ in range(count):
        stream, attend = inputs([torch.tensor([*source, 0])], [torch.tensor(ids)])
        ids.append(int(model()(stream, attend, Rows())[-1].argmax()))
    return ids[1:]


def params(count: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)


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
    found: dict[str, list[int]] = {}

    def step() -> None:
        for output in it.step():
            assert output.token is not None
            found[output.id].append(output.token)
        it.scheduler.audit()

    for i, (source, count, wait) in enumerate(asked):
        found[it.add(source, params(count), request_id=str(i))] = []
        for _ in range(wait):
            step()
        if i in cancelled:
            it.cancel(str(i))
    while it.busy:
        step()
    for i, (source, count, _) in enumerate(asked):
        expected = greedy(source, count)
        assert found[str(i)] == (expected[: len(found[str(i)])] if i in cancelled else expected)
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
    assert (it.scheduler.source_tokens, it.scheduler.shared_source_tokens) == (80, 60)
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


@pytest.mark.parametrize(
    ("prompt", "options", "error", "message"),
    [
        ([], {}, RequestError, "the prompt is empty"),
        ([5] * 40, {}, RequestError, "the source has 41 tokens with its end, and this model's encoder reads 40"),
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
