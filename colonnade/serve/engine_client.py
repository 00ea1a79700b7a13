"""The engine as the HTTP process sees it: asks go out on a line, outputs come back, and all hear of its death."""

import asyncio
import contextlib
import uuid
from collections.abc import AsyncGenerator

from colonnade.errors import ColonnadeError, RequestError
from colonnade.serve.ipc import Ask, Message, error_from, from_line, output_from, submit_message, to_line
from colonnade.serve.output import Output, Stats, not_finite


class EngineClient:
    """Talks with one engine process, which :func:`colonnade.serve.engine_process.engine_process` starts and ends."""

    def __init__(self):
        self.context = self.cache_tokens = 0
        """Tokens of one request: what the model was made for, and what the cache holds."""
        self.stats = Stats()
        self.draining = False
        """Set when the server is asked to stop: no new requests."""
        self.stopped = False
        """Set when the engine is asked to go: its end is then no failure."""
        self.failure: ColonnadeError | None = None
        self.ready, self.hung_up, self.ended = asyncio.Event(), asyncio.Event(), asyncio.Event()
        """The model is loaded; the line has ended; the engine's processes are gone."""
        self.idle = asyncio.Event()
        """Set while nobody waits for an output."""
        self.idle.set()
        self._mail: dict[str, asyncio.Queue[Output | RequestError]] = {}
        self._writer: asyncio.StreamWriter | None = None

    @property
    def longest(self) -> int:
        """Tokens that a request may have, prompt and answer."""
        return min(self.context, self.cache_tokens)

    @property
    def under_way(self) -> int:
        """Clients that wait for outputs."""
        return len(set(self._mail.values()))

    async def run(self, ask: Ask) -> AsyncGenerator[tuple[int, Output]]:
        """The outputs of ``ask`` as they come, each with its answer's number; closing the generator cancels them.

        Raises :class:`RequestError`: a refusal, or with status 503 that the engine died or the server stops.
        """
        if self.failure or self.draining:
            raise self._unavailable()
        mail: asyncio.Queue[Output | RequestError] = asyncio.Queue()
        numbers = {uuid.uuid4().hex: number for number in range(ask.answers)}
        live = set(numbers)
        self.idle.clear()
        try:
            self._mail.update(dict.fromkeys(numbers, mail))
            self._send(submit_message(list(numbers), ask))
            while live:
                output = await mail.get()
                if isinstance(output, RequestError):
                    raise output
                if output.finish_reason:
                    live.discard(output.id)
                if output.finish_reason == "error":
                    raise not_finite()
                yield numbers[output.id], output
        finally:
            for key in numbers:
                self._mail.pop(key, None)
            if live:
                self._send({"do": "cancel", "ids": list(live)})
            if not self._mail:
                self.idle.set()

    def abort(self) -> None:
        """Everybody who still waits gets a clear error, at once."""
        for mail in set(self._mail.values()):
            mail.put_nowait(self._unavailable())

    def fail(self, failure: ColonnadeError) -> None:
        """The engine is gone, and not because it was asked to go."""
        self.failure = failure
        self.abort()

    def stop(self) -> None:
        """Ask the engine to go."""
        self.draining = self.stopped = True
        self._send({"do": "stop"})

    async def listen(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Read the line until it ends; asyncio calls this when the engine connects."""
        self._writer = writer
        try:
            with contextlib.suppress(ConnectionError):
                async for text in reader:
                    self._receive(from_line(text))
        finally:
            writer.close()
            self.hung_up.set()

    def _send(self, message: Message) -> None:
        if self._writer and not self._writer.is_closing():
            self._writer.write(to_line(message))

    def _receive(self, message: Message) -> None:
        if message["event"] == "refused":
            self._deliver(message["ids"][0], error_from(message["error"]))
            return
        self.stats = Stats(**message["stats"])
        if message["event"] == "ready":
            self.context, self.cache_tokens = message["context"], message["cache_tokens"]
            self.ready.set()
        for plain in message.get("outputs", ()):
            self._deliver(plain["id"], output_from(plain))

    def _deliver(self, key: str, output: Output | RequestError) -> None:
        if (mail := self._mail.get(key)) is not None:  # else its client has gone, and the cancellation is on its way
            mail.put_nowait(output)

    def _unavailable(self) -> RequestError:
        if self.failure:
            return RequestError(f"the engine failed: {self.failure}", status=503, code="engine_failed")
        return RequestError("the server is shutting down; ask again later", status=503, code="shutting_down")
