"""Messages between the HTTP process and the engine process: one JSON object a line, over a Unix socket.

    HTTP -> engine    {"do": "submit", "ids", "prompts", "messages", "params"}  {"do": "cancel", "ids"}  {"do": "stop"}
    engine -> HTTP    {"event": "ready", "context", "cache_tokens", "longest_token_bytes", "note",
                       "stats": {…}}
                      {"event": "outputs", "outputs": [[…], …], "stats": {…}}   {"event": "refused", "ids", "error"}

An output is the list of its fields' values. Stats are left out while a running request only adds tokens.

All prompts of one HTTP request are submitted together, and queued together or not at all. The socket is in a directory
that only its user may enter, and nothing is unpickled. A dead engine shows as the end of the stream.

:class:`EngineClient` is the HTTP process's side; the engine's side is :mod:`colonnade.serve.worker`.
"""

import asyncio
import contextlib
import dataclasses
import json
import operator
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from colonnade.errors import CapacityError, ColonnadeError, RequestError
from colonnade.serve.prompts import context_error
from colonnade.serve.request import Alternative, Output, Stats, Timing, TokenLogprob, not_finite
from colonnade.serve.sampling_params import SamplingParams

Message = dict[str, Any]
Result = TypeVar("Result")

LARGE_BYTES = 256 << 10
"""Bodies and messages above this size are parsed and encoded in a thread [bytes]."""


async def to_thread_if_large(num_bytes: int, work: Callable[..., Result], *args: Any) -> Result:
    """``work(*args)``, in a thread if ``num_bytes`` is above :data:`LARGE_BYTES`, so that the event loop goes on."""
    return work(*args) if num_bytes <= LARGE_BYTES else await asyncio.to_thread(work, *args)


@dataclass(frozen=True)
class GenerationRequest:
    """What one HTTP request asks for: completions of prompts, or the answer to the messages of a chat."""

    prompts: Sequence[str | Sequence[int]] = ()
    messages: Sequence[Mapping[str, Any]] | None = None
    params: SamplingParams = field(default_factory=SamplingParams)

    @property
    def num_completions(self) -> int:
        """One for each prompt, or one for a chat."""
        return len(self.prompts) if self.messages is None else 1

    @property
    def size(self) -> int:
        """Characters of text and token ids, about."""
        if self.messages is None:
            return sum(map(len, self.prompts))
        return sum(len(message["content"]) for message in self.messages)

    def check_lengths(self, context: int, longest_token_bytes: int) -> None:
        """Raise :class:`RequestError` for a prompt that exceeds the context whatever its text is, without tokenising.

        T tokens hold at most T · ``longest_token_bytes`` bytes of text.
        """
        if self.messages is None:
            for prompt in self.prompts:
                if isinstance(prompt, str):
                    _check_text_bytes(_num_bytes(prompt), context, longest_token_bytes, "prompt")
                elif len(prompt) >= context:
                    raise context_error(len(prompt), self.params.max_tokens, context)
        else:
            size = sum(_num_bytes(message["content"]) for message in self.messages)
            _check_text_bytes(size, context, longest_token_bytes, "messages")


def _num_bytes(text: str) -> int:
    """Bytes of ``text`` in UTF-8."""
    return len(text.encode(errors="surrogatepass"))


def _check_text_bytes(size: int, context: int, longest_token_bytes: int, param: str) -> None:
    if size > context * longest_token_bytes:
        raise RequestError(
            f"the text has {size} bytes; the model's context of {context} tokens, each of at most "
            f"{longest_token_bytes} bytes, holds at most {context * longest_token_bytes}; shorten it",
            param=param,
            code="context_length_exceeded",
        )


def encode_message(message: Message) -> bytes:
    """One message with its newline; all ASCII, so that lone surrogates of a client's text survive."""
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def decode_message(line: bytes) -> Message:
    """The inverse of :func:`encode_message`."""
    return json.loads(line)


def submit_message(ids: Sequence[str], request: GenerationRequest) -> Message:
    """The message that submits ``request``, with an id for each completion."""
    values = {each.name: getattr(request, each.name) for each in dataclasses.fields(request)}
    return {"do": "submit", "ids": list(ids), **values, "params": dataclasses.asdict(request.params)}


_OUTPUT_FIELDS = tuple(each.name for each in dataclasses.fields(Output))
_OUTPUT_VALUES = operator.attrgetter(*_OUTPUT_FIELDS)
_TIMING, _LOGPROBS, _PROMPT_LOGPROBS = map(_OUTPUT_FIELDS.index, ("timing", "logprobs", "prompt_logprobs"))


def output_to_list(output: Output) -> list[Any]:
    """The values of an :class:`Output`; ``asdict``, which copies every value, takes ten times as long."""
    values = list(_OUTPUT_VALUES(output))
    if output.timing is not None:
        values[_TIMING] = dataclasses.astuple(output.timing)
    if output.logprobs is not None:
        values[_LOGPROBS] = _logprob_to_list(output.logprobs)
    if output.prompt_logprobs is not None:
        values[_PROMPT_LOGPROBS] = [_logprob_to_list(each) for each in output.prompt_logprobs]
    return values


def output_from_list(values: list[Any]) -> Output:
    """The inverse of :func:`output_to_list`."""
    if (timing := values[_TIMING]) is not None:
        values[_TIMING] = Timing(*timing)
    if (logprobs := values[_LOGPROBS]) is not None:
        values[_LOGPROBS] = _logprob_from_list(logprobs)
    if (prompt := values[_PROMPT_LOGPROBS]) is not None:
        values[_PROMPT_LOGPROBS] = tuple(map(_logprob_from_list, prompt))
    return Output(*values)


def _logprob_to_list(it: TokenLogprob) -> list[Any]:
    """The values of ``it``; bytes as Latin-1 text."""
    top = [(token, data.decode("latin-1"), logprob) for token, data, logprob in it.top]
    return [it.token, it.data.decode("latin-1"), it.logprob, it.offset, top]


def _logprob_from_list(values: list[Any]) -> TokenLogprob:
    token, data, logprob, offset, top = values
    alternatives = tuple(Alternative(other, text.encode("latin-1"), each) for other, text, each in top)
    return TokenLogprob(token, data.encode("latin-1"), logprob, offset, alternatives)


def error_to_dict(error: ColonnadeError) -> Message:
    """The fields of the :class:`RequestError` that the client gets for ``error``."""
    if isinstance(error, RequestError):
        return {"message": str(error), "param": error.param, "status": error.status, "code": error.code}
    if isinstance(error, CapacityError):
        return {"message": str(error), "param": "prompt", "status": 400, "code": "cache_too_small"}
    return {"message": str(error), "param": None, "status": 500, "code": "server_error"}


async def _all_waiting(queue: asyncio.Queue[Result]) -> list[Result]:
    """What is in ``queue``, once there is something."""
    items = [await queue.get()]
    while not queue.empty():
        items.append(queue.get_nowait())
    return items


class EngineClient:
    """The HTTP process's connection to an engine process (:mod:`colonnade.serve.engine_process` starts it)."""

    def __init__(self):
        self.context = self.cache_tokens = 0
        """Largest number of tokens of one request: what the model supports, and what the cache holds."""
        self.longest_token_bytes = 0
        """The most bytes of text that one token stands for."""
        self.note = ""
        """What the operator should know about the model, or nothing."""
        self.stats = Stats()
        self.draining = False
        """Set once the server is asked to stop: new requests are refused."""
        self.stopped = False
        """Set once the engine is asked to stop: its end is then no failure."""
        self.failure: ColonnadeError | None = None
        self.ready, self.disconnected, self.exited = asyncio.Event(), asyncio.Event(), asyncio.Event()
        """The model is loaded; the connection is closed; the engine's processes have exited."""
        self.idle = asyncio.Event()
        """Set while no request runs."""
        self.idle.set()
        self._queues: dict[str, asyncio.Queue[Output | RequestError]] = {}
        """By completion id; all completions of one request have the same queue."""
        self._writer: asyncio.StreamWriter | None = None

    @property
    def max_request_tokens(self) -> int:
        """Tokens that a request may have, prompt and output."""
        return min(self.context, self.cache_tokens)

    @property
    def running(self) -> int:
        """Number of HTTP requests that wait for outputs."""
        return len(set(self._queues.values()))

    async def run(self, request: GenerationRequest) -> AsyncGenerator[tuple[int, Output]]:
        """Yield the outputs of :meth:`run_batches` one by one."""
        async with contextlib.aclosing(self.run_batches(request)) as batches:
            async for batch in batches:
                for each in batch:
                    yield each

    async def run_batches(self, request: GenerationRequest) -> AsyncGenerator[list[tuple[int, Output]]]:
        """Yield lists of (index of the completion, output), each with all outputs that have arrived.

        Closing the generator cancels the request.

        Raises :class:`RequestError` if the request is refused and, with status 503, if the engine died or the server
        stops.
        """
        if self.failure or self.draining or not self.ready.is_set():
            raise self.unavailable()
        request.check_lengths(self.context, self.longest_token_bytes)
        queue: asyncio.Queue[Output | RequestError] = asyncio.Queue()
        indices = {uuid.uuid4().hex: index for index in range(request.num_completions)}
        live = set(indices)
        self.idle.clear()
        try:
            self._queues.update(dict.fromkeys(indices, queue))
            submission = submit_message(list(indices), request)
            self._write(await to_thread_if_large(4 * request.size, encode_message, submission))
            while live:
                batch: list[tuple[int, Output]] = []
                for output in await _all_waiting(queue):
                    if isinstance(output, RequestError):
                        failure = output
                    elif output.finish_reason == "error":
                        live.discard(output.id)
                        failure = not_finite()
                    else:
                        if output.finish_reason:
                            live.discard(output.id)
                        batch.append((indices[output.id], output))
                        continue
                    if batch:
                        yield batch
                    raise failure
                yield batch
        finally:
            for key in indices:
                self._queues.pop(key, None)
            if live:
                self._send({"do": "cancel", "ids": list(live)})
            if not self._queues:
                self.idle.set()

    def abort(self) -> None:
        """End all running requests with an error."""
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
            self._deliver(message["ids"][0], RequestError(error.pop("message"), **error))
            return
        if "stats" in message:
            self.stats = Stats(**message["stats"])
        if message["event"] == "ready":
            self.context, self.cache_tokens = message["context"], message["cache_tokens"]
            self.longest_token_bytes, self.note = message["longest_token_bytes"], message["note"]
            self.ready.set()
        for values in message.get("outputs", ()):
            self._deliver(values[0], output_from_list(values))

    def _deliver(self, key: str, output: Output | RequestError) -> None:
        if (queue := self._queues.get(key)) is not None:  # otherwise its client has left, and it is being cancelled
            queue.put_nowait(output)

    def unavailable(self) -> RequestError:
        """The error (503) of a request that the engine cannot run now: it failed, loads, or is stopping."""
        if self.failure:
            return RequestError(f"the engine failed: {self.failure}", status=503, code="engine_failed")
        if not self.draining and not self.ready.is_set():
            return RequestError("the model is still loading; try again later", status=503, code="loading")
        return RequestError("the server is shutting down; try again later", status=503, code="shutting_down")
