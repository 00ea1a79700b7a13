"""The JSON objects of all answers, in OpenAI's format: what is sent is what /openapi.json describes.

They are TypedDicts: a type checker verifies their fields, pydantic derives the description and writes the JSON. That
takes 1.5 µs for a chunk of a stream; pydantic's models take 6.3, ``json.dumps`` 4.2.
"""

import time
import uuid
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple, NotRequired, cast

from fastapi import FastAPI
from pydantic import ConfigDict, TypeAdapter, with_config
from typing_extensions import TypedDict

from colonnade.serve.request import Alternative, Output, TokenLogprob
from colonnade.serve.tool_calls import ToolCallDelta, ToolCallParser, ToolFormat

FinishReason = Literal["stop", "length", "tool_calls"]
"""stop: an end token, a stop string, or the end of the grammar. tool_calls: the same, after calls. length: max_tokens
or the context."""


@with_config(ConfigDict(extra="forbid"))
class Reply(TypedDict):
    """An object with the declared fields and no others."""


class ErrorDetail(Reply):
    """What is wrong, and which field to change."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(Reply):
    """Every refusal."""

    error: ErrorDetail


class PromptTokensDetails(Reply):
    """Part of :class:`TokenUsage`."""

    cached_tokens: int
    """Tokens of the prompts that the prefix cache had."""


class TokenUsage(Reply):
    """Tokens of all completions of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class ReplyBase(Reply):
    """The fields with which all answers begin."""

    id: str
    created: int
    model: str


class PromptLogprob(Reply):
    """The log-probability of a token of the prompt, or of another one in its place."""

    logprob: float
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""vLLM's: for each token of the prompt by id the token and the most probable ones; null for the first."""


class CompletionLogprobs(Reply):
    """Log-probabilities of raw logits, entry i for token i; a token that is not UTF-8 is spelled by its bytes."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Reply):
    """The continuation of one prompt, or a piece of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    prompt_logprobs: NotRequired[PromptLogprobs]
    prompt_token_ids: NotRequired[list[int] | None]
    """In a stream, null but in the choice's first chunk; like ``token_ids``, with return_token_ids."""
    token_ids: NotRequired[list[int]]


class CompletionReply(ReplyBase):
    """POST /v1/completions."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: TokenUsage


class CompletionChunk(ReplyBase):
    """One event of its stream; ``usage`` only if stream_options asks for it."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: NotRequired[TokenUsage | None]


class CalledFunction(Reply):
    """The function that the model calls; ``arguments`` is JSON."""

    name: NotRequired[str]
    arguments: str


class ToolCall(Reply):
    """A call that the model makes."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class ToolCallChunk(Reply):
    """A piece of a call: first its id, type and name, then more of its arguments."""

    index: int
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: CalledFunction


class AssistantMessage(Reply):
    """The model's message; ``content`` is null if it only calls tools."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: NotRequired[list[ToolCall]]


class TopLogprob(Reply):
    """A token and its log-probability."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(TopLogprob):
    """A generated token, and the most probable ones in its place."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(Reply):
    """Log-probabilities of raw logits, one entry a token."""

    content: list[ChatTokenLogprob]
    refusal: None


class ChatChoice(Reply):
    """The answer."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    token_ids: NotRequired[list[int]]


class ChatReply(ReplyBase):
    """POST /v1/chat/completions."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: TokenUsage
    prompt_logprobs: NotRequired[PromptLogprobs]
    prompt_token_ids: NotRequired[list[int]]


class Delta(Reply):
    """What is new: the role first, then text."""

    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCallChunk]]


class ChatChunkChoice(Reply):
    """A piece of the answer."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    token_ids: NotRequired[list[int]]


class ChatChunk(ReplyBase):
    """One event of its stream; ``usage`` only if stream_options asks for it."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: NotRequired[TokenUsage | None]
    prompt_token_ids: NotRequired[list[int]]
    """In the chunk of each choice's first token, with return_token_ids."""


class ModelCard(Reply):
    """The model that is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: Literal["colonnade"]
    max_model_len: int
    """Tokens that a request may have, prompt and output: the model's context, or what the cache holds of it."""
    capabilities: list[str]
    """What the model is served for: "completions", and "chat" if it has a chat template."""


class ModelList(Reply):
    """GET /v1/models."""

    object: Literal["list"]
    data: list[ModelCard]


class Health(Reply):
    """Liveness: only "ok" comes with status 200, also while the server loads its model or drains."""

    status: Literal["ok", "engine failed"]


class ReplicaCount(Reply):
    """How many replicas take requests, of how many."""

    up: int
    all: int


ReadinessStatus = Literal["ready", "loading", "draining", "queue full", "engine failed"]


class Readiness(Reply):
    """Whether new requests are accepted: only "ready" comes with status 200."""

    status: ReadinessStatus
    """The first other status of a model, if it has several."""
    models: NotRequired[dict[str, ReadinessStatus]]
    """Of each model, if it has several."""
    replicas: NotRequired[ReplicaCount]
    """Only of a server with several."""


@dataclass
class Usage:
    """Counts the tokens of all completions of one request."""

    n: int = 1
    """Choices for each prompt, whose tokens are counted once."""
    prompt: dict[int, int] = field(default_factory=dict)
    generated: dict[int, int] = field(default_factory=dict)
    cached: dict[int, int] = field(default_factory=dict)

    def add(self, index: int, output: Output) -> None:
        """Record the newest output of completion ``index``."""
        self.prompt[index], self.generated[index] = output.prompt_tokens, output.generated_tokens
        self.cached[index] = output.cached_tokens

    def reply(self) -> TokenUsage:
        """The totals."""
        prompt, cached = (
            sum(count for index, count in counts.items() if index % self.n == 0)
            for counts in (self.prompt, self.cached)
        )
        generated = sum(self.generated.values())
        return {
            "prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated,
            "prompt_tokens_details": {"cached_tokens": cached},
        }  # fmt: skip


class LogprobsOptions(NamedTuple):
    """Which log-probabilities a reply has."""

    top: int | None = None
    """Alternatives to each token; None for no log-probabilities."""
    prompt: int | None = None
    """The same for ``prompt_logprobs``."""
    echo: bool = False
    """Whether the prompt's tokens come before the generated ones."""


class CompletionReplies:
    """Builds the answer to one request of /v1/completions."""

    prefix: ClassVar = "cmpl"
    sends_text_unchanged = True
    """Whether a chunk has the output's text as it is: false if it is parsed for tool calls."""

    def __init__(self, model: str, logprobs: LogprobsOptions, *, token_ids: bool = False):
        """``token_ids``: with the ids of prompts and tokens."""
        self.logprobs, self.token_ids = logprobs, token_ids
        self._base: ReplyBase = {
            "id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model,
        }  # fmt: skip

    def whole(self, completions: list[list[Output]], usage: Usage) -> CompletionReply | ChatReply:
        """The complete answer, from all outputs of each completion."""
        choices = [self._choice(i, outputs) for i, outputs in enumerate(completions)]
        return {**self._base, "object": "text_completion", "choices": choices, "usage": usage.reply()}

    def first_chunk(self, index: int) -> CompletionChunk | ChatChunk | None:
        """The chunk before the first text, if there is one."""
        return None

    def chunk(self, index: int, output: Output) -> CompletionChunk | ChatChunk:
        """New text, or the end."""
        return {**self._base, "object": "text_completion", "choices": [self._choice(index, [output])]}

    def _choice(self, index: int, outputs: list[Output]) -> CompletionChoice:
        reason = cast(FinishReason | None, outputs[-1].finish_reason)
        choice: CompletionChoice = {"index": index, "text": _text(outputs), "logprobs": None, "finish_reason": reason}
        top, prompt, echo = self.logprobs
        if top is not None:
            echoed = [each for output in outputs for each in output.prompt_logprobs or ()] if echo else []
            tokens = [*echoed, *(output.logprobs for output in outputs if output.logprobs is not None)]
            choice["logprobs"] = {
                "tokens": [_token_text(each.data) for each in tokens],
                "token_logprobs": [None if each.logprob is None else _finite(each.logprob) for each in tokens],
                "top_logprobs": [_completion_logprobs(each, top) for each in tokens],
                "text_offset": [each.offset for each in tokens],
            }
        if prompt is not None:
            choice["prompt_logprobs"] = _prompt_logprobs(outputs[0], prompt)
        if self.token_ids:
            choice["prompt_token_ids"] = _prompt_ids(outputs[0])
            choice["token_ids"] = _token_ids(outputs)
        return choice

    def usage_chunk(self, usage: Usage) -> CompletionChunk | ChatChunk:
        """The last chunk, with only the usage."""
        return {**self._base, "object": "text_completion", "choices": [], "usage": usage.reply()}


class ChatReplies(CompletionReplies):
    """Builds the answer to one request of /v1/chat/completions."""

    prefix: ClassVar = "chatcmpl"

    def __init__(
        self,
        model: str,
        logprobs: LogprobsOptions,
        tool_format: ToolFormat | None = None,
        *,
        token_ids: bool = False,
    ):
        """With ``tool_format`` the text is parsed for tool calls."""
        super().__init__(model, logprobs, token_ids=token_ids)
        self._tool_format, self.sends_text_unchanged = tool_format, tool_format is None
        self._parsers: dict[int, ToolCallParser] = {}

    def whole(self, completions: list[list[Output]], usage: Usage) -> ChatReply:
        """The complete answer, from all outputs of each completion."""
        choices: list[ChatChoice] = []
        for index, outputs in enumerate(completions):
            message: AssistantMessage = {"role": "assistant", "content": _text(outputs), "refusal": None}
            reason = cast(FinishReason, outputs[-1].finish_reason)
            if self._tool_format is not None:
                message, reason = _parse_calls(self._tool_format, _text(outputs), reason)
            logprobs = self._chat_logprobs(outputs)
            choices.append({"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason})
            if self.token_ids:
                choices[-1]["token_ids"] = _token_ids(outputs)
        reply: ChatReply = {**self._base, "object": "chat.completion", "choices": choices, "usage": usage.reply()}
        if self.logprobs.prompt is not None:
            reply["prompt_logprobs"] = _prompt_logprobs(completions[0][0], self.logprobs.prompt)
        if self.token_ids:
            reply["prompt_token_ids"] = _prompt_ids(completions[0][0]) or []
        return reply

    def _chat_logprobs(self, outputs: list[Output]) -> ChatLogprobs | None:
        if self.logprobs.top is None:
            return None
        content: list[ChatTokenLogprob] = [
            {**_top_logprob(each), "top_logprobs": [_top_logprob(other) for other in each.top]}
            for output in outputs
            if (each := output.logprobs) is not None
        ]
        return {"content": content, "refusal": None}

    def first_chunk(self, index: int) -> ChatChunk:
        """The role."""
        return self._chunk(index, {"role": "assistant", "content": ""}, None)

    def chunk(self, index: int, output: Output) -> ChatChunk:
        """New text, or the end."""
        delta: Delta = {"content": output.text} if output.text else {}
        reason = cast(FinishReason | None, output.finish_reason)
        if self._tool_format is not None:
            parser = self._parsers.setdefault(index, ToolCallParser(self._tool_format))
            parsed = parser.push(output.text)
            if reason is not None:
                parsed.content += parser.finish().content
                reason = "tool_calls" if parser.calls and reason == "stop" else reason
            delta = {"content": parsed.content} if parsed.content else {}
            if parsed.calls:
                delta["tool_calls"] = [_tool_call_chunk(call) for call in parsed.calls]
        return self._chunk(index, delta, reason, output)

    def usage_chunk(self, usage: Usage) -> ChatChunk:
        """The last chunk, with only the usage."""
        return {**self._base, "object": "chat.completion.chunk", "choices": [], "usage": usage.reply()}

    def _chunk(self, index: int, delta: Delta, reason: FinishReason | None, output: Output | None = None) -> ChatChunk:
        logprobs = None if output is None else self._chat_logprobs([output])
        choice: ChatChunkChoice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        chunk: ChatChunk = {**self._base, "object": "chat.completion.chunk", "choices": [choice]}
        if self.token_ids and output is not None:
            choice["token_ids"] = _token_ids([output])
            if (prompt := _prompt_ids(output)) is not None:
                chunk["prompt_token_ids"] = prompt
        return chunk


def _parse_calls(tool_format: ToolFormat, text: str, reason: FinishReason) -> tuple[AssistantMessage, FinishReason]:
    """The message with its calls."""
    parser = ToolCallParser(tool_format)
    parts = [parser.push(text), parser.finish()]
    content = "".join(part.content for part in parts)
    calls: list[ToolCall] = []
    for delta in (delta for part in parts for delta in part.calls):
        if delta.name is not None:
            calls.append({"id": delta.id or "", "type": "function", "function": {"name": delta.name, "arguments": ""}})
        calls[-1]["function"]["arguments"] += delta.arguments
    message: AssistantMessage = {"role": "assistant", "content": content, "refusal": None}
    if not calls:
        return message, reason
    message = {**message, "content": content or None, "tool_calls": calls}
    return message, "tool_calls" if reason == "stop" else reason


def _tool_call_chunk(delta: ToolCallDelta) -> ToolCallChunk:
    if delta.name is None:
        return {"index": delta.index, "function": {"arguments": delta.arguments}}
    function: CalledFunction = {"name": delta.name, "arguments": delta.arguments}
    return {"index": delta.index, "id": delta.id or "", "type": "function", "function": function}


def _text(outputs: list[Output]) -> str:
    return "".join(output.text for output in outputs)


def _token_ids(outputs: list[Output]) -> list[int]:
    return [output.token for output in outputs if output.token is not None]


def _prompt_ids(first: Output) -> list[int] | None:
    return None if first.prompt_token_ids is None else list(first.prompt_token_ids)


LOWEST_LOGPROB = -9999.0
"""JSON has no -inf; OpenAI's value for very improbable tokens."""


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)


def _token_text(data: bytes) -> str:
    """The text of a token; one that is no UTF-8 by its bytes, as OpenAI writes it, so that tokens stay distinct."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _top_logprob(it: TokenLogprob | Alternative) -> TopLogprob:
    assert it.logprob is not None, "only a prompt's first token has no log-probability"
    return {"token": it.data.decode(errors="replace"), "logprob": _finite(it.logprob), "bytes": list(it.data)}


def _prompt_logprobs(first: Output, top: int) -> PromptLogprobs:
    entries: PromptLogprobs = []
    for each in first.prompt_logprobs or ():
        if each.logprob is None:
            entries.append(None)
            continue
        tokens = {str(it.token): it for it in (*each.top[:top], each)}
        entries.append(
            {
                key: {"logprob": _finite(it.logprob or 0.0), "decoded_token": it.data.decode(errors="replace")}
                for key, it in tokens.items()
            }
        )
    return entries


def _completion_logprobs(each: TokenLogprob, top: int) -> dict[str, float] | None:
    """The most probable tokens in descending order, and the token itself."""
    if each.logprob is None:
        return None
    best: dict[str, float] = {}
    for it in (*each.top[:top], each):
        best.setdefault(_token_text(it.data), _finite(it.logprob or 0.0))
    return best


# -- /openapi.json -----------------------------------------------------------------------------------------------------

Responses = dict[int | str, dict[str, Any]]
SCHEMA = "#/components/schemas/{model}"

_REFUSALS = {
    400: "A bad value, or more tokens than the context or the cache allows",
    401: "No API key, or an unknown one",
    403: "The API key may not do this",
    404: "No model of this name",
    413: "A body over the size limit, which the message has",
    429: "The queue is full, or a wait over timeout_s is expected; Retry-After says when to try again",
    500: "The model's logits were not finite, or a bug",
    503: "The server is loading or stopping, or its engine died; Retry-After says when to try again",
    504: "The request took longer than its timeout_s",
    "4XX": "Any other refusal",  # without it, FastAPI would add its own 422, which is never sent
}


def refusals(*statuses: int | str) -> Responses:
    """FastAPI's ``responses`` for these statuses, or for all."""
    return {status: {"model": ErrorReply, "description": _REFUSALS[status]} for status in statuses or _REFUSALS}


def answers(whole: type, chunk: type) -> Responses:
    """FastAPI's ``responses`` of a route that generates text."""
    events = {"schema": {"$ref": SCHEMA.format(model=chunk.__name__)}}
    text = "The answer; with stream=true server-sent events, each a chunk as here, and [DONE]"
    return {200: {"model": whole, "description": text, "content": {"text/event-stream": events}}, **refusals()}


def describe_chunks(app: FastAPI, *more: type) -> None:
    """Add the schemas of chunks and ``more`` to the description of ``app``: FastAPI adds those of whole answers."""
    describe = app.openapi

    def openapi() -> dict[str, Any]:
        description = describe()
        for chunk in (CompletionChunk, ChatChunk, *more):
            schema = TypeAdapter(chunk).json_schema(ref_template=SCHEMA, mode="serialization")
            description["components"]["schemas"] |= {**schema.pop("$defs"), chunk.__name__: schema}
        return description

    app.openapi = openapi
