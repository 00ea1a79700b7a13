"""Streams a response as server-sent events, with little CPU time per token.

A chunk differs from the last one only in its text, so the JSON around it is built once. All pending outputs are sent in
one message. The response is plain ASGI: two tasks per stream, and none per event.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import Response
from pydantic_core import to_json
from starlette.types import Receive, Scope, Send

from colonnade.errors import RequestError
from colonnade.serve.api.errors import error_body
from colonnade.serve.api.reply_builders import CompletionReplies, Usage
from colonnade.serve.request import Output

Batches = AsyncGenerator[list[tuple[int, Output]]]
"""Outputs that arrived together, each with the index of its completion."""

PING_S = 15.0
"""A stream without events for this long gets a comment, so that proxies do not close it [s]."""

PING, DONE = b": ping\n\n", b"data: [DONE]\n\n"

_TEXT = "\x00text\x00"
"""Placeholder for the text while the JSON around it is built."""


class EventStream(Response):
    """Sends ``events`` as they come; closes the generator at the end, or when the client disconnects."""

    def __init__(self, events: AsyncGenerator[bytes]):
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        super().__init__(headers=headers, media_type="text/event-stream")
        del self.headers["content-length"]
        self._events = events
        self._sent = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Respond to a request."""
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        sender = asyncio.ensure_future(self._send_events(send))
        disconnect = asyncio.ensure_future(self._wait_disconnect(receive, send))
        try:
            await asyncio.wait((sender, disconnect), return_when=asyncio.FIRST_COMPLETED)
            if sender.done():
                sender.result()
        finally:
            for each in (sender, disconnect):
                each.cancel()
            await asyncio.gather(sender, disconnect, return_exceptions=True)

    async def _send_events(self, send: Send) -> None:
        async with aclosing(self._events):
            async for event in self._events:
                if event:
                    self._sent = True
                    await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _wait_disconnect(self, receive: Receive, send: Send) -> None:
        """Return when the client disconnects; send pings meanwhile."""
        while True:
            self._sent = False
            try:
                async with asyncio.timeout(PING_S):
                    while (await receive())["type"] != "http.disconnect":
                        pass
            except TimeoutError:
                if not self._sent:
                    await send({"type": "http.response.body", "body": PING, "more_body": True})
            else:
                return


async def reply_events(
    first: list[tuple[int, Output]],
    batches: Batches,
    builder: CompletionReplies,
    usage: Usage,
    *,
    include_usage: bool,
    continuous: bool,
) -> AsyncGenerator[bytes]:
    """Events of a response: chunks with text, the end of each completion, the usage if requested, and [DONE].

    With ``include_usage`` every chunk has the field, null except in the last, or with ``continuous`` the usage so far.
    """
    chunks = _Chunks(builder, usage, include_usage=include_usage, continuous=continuous)
    async with aclosing(batches):
        try:
            yield chunks.encode(first)
            async for batch in batches:
                yield chunks.encode(batch)
            yield (_event(builder.usage_chunk(chunks.usage)) if include_usage else b"") + DONE
        except RequestError as error:  # the status was sent long ago: report it in the stream, as OpenAI does
            yield _event(error_body(error))


class _Chunks:
    """Writes the chunks of one response."""

    def __init__(self, builder: CompletionReplies, usage: Usage, *, include_usage: bool, continuous: bool):
        self.usage = usage
        self._builder, self._include_usage, self._continuous = builder, include_usage, continuous
        self._around: dict[int, tuple[bytes, bytes] | None] = {}
        """By completion: what comes before and after the text; None if more than the text varies."""

    def encode(self, batch: list[tuple[int, Output]]) -> bytes:
        """The events of some outputs, joined; empty if they have no text yet."""
        events: list[bytes] = []
        for index, output in batch:
            self.usage.add(index, output)
            if index not in self._around:
                self._around[index] = self._template(index)
                if chunk := self._builder.first_chunk(index):
                    events.append(self._event(chunk))
            around = self._around[index]
            if around is not None and output.finish_reason is None and output.logprobs is None:
                if output.text:
                    events += (around[0], to_json(output.text), around[1])
            elif output.text or output.finish_reason or output.logprobs or self._builder.token_ids:
                events.append(self._event(self._builder.chunk(index, output)))
        return b"".join(events)

    def _template(self, index: int) -> tuple[bytes, bytes] | None:
        """The event of a chunk with only text, split at the text."""
        if not self._builder.sends_text_unchanged or (self._include_usage and self._continuous):
            return None
        # Two outputs that have only the text in common: a field that varies with anything else shows.
        one, other = (self._event(self._builder.chunk(index, Output(str(i), _TEXT, i, None, i, i))) for i in range(2))
        before, text, after = one.partition(to_json(_TEXT))
        return (before, after) if text and one == other else None

    def _event(self, chunk: Any) -> bytes:
        if self._include_usage:
            chunk = {**chunk, "usage": self.usage.reply() if self._continuous else None}
        return _event(chunk)


def _event(reply: Any) -> bytes:
    return b"data: %b\n\n" % to_json(reply)
