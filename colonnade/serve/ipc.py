"""Messages between the HTTP process and the engine process: one JSON object per line, over a Unix socket.

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

An output is the list of its fields' values. Stats are omitted while a running request only adds tokens.

All prompts of one HTTP request are submitted together, and queued together or not at all. The socket is in a directory
that only its user may enter, and nothing is unpickled. A dead engine shows as the end of the stream.

:mod:`colonnade.serve.engine_client` is the HTTP process's side, :mod:`colonnade.serve.worker` the engine's.
"""

import asyncio
import dataclasses
import json
from collections.abc import Callable
from typing import Any, TypeVar

from colonnade.errors import CapacityError, ColonnadeError, RequestError
from colonnade.serve.pooling_request import PoolingOutput
from colonnade.serve.request import Alternative, Output, Timing, TokenLogprob

Message = dict[str, Any]
Result = TypeVar("Result")

LARGE_BYTES = 256 << 10
"""Bodies and messages above this size are parsed and encoded in a thread [bytes]."""


async def to_thread_if_large(num_bytes: int, work: Callable[..., Result], *args: Any) -> Result:
    """``work(*args)``, in a thread if ``num_bytes`` is above :data:`LARGE_BYTES`, so that the event loop continues."""
    return work(*args) if num_bytes <= LARGE_BYTES else await asyncio.to_thread(work, *args)


def encode_message(message: Message) -> bytes:
    """One message with its newline; all ASCII, so that lone surrogates of a client's text survive."""
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def decode_message(line: bytes) -> Message:
    """The inverse of :func:`encode_message`."""
    return json.loads(line)


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


def error_to_dict(error: ColonnadeError) -> Message:
    """The fields of the :class:`RequestError` that the client gets for ``error``."""
    fields = {"message": error.message, "operator_hint": error.operator_hint}
    if isinstance(error, RequestError):
        names = ("param", "status", "code", "retry_after_s")
        return {**fields, **{name: getattr(error, name) for name in names}}
    if isinstance(error, CapacityError):
        return {**fields, "param": "prompt", "status": 400, "code": "cache_too_small"}
    return {**fields, "param": None, "status": 500, "code": "server_error"}
