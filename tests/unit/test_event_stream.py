"""Events of a stream: equal to the chunks written one by one, whatever is built in advance."""

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from colonnade.errors import RequestError
from colonnade.serve.api import event_stream
from colonnade.serve.api.event_stream import EventStream, reply_events
from colonnade.serve.api.reply_builders import ChatReplies, CompletionReplies, LogprobsOptions, Usage
from colonnade.serve.ipc import decode_message, encode_message, output_from_list, output_to_list
from colonnade.serve.request import Output, Stats, Timing
from colonnade.serve.worker import _StatsTimer

TEXTS = ["", "plain", 'quote " and \\', "line\n\n", "\x00text\x00", "ü 🙂"]


def outputs(index: int) -> list[Output]:
    middle = [Output("r", text, 7, None, 3, i + 1) for i, text in enumerate(TEXTS)]
    return [*middle, Output("r", "end", 8 + index, "stop", 3, len(TEXTS) + 1, Timing(1.0, 2.0, 3.0))]


async def batches(*items: list[tuple[int, Output]] | RequestError) -> AsyncGenerator[list[tuple[int, Output]]]:
    for item in items:
        if isinstance(item, RequestError):
            raise item
        yield item


def events(*items: Any, builder: CompletionReplies, usage: bool = False, continuous: bool = False) -> list[Any]:
    async def collect() -> bytes:
        rest = batches(*items)
        first = await anext(rest)
        stream = reply_events(first, rest, builder, Usage(), include_usage=usage, continuous=continuous)
        return b"".join([event async for event in stream])

    *parts, last = asyncio.run(collect()).decode().split("\n\n")
    assert last == "" and all(part.startswith("data: ") for part in parts)
    texts = [part.removeprefix("data: ") for part in parts]
    return [text if text == "[DONE]" else json.loads(text) for text in texts]


@pytest.mark.parametrize("usage", [False, True])
@pytest.mark.parametrize("continuous", [False, True])
@pytest.mark.parametrize("kind", [CompletionReplies, ChatReplies])
def test_events_are_the_chunks(kind: type[CompletionReplies], usage: bool, continuous: bool):
    builder = kind("m", LogprobsOptions())
    pairs = [(index, output) for index in range(2) for output in outputs(index)]
    one_by_one = events(*([pair] for pair in pairs), builder=builder, usage=usage, continuous=continuous)
    assert events(pairs, builder=builder, usage=usage, continuous=continuous) == one_by_one
    expected = []
    for index, output in pairs:
        if output is outputs(index)[0] or output.generated_tokens == 1:
            expected += [chunk] if (chunk := builder.first_chunk(index)) else []
        if output.text or output.finish_reason:
            expected.append(builder.chunk(index, output))
    *chunks, done = one_by_one
    assert done == "[DONE]"
    if usage:
        *chunks, last = chunks
        assert last["choices"] == [] and last["usage"]["completion_tokens"] == 2 * (len(TEXTS) + 1)
        seen = [chunk.pop("usage") for chunk in chunks]
        assert all(seen) if continuous else seen == [None] * len(seen)
    assert chunks == json.loads(json.dumps(expected))


class Counting(CompletionReplies):
    """A reply in which more than the text varies."""

    def chunk(self, index: int, output: Output) -> Any:
        return {**super().chunk(index, output), "token": output.token}


def test_a_chunk_in_which_more_varies_is_not_built_in_advance():
    sent = events([(0, output) for output in outputs(0)], builder=Counting("m", LogprobsOptions()))
    assert [chunk["token"] for chunk in sent[:-1]] == [7] * (len(TEXTS) - 1) + [8]


def test_an_error_ends_the_stream():
    sent = events(
        [(0, outputs(0)[1])], RequestError("it broke", status=503), builder=CompletionReplies("m", LogprobsOptions())
    )
    assert sent[0]["choices"][0]["text"] == "plain" and sent[1]["error"]["message"] == "it broke" and len(sent) == 2


@pytest.mark.parametrize("leaves", [False, True])
def test_a_silent_stream_pings_and_closes_its_generator(monkeypatch: pytest.MonkeyPatch, leaves: bool):
    monkeypatch.setattr(event_stream, "PING_S", 0.01)
    sent: list[bytes] = []
    closed: list[bool] = []

    async def answer() -> None:
        left, silent = asyncio.Event(), asyncio.Event()

        async def silence() -> AsyncGenerator[bytes]:
            try:
                yield b"data: 1\n\n"
                await silent.wait()
                yield b"data: 2\n\n"
            finally:
                closed.append(True)

        async def receive() -> Any:
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message.get("body", b"start"))
            if sent.count(event_stream.PING) == 2:
                (left if leaves else silent).set()

        await EventStream(silence())({"type": "http"}, receive, send)

    asyncio.run(asyncio.wait_for(answer(), 30))
    assert sent[:2] == [b"start", b"data: 1\n\n"] and closed == [True]
    assert sent[-2:] == ([event_stream.PING] * 2 if leaves else [b"data: 2\n\n", b""])


def test_outputs_survive_the_socket():
    for output in outputs(0):
        assert output_from_list(decode_message(encode_message({"o": output_to_list(output)}))["o"]) == output


def test_statistics_are_sent_when_requests_change():
    timer, stats = _StatsTimer(), Stats()
    stats.running = 1
    assert timer.due(stats, finished=False)
    assert not timer.due(stats, finished=False)
    assert timer.due(stats, finished=True)
    stats.waiting = 1
    assert timer.due(stats, finished=False)
    assert not timer.due(stats, finished=False)
