"""The HTTP process's connection to an engine: requests out, outputs back to the waiting readers.

All completions of an HTTP request share a queue, so that whatever has arrived is delivered together. Closing a reader
cancels its request; an engine that dies ends all of them with an error. The messages are :mod:`colonnade.serve.ipc`'s.
"""

import asyncio
import contextlib
import resource
import uuid
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import Any, TypeVar, overload

from colonnade.errors import ColonnadeError, RequestError
from colonnade.serve.generation_request import GenerationRequest
from colonnade.serve.ipc import Message, decode_message, encode_message, output_from_list, to_thread_if_large
from colonnade.serve.pooler_spec import PoolerSpec
from colonnade.serve.pooling_request import PoolingOutput, PoolingRequest
from colonnade.serve.request import Output, Stats, failure
from colonnade.serve.tool_calls import ToolNotation

Item = TypeVar("Item")


def timed_out(timeout_s: float) -> RequestError:
    """The error of a request that took longer than ``timeout_s``."""
    return RequestError(
        f"the request did not finish within its timeout_s of {timeout_s:g} s; raise it, or request fewer tokens",
        param="timeout_s",
        status=504,
        code="timeout",
    )


def _size(value: Any) -> int:
    """Approximate number of characters of text and numbers in ``value``."""
    if isinstance(value, Mapping):
        return sum(map(_size, value.values()))
    if isinstance(value, list):
        return len(value) + sum(_size(each) for each in value if isinstance(each, Mapping))
    return len(value) if isinstance(value, str) else 1


async def _all_waiting(queue: asyncio.Queue[Item]) -> list[Item]:
    """The contents of ``queue``, once it is not empty."""
    items = [await queue.get()]
    while not queue.empty():
        items.append(queue.get_nowait())
    return items


class EngineClient:
    """The HTTP process's connection to an engine process (:mod:`colonnade.serve.engine_process` starts it)."""

    def __init__(self):
        self.context = self.cache_tokens = 0
        """Maximum number of tokens of one request, as limited by the model and by the cache."""
        self.longest_token_bytes = 0
        """Maximum number of bytes of text that one token stands for."""
        self.tools: ToolNotation | None = None
        """How the model writes tool calls, once it is loaded."""
        self.pid = 0
        """Of the engine process (rank 0)."""
        self.capabilities: list[str] = []
        """The endpoints that the model supports: "completions" and, with a chat template, "chat"."""
        self.pooler: PoolerSpec | None = None
        """The pooling of the hidden states; None if the model generates text."""
        self.note = ""
        """A note about the model for the operator, or empty."""
        self.stats = Stats()
        self.draining = False
        """Set once the server is asked to stop: new requests are refused."""
        self.stopped = False
        """Set once the engine is asked to stop: its end is then no failure."""
        self.failure: ColonnadeError | None = None
        self.loaded, self.ready, self.disconnected, self.exited = (asyncio.Event() for _ in range(4))
        """The weights are loaded; requests are accepted; the connection is closed; the processes have exited."""
        self.idle = asyncio.Event()
        """Set while no request runs."""
        self.idle.set()
        self._queues: dict[str, asyncio.Queue[Output | PoolingOutput | RequestError]] = {}
        """By completion id; all completions of one request have the same queue."""
        self._answers: dict[str, asyncio.Future[Message]] = {}
        """By the id of the message that asked."""
        self._writer: asyncio.StreamWriter | None = None

    @property
    def max_request_tokens(self) -> int:
        """Tokens that a request may have, prompt and output."""
        return min(self.context, self.cache_tokens)

    def resident_bytes(self) -> int:
        """RSS of the engine process; 0 if it is not known (before it has loaded, or where there is no /proc)."""
        with contextlib.suppress(OSError):
            if self.pid:
                return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * resource.getpagesize()
        return 0

    @property
    def replicas(self) -> Mapping[int, bool]:
        """Whether each replica is up; empty, since there is one engine."""
        return {}

    @property
    def running(self) -> int:
        """Number of HTTP requests that wait for outputs."""
        return len(set(self._queues.values()))

    @overload
    def run(self, request: GenerationRequest) -> AsyncGenerator[tuple[int, Output]]: ...
    @overload
    def run(self, request: PoolingRequest) -> AsyncGenerator[tuple[int, PoolingOutput]]: ...
    async def run(self, request: GenerationRequest | PoolingRequest) -> AsyncGenerator[tuple[int, Any]]:
        """Yield the outputs of :meth:`run_batches` one by one."""
        async with contextlib.aclosing(self.run_batches(request)) as batches:
            async for batch in batches:
                for each in batch:
                    yield each

    async def run_batches(self, request: GenerationRequest | PoolingRequest) -> AsyncGenerator[list[tuple[int, Any]]]:
        """Yield lists of (index of the completion, output), each with all outputs that have arrived.

        Closing the generator cancels the request.

        Raises :class:`RequestError` if the request is refused and, with status 503, if the engine died or the server
        stops.
        """
        if self.failure or self.draining or not self.ready.is_set():
            raise self.unavailable()
        request.check_lengths(self.context, self.longest_token_bytes, self.cache_tokens)
        queue: asyncio.Queue[Output | PoolingOutput | RequestError] = asyncio.Queue()
        indices = {uuid.uuid4().hex: index for index in range(request.num_completions)}
        resume = request.resume if isinstance(request, GenerationRequest) else ()
        ended = {i for i, tokens in enumerate(resume) if tokens is None}
        live = {key for key, index in indices.items() if index not in ended}
        self.idle.clear()
        timer = None
        if request.timeout_s is not None:
            loop = asyncio.get_running_loop()
            timer = loop.call_later(request.timeout_s, queue.put_nowait, timed_out(request.timeout_s))
        try:
            self._queues.update(dict.fromkeys(indices, queue))
            submission = request.message(list(indices))
            self._write(await to_thread_if_large(4 * request.size, encode_message, submission))
            while live:
                batch: list[tuple[int, Output | PoolingOutput]] = []
                for output in await _all_waiting(queue):
                    if isinstance(output, RequestError):
                        error = output
                    else:
                        if output.finish_reason:
                            live.discard(output.id)
                        if (error := failure(output.finish_reason)) is None:
                            batch.append((indices[output.id], output))
                            continue
                    if batch:
                        yield batch
                    raise error
                yield batch
        finally:
            if timer:
                timer.cancel()
            for key in indices:
                self._queues.pop(key, None)
            if live:
                self._send({"do": "cancel", "ids": list(live)})
            if not self._queues:
                self.idle.set()

    async def ask(self, do: str, **fields: Any) -> Message:
        """Send the message ``do`` and return its reply; raises :class:`RequestError` like :meth:`run`."""
        if self.failure or self.draining or not self.ready.is_set():
            raise self.unavailable()
        key = uuid.uuid4().hex
        answer = self._answers[key] = asyncio.get_running_loop().create_future()
        try:
            message = {"do": do, "ids": [key], **fields}
            self._write(await to_thread_if_large(4 * _size(fields), encode_message, message))
            return await answer
        finally:
            del self._answers[key]
            if answer.cancelled():
                self._send({"do": "cancel", "ids": [key]})

    def allocate(self) -> None:
        """Let the engine, which has loaded its weights, allocate its cache and become ready."""
        self._send({"do": "start"})

    def connect_front(self, address: str) -> None:
        """Let the engine connect to another HTTP process, which listens at this Unix socket."""
        self._send({"do": "connect", "address": address})

    def abort(self) -> None:
        """End all running requests with an error."""
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(self.unavailable())
        for queue in set(self._queues.values()):
            queue.put_nowait(self.unavailable())

    def fail(self, failure: ColonnadeError) -> None:
        """Record that the engine died, and end all running requests."""
        self.failure = failure
        self.abort()

    def stop(self) -> None:
        """Ask the engine to stop."""
        self.draining = self.stopped = True
        self._send({"do": "stop"})

    async def listen(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Read the engine's messages until it disconnects; asyncio calls this when the engine connects."""
        self._writer = writer
        try:
            with contextlib.suppress(ConnectionError):
                async for line in reader:
                    self._receive(decode_message(line))
        finally:
            writer.close()
            self.disconnected.set()

    def _send(self, message: Message) -> None:
        self._write(encode_message(message))

    def _write(self, line: bytes) -> None:
        if self._writer and not self._writer.is_closing():
            self._writer.write(line)

    def _receive(self, message: Message) -> None:
        if message["event"] == "refused":
            error = dict(message["error"])
            refusal = RequestError(error.pop("message"), **error)
            self._deliver(message["ids"][0], refusal)
            if (answer := self._answers.get(message["ids"][0])) and not answer.done():
                answer.set_exception(refusal)
            return
        if message["event"] == "answer":
            if (answer := self._answers.get(message["ids"][0])) and not answer.done():
                answer.set_result(message)
            return
        if message["event"] == "loaded":
            self.loaded.set()
        if "stats" in message:
            self.stats = Stats(**message["stats"])
        if message["event"] == "ready":
            self.context, self.cache_tokens = message["context"], message["cache_tokens"]
            self.longest_token_bytes, self.pid = message["longest_token_bytes"], message["pid"]
            self.tools = ToolNotation.from_dict(message["tools"]) if "tools" in message else None
            self.pooler = PoolerSpec(**message["pooler"]) if "pooler" in message else None
            self.capabilities, self.note = message["capabilities"], message["note"]
            self.ready.set()
        for values in message.get("outputs", ()):
            self._deliver(values[0], output_from_list(values))

    def _deliver(self, key: str, output: Output | PoolingOutput | RequestError) -> None:
        if (queue := self._queues.get(key)) is not None:  # otherwise its client has left, and it is being cancelled
            queue.put_nowait(output)

    def unavailable(self) -> RequestError:
        """The error (503) of a request that the engine cannot run now: it failed, loads, or is stopping."""
        if self.failure:
            # What is wrong, without the remedy, which is for whoever runs the server; the server prints it as it exits.
            reason = self.failure.message.partition("\n")[0].partition(";")[0]
            return RequestError(f"the engine failed: {reason}", status=503, code="engine_failed")
        if not self.draining and not self.ready.is_set():
            return RequestError("the model is still loading; try again later", status=503, code="loading")
        return RequestError("the server is shutting down; try again later", status=503, code="shutting_down")
