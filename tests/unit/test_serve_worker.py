"""A batch of requests is queued at once, all of it or nothing."""

import queue

import pytest

from colonnade.config import ServeConfig
from colonnade.serve import Engine, SamplingParams
from colonnade.serve.ipc import GenerationRequest, Message, submit_message
from colonnade.serve.worker import _handle, _tokenize, receive_messages
from tests.serve import tiny


@pytest.fixture
def engine() -> Engine:
    return Engine(tiny.model(), tiny.tokenizer(), ServeConfig(max_waiting=3, pages=8))


def submit_batch(engine: Engine, name: str, *prompts: str) -> Message | None:
    """The error, if the request is refused."""
    request = GenerationRequest(prompts=prompts, params=SamplingParams(max_tokens=2, ignore_eos=True))
    message = submit_message([f"{name}{i}" for i in range(len(prompts))], request)
    return _handle(engine, _tokenize(message, engine.tokenizer))


def waiting(engine: Engine) -> list[str]:
    return [request.id for request in engine.scheduler.waiting]


def test_batch_that_does_not_fit_is_refused_as_a_whole(engine: Engine):
    assert submit_batch(engine, "a", "x", "y") is None
    refused = submit_batch(engine, "b", "x", "y")
    assert refused is not None and refused["event"] == "refused" and refused["ids"] == ["b0", "b1"]
    assert (refused["error"]["status"], refused["error"]["code"]) == (429, "queue_full")
    assert "2 prompts: 2 requests wait already, of 3" in refused["error"]["message"]
    assert waiting(engine) == ["a0", "a1"] and not engine.stats.finished
    assert submit_batch(engine, "c", "x") is None, "one request fits"
    alone = submit_batch(engine, "d", "x")
    assert alone is not None and alone["error"]["status"] == 429
    assert waiting(engine) == ["a0", "a1", "c0"]


def test_one_invalid_prompt_refuses_the_whole_batch(engine: Engine):
    refused = submit_batch(engine, "a", "fine", "")
    assert refused is not None and "the prompt is empty" in refused["error"]["message"]
    assert not engine.busy and engine.stats.steps == 0


def test_batch_is_cancelled_at_once(engine: Engine):
    inbox: queue.SimpleQueue = queue.SimpleQueue()
    submit_batch(engine, "a", "x", "y")
    inbox.put({"do": "cancel", "ids": ["a0", "a1", "gone"]})
    (message,) = receive_messages(engine, inbox)
    assert isinstance(message, dict) and _handle(engine, message) is None
    assert not engine.busy
