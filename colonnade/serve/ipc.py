"""Messages between the HTTP process and the engine process: one JSON object a line, over a Unix socket.

    HTTP -> engine    {"do": "start"}                       after "loaded": the engine allocates its cache
                      {"do": "submit", "ids", "prompts", "messages", "params", "n", "special", "template", "client",
                       "priority", "timeout_s", "resume"}
                      {"do": "cancel", "ids"}       {"do": "reset_cache", "ids"}      {"do": "stop"}
                      {"do": "swap", "ids", "path"}
                      {"do": "tokenize", "ids", "prompt", "messages", …}
                      {"do": "detokenize", "ids", "tokens"}   {"do": "connect", "address"}
                      {"do": "tokenizer_info", "ids"}
    engine -> HTTP    {"event": "loaded"}
                      {"event": "ready", "context", "cache_tokens", "longest_token_bytes", "tools", "pid",
                       "capabilities", "note", "stats": {…}}
                      {"event": "outputs", "outputs": [[…], …], "stats": {…}}   {"event": "refused", "ids", "error"}
                      {"event": "answer", "ids", …}           to messages that generate nothing

An output is the list of its fields' values. Stats are left out while a running request only adds tokens.

All prompts of one HTTP request are submitted together, and queued together or not at all. The socket is in a directory
that only its user may enter, and nothing is unpickled. A dead engine shows as the end of the stream.

:class:`EngineClient` is the HTTP process's side; the engine's side is :mod:`colonnade.serve.worker`.
"""

import asyncio
import contextlib
import dataclasses
import json
import resource
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, overload

from colonnade.errors import CapacityError, ColonnadeError, RequestError
from colonnade.serve.pooler_spec import PoolerSpec
from colonnade.serve.pooling_request import PoolingOutput, PoolingRequest
from colonnade.serve.prompts import context_error
from colonnade.serve.request import Alternative, Output, Stats, Timing, TokenLogprob, failure
from colonnade.serve.sampling_params import SamplingParams
from colonnade.serve.tool_calls import ToolNotation

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
    n: int = 1
    """Choices for each prompt."""
    special: bool = True
    """Whether the tokens that begin and end every text are added to ``prompts`` that are text."""
    template: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of :meth:`Tokenizer.encode_chat`: ``tools``, ``continue_last``, and variables of the template."""
    client: str = ""
    """Whose request it is: the name of an API key, or an address. Clients take turns in the queue."""
    priority: int = 0
    """Its class in the queue; lower ones first."""
    adapter: str = ""
    """The name of its adapter; empty: none."""
    timeout_s: float | None = None
    """It is refused if it would wait longer, and ended with an error if it takes longer; None: no limit [s]."""
    resume: Sequence[Sequence[int] | None] = ()
    """If it goes on after another engine has failed: the output ids of each completion so far; None: it has ended."""

    @property
    def num_completions(self) -> int:
        """``n`` for each prompt, or for a chat; those of a prompt follow one another."""
        return self.n * (len(self.prompts) if self.messages is None else 1)

    @property
    def size(self) -> int:
        """Characters of text and token ids, about."""
        if self.messages is None:
            return sum(map(len, self.prompts))
        return sum(len(message["content"]) for message in self.messages)

    def check_lengths(self, context: int, longest_token_bytes: int, limit: int | None = None) -> None:
        """Raise :class:`RequestError` for a prompt that exceeds the context whatever its text is, without tokenising.

        T tokens hold at most T · ``longest_token_bytes`` bytes of text. The cache holds ``limit`` tokens of a request.
        """
        if self.messages is None:
            for prompt in self.prompts:
                if isinstance(prompt, str):
                    _check_text_bytes(_num_bytes(prompt), context, longest_token_bytes, "prompt")
                elif len(prompt) > context - (self.params.max_tokens != 0):
                    raise context_error(len(prompt), self.params.max_tokens, context, limit)
        else:
            size = sum(_num_bytes(message["content"]) for message in self.messages)
            _check_text_bytes(size, context, longest_token_bytes, "messages")


def _size(value: Any) -> int:
    """Characters of text and numbers in ``value``, about."""
    if isinstance(value, Mapping):
        return sum(map(_size, value.values()))
    if isinstance(value, list):
        return len(value) + sum(_size(each) for each in value if isinstance(each, Mapping))
    return len(value) if isinstance(value, str) else 1


def _num_bytes(text: str) -> int:
    """Bytes of ``text`` in UTF-8."""
    return len(text.encode(errors="surrogatepass"))


def _check_text_bytes(size: int, context: int, longest_token_bytes: int, param: str) -> None:
    if size > context * longest_token_bytes:
        raise RequestError(
            f"the text has {size} bytes; this model's maximum context length is {context} tokens, each of at most "
            f"{longest_token_bytes} bytes, which makes {context * longest_token_bytes}; shorten it",
            param=param,
            code="context_length_exceeded",
        )


def encode_message(message: Message) -> bytes:
    """One message with its newline; all ASCII, so that lone surrogates of a client's text survive."""
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def decode_message(line: bytes) -> Message:
    """The inverse of :func:`encode_message`."""
    return json.loads(line)


def submit_message(ids: Sequence[str], request: GenerationRequest | PoolingRequest) -> Message:
    """The message that submits ``request``, with an id for each completion."""
    if isinstance(request, PoolingRequest):
        return request.message(ids)
    values = {each.name: getattr(request, each.name) for each in dataclasses.fields(request)}
    return {"do": "submit", "ids": list(ids), **values, "params": dataclasses.asdict(request.params)}


_POOLING_FIELDS = tuple(each.name for each in dataclasses.fields(PoolingOutput))
_TIMING, _LOGPROBS, _PROMPT_LOGPROBS, _PROMPT_IDS = map(
    Output._fields.index, ("timing", "logprobs", "prompt_logprobs", "prompt_token_ids")
)


def output_to_list(output: Output | PoolingOutput) -> list[Any]:
    """The values of an output."""
    if isinstance(output, PoolingOutput):
        return [getattr(output, name) for name in _POOLING_FIELDS]
    values = list[Any](output)
    if output.timing is not None:
        values[_TIMING] = dataclasses.astuple(output.timing)
    if output.logprobs is not None:
        values[_LOGPROBS] = _logprob_to_list(output.logprobs)
    if output.prompt_logprobs is not None:
        values[_PROMPT_LOGPROBS] = [_logprob_to_list(each) for each in output.prompt_logprobs]
    return values


def output_from_list(values: list[Any]) -> Output | PoolingOutput:
    """The inverse of :func:`output_to_list`."""
    if len(values) == len(_POOLING_FIELDS):
        return PoolingOutput(*values)
    if (timing := values[_TIMING]) is not None:
        values[_TIMING] = Timing(*timing)
    if (logprobs := values[_LOGPROBS]) is not None:
        values[_LOGPROBS] = _logprob_from_list(logprobs)
    if (prompt := values[_PROMPT_LOGPROBS]) is not None:
        values[_PROMPT_LOGPROBS] = tuple(map(_logprob_from_list, prompt))
    if (ids := values[_PROMPT_IDS]) is not None:
        values[_PROMPT_IDS] = tuple(ids)
    return Output(*values)


def _logprob_to_list(it: TokenLogprob) -> list[Any]:
    """The values of ``it``; bytes as Latin-1 text."""
    top = [(token, data.decode("latin-1"), logprob) for token, data, logprob in it.top]
    return [it.token, it.data.decode("latin-1"), it.logprob, it.offset, top]


def _logprob_from_list(values: list[Any]) -> TokenLogprob:
    token, data, logprob, offset, top = values
    alternatives = tuple(Alternative(other, text.encode("latin-1"), each) for other, text, each in top)
    return TokenLogprob(token, data.encode("latin-1"), logprob, offset, alternatives)


def timed_out(timeout_s: float) -> RequestError:
    """The error of a request that took longer than ``timeout_s``."""
    return RequestError(
        f"the request did not finish within its timeout_s of {timeout_s:g} s; allow more, or ask for fewer tokens",
        param="timeout_s",
        status=504,
        code="timeout",
    )


def error_to_dict(error: ColonnadeError) -> Message:
    """The fields of the :class:`RequestError` that the client gets for ``error``."""
    fields = {"message": error.message, "operator_hint": error.operator_hint}
    if isinstance(error, RequestError):
        names = ("param", "status", "code", "retry_after_s")
        return {**fields, **{name: getattr(error, name) for name in names}}
    if isinstance(error, CapacityError):
        return {**fields, "param": "prompt", "status": 400, "code": "cache_too_small"}
    return {**fields, "param": None, "status": 500, "code": "server_error"}


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
        self.tools: ToolNotation | None = None
        """How the model writes tool calls, once it is loaded."""
        self.pid = 0
        """Of the engine process (rank 0)."""
        self.capabilities: list[str] = []
        """What the model is served for: "completions" and, with a chat template, "chat"."""
        self.pooler: PoolerSpec | None = None
        """What is made of the hidden states; None if the model generates text."""
        self.note = ""
        """What the operator should know about the model, or nothing."""
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
            submission = submit_message(list(indices), request)
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
        """Send the message ``do`` and return its answer; raises :class:`RequestError` like :meth:`run`."""
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
