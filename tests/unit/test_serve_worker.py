"""A batch of requests is queued at once, all of it or nothing."""

import queue
import socket
import threading

import pytest

from colonnade.config import ServeConfig
from colonnade.errors import RequestError
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.serve import Engine, SamplingParams
from colonnade.serve.generation_request import GenerationRequest
from colonnade.serve.http_connections import HttpConnections
from colonnade.serve.ipc import Message, encode_message
from colonnade.serve.message_reader import LARGE_TEXT, prepare, read_messages
from colonnade.serve.weight_swap import WeightSwap
from colonnade.serve.worker import _handle, _reply, receive_messages
from tests.serve import tiny


@pytest.fixture
def engine() -> Engine:
    return Engine(tiny.model(), tiny.tokenizer(), ServeConfig(max_waiting=3, pages=8))


def submit_batch(engine: Engine, name: str, *prompts: str) -> Message | None:
    """The error, if the request is refused."""
    request = GenerationRequest(prompts=prompts, params=SamplingParams(max_tokens=2, ignore_eos=True))
    message = request.message([f"{name}{i}" for i in range(len(prompts))])
    return _reply(engine, prepare(message, engine))


def waiting(engine: Engine) -> list[str]:
    return [request.id for request in engine.scheduler.waiting]


def test_batch_that_does_not_fit_is_refused_as_a_whole(engine: Engine):
    assert submit_batch(engine, "a", "x", "y") is None
    refused = submit_batch(engine, "b", "x", "y")
    assert refused is not None and refused["event"] == "refused" and refused["ids"] == ["b0", "b1"]
    assert (refused["error"]["status"], refused["error"]["code"]) == (429, "queue_full")
    assert "2 prompts: 2 requests are already waiting, of 3" in refused["error"]["message"]
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
    submit_batch(engine, "a", "x", "y")
    connections = HttpConnections(engine, {"event": "ready"})
    near, far = socket.socketpair()
    with near:
        connections.add(far, is_server=True)
        near.sendall(encode_message({"do": "cancel", "ids": ["a0", "a1", "gone"]}))
        while not (messages := receive_messages(engine, connections)):
            pass
        ((sender, message),) = messages
        assert isinstance(message, dict)
        swap = WeightSwap(engine, DistributedContext.solo())
        _handle(engine, swap, connections, sender, message)
        assert not engine.busy
        near.shutdown(socket.SHUT_RDWR)
        ((sender, message),) = receive_messages(engine, connections)
        assert message == {"do": "disconnected"} and sender is not None
        connections.end(sender)


class GatedTokenizer:
    """Tokenises long texts only while ``gate`` is set."""

    chat_template = None

    def __init__(self):
        self.gate = threading.Event()

    def encode(self, text: str, special: bool = True) -> list[int]:
        if len(text) > LARGE_TEXT:
            assert self.gate.wait(60)
        return tiny.tokenizer().encode(text, special)


def test_a_large_prompt_is_tokenised_beside_the_others(engine: Engine):
    tokenizer, inbox = GatedTokenizer(), queue.SimpleQueue()
    engine.tokenizer = tokenizer  # type: ignore[assignment]
    near, far = socket.socketpair()
    reader = threading.Thread(target=read_messages, args=(far, engine, inbox.put))
    reader.start()

    def send(name: str, length: int) -> None:
        near.sendall(encode_message(GenerationRequest(prompts=["a" * length]).message([name])))

    with near, far:
        send("large", LARGE_TEXT + 1)
        send("cancelled", LARGE_TEXT + 1)
        send("small", 3)
        assert inbox.get(timeout=120)["ids"] == ["small"], "the small prompt waited for the large one"
        near.sendall(encode_message({"do": "cancel", "ids": ["cancelled"]}))
        near.sendall(encode_message({"do": "cancel", "ids": ["small"]}))
        assert inbox.get(timeout=120) == {"do": "cancel", "ids": ["small"]}
        send("last", LARGE_TEXT + 1)
        for name, length in (("long", LARGE_TEXT + 1), ("short", 3)):
            asked = {"prompt": "a" * length, "messages": None, "special": True, "strings": False}
            near.sendall(encode_message({"do": "tokenize", "ids": [name], **asked}))
        answer = inbox.get(timeout=120)
        assert answer["event"]["ids"] == ["short"] and answer["event"]["tokens"] == tiny.tokenizer().encode("aaa")
        tokenizer.gate.set()
        large = inbox.get(timeout=120)
        assert large["ids"] == ["large"]
        assert large["tokens"] == [tiny.tokenizer().encode("a" * (LARGE_TEXT + 1))]
        assert inbox.get(timeout=120)["ids"] == ["last"], "the cancelled one is dropped"
        assert inbox.get(timeout=120)["event"]["ids"] == ["long"]
        near.shutdown(socket.SHUT_WR)
        assert inbox.get(timeout=120) == {"do": "disconnected"}
    reader.join(60)
    assert not reader.is_alive()


def test_text_over_the_context_is_refused_without_tokenising():
    longest = tiny.tokenizer().longest_token_bytes
    assert longest >= len("<|end|>")
    most = 128 * longest
    GenerationRequest(prompts=["ö" * (most // 2), [1] * 127]).check_lengths(128, longest)
    for request, param in (
        (GenerationRequest(prompts=["fine", "ö" * (most // 2 + 1)]), "prompt"),
        (GenerationRequest(messages=[{"content": "a" * most}, {"content": "abc"}]), "messages"),
    ):
        with pytest.raises(
            RequestError, match=rf"context length is 128 tokens, .* {longest} bytes, which makes {most}"
        ) as no:
            request.check_lengths(128, longest)
        assert (no.value.param, no.value.code) == (param, "context_length_exceeded")
    with pytest.raises(RequestError, match="maximum context length is 128 tokens; the prompt has 128: "):
        GenerationRequest(prompts=[[1] * 128]).check_lengths(128, longest)
