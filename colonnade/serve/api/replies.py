"""The JSON objects of all answers, in OpenAI's format: what is sent is what /openapi.json describes.

They are TypedDicts: a type checker verifies their fields, pydantic derives the description and writes the JSON. That
takes 1.5 µs for a chunk of a stream; pydantic's models take 6.3, ``json.dumps`` 4.2.
"""

import time
import uuid
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NotRequired

from fastapi import FastAPI
from pydantic import ConfigDict, TypeAdapter, with_config
from typing_extensions import TypedDict

from colonnade.serve.request import Output

FinishReason = Literal["stop", "length"]
"""stop: an end token or a stop string. length: max_tokens or the context."""


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


class TokenUsage(Reply):
    """Tokens of all completions of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class ReplyBase(Reply):
    """The fields with which all answers begin."""

    id: str
    created: int
    model: str


class CompletionChoice(Reply):
    """The continuation of one prompt, or a piece of it."""

    index: int
    text: str
    logprobs: None
    finish_reason: FinishReason | None


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


class AssistantMessage(Reply):
    """The model's message."""

    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(Reply):
    """The answer."""

    index: int
    message: AssistantMessage
    logprobs: None
    finish_reason: FinishReason | None


class ChatReply(ReplyBase):
    """POST /v1/chat/completions."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: TokenUsage


class Delta(Reply):
    """What is new: the role first, then text."""

    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str]


class ChatChunkChoice(Reply):
    """A piece of the answer."""

    index: int
    delta: Delta
    logprobs: None
    finish_reason: FinishReason | None


class ChatChunk(ReplyBase):
    """One event of its stream; ``usage`` only if stream_options asks for it."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: NotRequired[TokenUsage | None]


class ModelCard(Reply):
    """The model that is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: Literal["colonnade"]
    max_model_len: int
    """Tokens that a request may have, prompt and output: the model's context, or what the cache holds of it."""


class ModelList(Reply):
    """GET /v1/models."""

    object: Literal["list"]
    data: list[ModelCard]


class Health(Reply):
    """Liveness: only "ok" comes with status 200, also while the server loads its model or drains."""

    status: Literal["ok", "engine failed"]


class Readiness(Reply):
    """Whether new requests are accepted: only "ready" comes with status 200."""

    status: Literal["ready", "loading", "draining", "queue full", "engine failed"]


@dataclass
class Usage:
    """Counts the tokens of all completions of one request."""

    prompt: dict[int, int] = field(default_factory=dict)
    generated: dict[int, int] = field(default_factory=dict)

    def add(self, index: int, output: Output) -> None:
        """Record the newest output of completion ``index``."""
        self.prompt[index], self.generated[index] = output.prompt_tokens, output.generated_tokens

    def reply(self) -> TokenUsage:
        """The totals."""
        prompt, generated = sum(self.prompt.values()), sum(self.generated.values())
        return {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}


class CompletionReplies:
    """Builds the answer to one request of /v1/completions."""

    prefix: ClassVar = "cmpl"

    def __init__(self, model: str):
        self._base: ReplyBase = {
            "id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model,
        }  # fmt: skip

    def whole(self, texts: list[str], reasons: list[FinishReason], usage: Usage) -> CompletionReply | ChatReply:
        """The complete answer."""
        choices = [_completion_choice(i, *choice) for i, choice in enumerate(zip(texts, reasons, strict=True))]
        return {**self._base, "object": "text_completion", "choices": choices, "usage": usage.reply()}

    def first_chunk(self, index: int) -> CompletionChunk | ChatChunk | None:
        """The chunk before the first text, if there is one."""
        return None

    def chunk(self, index: int, text: str, reason: FinishReason | None) -> CompletionChunk | ChatChunk:
        """New text, or the end."""
        return {**self._base, "object": "text_completion", "choices": [_completion_choice(index, text, reason)]}

    def usage_chunk(self, usage: Usage) -> CompletionChunk | ChatChunk:
        """The last chunk, with only the usage."""
        return {**self._base, "object": "text_completion", "choices": [], "usage": usage.reply()}


class ChatReplies(CompletionReplies):
    """Builds the answer to one request of /v1/chat/completions."""

    prefix: ClassVar = "chatcmpl"

    def whole(self, texts: list[str], reasons: list[FinishReason], usage: Usage) -> ChatReply:
        """The complete answer."""
        choices: list[ChatChoice] = []
        for index, (text, reason) in enumerate(zip(texts, reasons, strict=True)):
            message: AssistantMessage = {"role": "assistant", "content": text, "refusal": None}
            choices.append({"index": index, "message": message, "logprobs": None, "finish_reason": reason})
        return {**self._base, "object": "chat.completion", "choices": choices, "usage": usage.reply()}

    def first_chunk(self, index: int) -> ChatChunk:
        """The role."""
        return self._chunk(index, {"role": "assistant", "content": ""}, None)

    def chunk(self, index: int, text: str, reason: FinishReason | None) -> ChatChunk:
        """New text, or the end."""
        return self._chunk(index, {"content": text} if text else {}, reason)

    def usage_chunk(self, usage: Usage) -> ChatChunk:
        """The last chunk, with only the usage."""
        return {**self._base, "object": "chat.completion.chunk", "choices": [], "usage": usage.reply()}

    def _chunk(self, index: int, delta: Delta, reason: FinishReason | None) -> ChatChunk:
        choice: ChatChunkChoice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}
        return {**self._base, "object": "chat.completion.chunk", "choices": [choice]}


def _completion_choice(index: int, text: str, reason: FinishReason | None) -> CompletionChoice:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": reason}


# -- /openapi.json -----------------------------------------------------------------------------------------------------

Responses = dict[int | str, dict[str, Any]]
SCHEMA = "#/components/schemas/{model}"

_REFUSALS = {
    400: "A bad value, or more tokens than the context or the cache allows",
    404: "No model of this name",
    413: "A body over --serve.max_body_bytes",
    429: "The queue is full; Retry-After says when to try again",
    500: "The model's logits were not finite, or a bug",
    503: "The server is loading or stopping, or its engine died; Retry-After says when to try again",
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


def describe_chunks(app: FastAPI) -> None:
    """Add the chunks' schemas to the description of ``app``: FastAPI only adds those of whole answers."""
    describe = app.openapi

    def openapi() -> dict[str, Any]:
        description = describe()
        for chunk in (CompletionChunk, ChatChunk):
            schema = TypeAdapter(chunk).json_schema(ref_template=SCHEMA, mode="serialization")
            description["components"]["schemas"] |= {**schema.pop("$defs"), chunk.__name__: schema}
        return description

    app.openapi = openapi
