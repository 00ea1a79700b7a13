"""Beam search in the engine: the text of a plain search and of transformers, under any schedule."""

from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from colonnade.config import ServeConfig
from colonnade.data.tokenizer import Tokenizer
from colonnade.errors import CapacityError, RequestError
from colonnade.model import Rows
from colonnade.serve import Engine, SamplingParams
from colonnade.serve.beam_search import BeamSearch
from colonnade.serve.request import failure
from tests.encdec import inputs, texts
from tests.hf import load
from tests.serve import tiny
from tests.serve.test_serve_encdec import START, audit, engine, greedy, model, params, run_schedule, sources

END = 0


def beams(width: int, count: int, penalty: float = 1.0, *, ignore_eos: bool = True) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=ignore_eos, beams=width, length_penalty=penalty)


@cache
def searched(source: tuple[int, ...], width: int, count: int, penalty: float = 1.0, end: int = -1) -> list[int]:
    """The reference: a plain search with one whole forward pass a beam and token."""
    running, finished = [(0.0, [START])], list[tuple[float, list[int]]]()
    for n in range(1, count + 1):
        found = []
        for total, ids in running:
            stream, attend = inputs([torch.tensor([*source, END])], [torch.tensor(ids)])
            logp = model()(stream, attend, Rows())[-1].log_softmax(0)
            found += [(total + logp[token].item(), [*ids, token]) for token in range(len(logp))]
        found.sort(key=lambda each: -each[0])
        ended = [each for each in found[:width] if each[1][-1] == end]
        finished = sorted([*finished, *((t / n**penalty, ids) for t, ids in ended)], key=lambda each: -each[0])[:width]
        running = [each for each in found[: 2 * width] if each[1][-1] != end][:width]
        if len(finished) == width and running[0][0] / n**penalty <= finished[-1][0]:
            break
    else:
        finished = sorted([*finished, *((t / count**penalty, ids) for t, ids in running)], key=lambda each: -each[0])
    return finished[0][1][1:]


@pytest.mark.parametrize("page_tokens", [1, 3, 16])
@pytest.mark.parametrize(("width", "penalty"), [(2, 1.0), (5, 0.0)])
def test_a_search_equals_a_plain_one(page_tokens: int, width: int, penalty: float) -> None:
    it, source = engine(page_tokens=page_tokens, pages=200 // page_tokens), tuple(range(10, 25))
    (found,) = it.generate([source], beams(width, 9, penalty))
    assert list(found.token_ids) == searched(source, width, 9, penalty) != greedy(source, 9)
    assert (found.finish_reason, found.prompt_tokens) == ("length", 16)
    audit(it)


@pytest.mark.parametrize("end", [41, 136, 200])
def test_beams_that_end(end: int) -> None:
    """A text that ends is compared with longer ones; ``end`` is a probable token somewhere in the search."""
    for source in ((5, 6, 7), (100, 3), tuple(range(40, 60))):
        it = engine()
        asked = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, stop_token_ids=[end], beams=3)
        (found,) = it.generate([source], asked)
        expected = searched(source, 3, 12, 1.0, end)
        assert list(found.token_ids) == expected
        assert found.finish_reason == ("stop" if expected[-1] == end else "length")
        audit(it)


@settings(max_examples=20, deadline=None)
@given(
    pool=st.lists(sources, min_size=1, max_size=2),
    arrivals=st.lists(
        st.tuples(st.integers(0, 1), st.sampled_from([1, 1, 2, 3]), st.integers(1, 7), st.integers(0, 3)),
        min_size=1, max_size=5,
    ),
    page_tokens=st.integers(1, 5),
    spare_pages=st.integers(0, 12),
    token_budget=st.integers(3, 20),
    max_requests=st.integers(3, 6),
    cancelled=st.sets(st.integers(0, 4), max_size=2),
    ahead=st.booleans(),
    prefix_cache=st.booleans(),
)  # fmt: skip
def test_any_schedule_gives_the_same_texts(
    pool, arrivals, page_tokens, spare_pages, token_budget, max_requests, cancelled, ahead, prefix_cache
) -> None:
    pages = lambda n: -(-n // page_tokens)  # noqa: E731
    asked = [(pool[which % len(pool)], width, count, wait) for which, width, count, wait in arrivals]
    it = engine(
        page_tokens=page_tokens, pages=max(pages(len(s) + 1) + w * pages(n) for s, w, n, _ in asked) + spare_pages,
        token_budget=token_budget, max_requests=max_requests, async_scheduling=ahead, prefix_cache=prefix_cache,
    )  # fmt: skip
    found = run_schedule(it, [(source, beams(width, count), wait) for source, width, count, wait in asked], cancelled)
    for i, (source, width, count, _) in enumerate(asked):
        expected = greedy(source, count) if width == 1 else searched(source, width, count)
        assert found[str(i)] == (expected[: len(found[str(i)])] if i in cancelled else expected)
    audit(it)


def test_beams_share_the_pages_of_their_source() -> None:
    it, source = engine(page_tokens=4, pages=64), tuple(range(10, 29))
    it.add(source, beams(4, 8))
    most = 0
    while it.busy:
        it.step()
        most = max(most, it.stats.pages_used)
        it.scheduler.audit()
    assert it.scheduler.kv_cache.source_tokens == 20
    assert most <= 5 + 4 * 2  # five of the source, at most two a beam


def test_a_preempted_search_starts_again() -> None:
    it = engine(pages=11, page_tokens=4, max_requests=5)
    asked = [tuple(range(10, 17)), tuple(range(30, 35))]
    found = it.generate(asked, [params(28), beams(3, 9)])
    assert it.stats.preemptions > 0
    assert [list(each.token_ids) for each in found] == [greedy(asked[0], 28), searched(asked[1], 3, 9)]
    audit(it)


def test_what_another_engine_delivered_is_not_repeated() -> None:
    it, source = engine(), tuple(range(10, 25))
    expected = searched(source, 3, 7)
    it.add(source, beams(3, 7), request_id="it", resume=expected[:3])
    outputs = [output for _ in range(30) if it.busy for output in it.step()]
    assert [output.token for output in outputs] == expected[3:]
    assert outputs[-1].generated_tokens == 7
    audit(it)


@pytest.mark.parametrize("at", [0, 2])
def test_another_text_than_the_delivered_one_is_an_error(at: int) -> None:
    """In 16 bits another engine may round differently: its text is not continued by ours."""
    it, source = engine(), tuple(range(10, 25))
    other = searched(source, 3, 7)[:3]
    other[at] += 1
    it.add(source, beams(3, 7), request_id="it", resume=other)
    outputs = [output for _ in range(30) if it.busy for output in it.step()]
    assert [(output.text, output.token, output.finish_reason) for output in outputs] == [("", None, "diverged")]
    error = failure(outputs[0].finish_reason)
    assert error is not None
    assert (error.status, error.code) == (503, "search_diverged")
    assert "different text; send the request again" in str(error)
    audit(it)


def test_a_delivered_text_that_is_longer_is_an_error() -> None:
    it, source = engine(), tuple(range(10, 25))
    it.add(source, beams(3, 4), resume=searched(source, 3, 4))
    assert [output.finish_reason for _ in range(30) if it.busy for output in it.step()] == ["diverged"]
    audit(it)


@pytest.mark.parametrize("delivered", [0, 3])
def test_a_full_queue_takes_a_resumed_search(delivered: int) -> None:
    """Its client has been charged, and waits; as any other resumed request it is not refused with 429."""
    it, source = engine(max_requests=3, max_waiting=1), tuple(range(10, 25))
    expected = searched(source, 3, 7)
    it.add(tuple(range(40, 50)), beams(3, 7))
    it.step()
    waiting = it.add((5, 6, 7), params(3))
    with pytest.raises(RequestError, match="the queue is full"):
        it.add(source, beams(3, 7))
    resumed = it.add(source, beams(3, 7), resume=expected[:delivered])
    assert it.scheduler.waiting.first is not None
    assert it.scheduler.waiting.first.id == (resumed if delivered else waiting), "one that has begun comes first"
    outputs = [output for _ in range(60) if it.busy for output in it.step()]
    assert [output.token for output in outputs if output.id == resumed] == expected[delivered:]
    audit(it)


def test_new_weights_start_a_search_again() -> None:
    it, source = engine(), tuple(range(10, 25))
    it.add(source, beams(3, 7))
    for _ in range(4):
        it.step()
    it.update_weights(lambda model: None)
    outputs = [output for _ in range(30) if it.busy for output in it.step()]
    assert [output.token for output in outputs] == searched(source, 3, 7)
    audit(it)


def test_equal_to_transformers(tmp_path: Path) -> None:
    from transformers import GenerationConfig

    from tests.parity.test_t5_parity import save, theirs

    torch.manual_seed(0)
    other = theirs("1.1")
    folder = save(other, tmp_path, "1.1")
    ours = load(folder).float().double()
    it = Engine(ours, tiny.tokenizer(), ServeConfig(pages=64, page_tokens=4))
    for text in texts([9, 4, 17, 2], 50, seed=5):
        source = torch.cat([text, torch.tensor([END])])
        config = GenerationConfig(
            num_beams=4, max_new_tokens=11, do_sample=False, eos_token_id=7, pad_token_id=7, decoder_start_token_id=0
        )
        expected = other.generate(source[None], generation_config=config)[0, 1:].tolist()
        while len(expected) > 1 and expected[-2:] == [7, 7]:
            expected.pop()
        asked = SamplingParams(temperature=0, max_tokens=11, ignore_eos=True, stop_token_ids=[7], beams=4)
        (found,) = it.generate([source.tolist()], asked)
        assert list(found.token_ids) == expected
    audit(it)


@pytest.mark.parametrize(
    ("options", "limits", "error", "message"),
    [
        ({"beams": 0}, {}, RequestError, "beams is 0; it must be from 1 to 64"),
        ({"beams": 2, "temperature": 0.5}, {}, RequestError, "set temperature to 0"),
        (
            {"beams": 2, "tempered_logprobs": True},
            {},
            RequestError,
            "tempered_logprobs and beams are mutually exclusive",
        ),
        ({"beams": 2, "logprobs": 1}, {}, RequestError, "logprobs and beams are mutually exclusive"),
        ({"beams": 2, "stop": "x"}, {}, RequestError, "stop and beams are mutually exclusive"),
        ({"length_penalty": -1}, {}, RequestError, "length_penalty is -1; it must be from 0 to 10"),
        ({"beams": 5}, {"max_requests": 4}, RequestError, "beams is 5, but this server runs 4 at a time; lower it"),
        ({"beams": 4, "max_tokens": 20}, {}, CapacityError, "4 beams of 21 take 21 pages .* or beams"),
    ],
)
def test_bad_requests(options: dict, limits: dict, error: type[Exception], message: str) -> None:
    it = engine(pages=20, page_tokens=4, **limits)
    with pytest.raises(error, match=message):
        it.add([5], SamplingParams(**{"temperature": 0, "max_tokens": 4, **options}))
    audit(it)


def test_a_decoder_has_no_beams() -> None:
    tokenizer: Tokenizer = tiny.tokenizer()
    it = Engine(tiny.model(), tokenizer, ServeConfig(pages=8))
    with pytest.raises(RequestError, match="beams need a model with an encoder"):
        it.add([5], SamplingParams(beams=2))


def test_as_many_tokens_are_left_if_all_ends_come_first() -> None:
    for ends in range(5):
        search = BeamSearch(3, 1.0, frozenset(range(ends)))
        assert search.candidates >= search.width * (ends + 1)
    assert BeamSearch(3, 1.0, frozenset()).candidates == BeamSearch(3, 1.0, frozenset({1})).candidates == 6
