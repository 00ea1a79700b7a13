"""The shapes of all answers, for /openapi.json: what :mod:`~colonnade.serve.api.replies` and :mod:`errors` make is
tested against them.
"""

from typing import Any, Literal

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict
from pydantic.json_schema import models_json_schema

FinishReason = Literal["stop", "length"]
"""An end token or a stop string; max_tokens or the context."""


class Shape(BaseModel):
    """An object with these fields and no others."""

    model_config = ConfigDict(extra="forbid")


class Fault(Shape):
    """What went wrong, and which field to change."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(Shape):
    """Every refusal."""

    error: Fault


class TokenUsage(Shape):
    """Tokens of all answers of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Answered(Shape):
    """What all answers begin with."""

    id: str
    created: int
    model: str


class CompletionChoice(Shape):
    """The continuation of one prompt, or a piece of it."""

    index: int
    text: str
    logprobs: None
    finish_reason: FinishReason | None


class CompletionReply(Answered):
    """POST /v1/completions."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: TokenUsage


class CompletionChunk(Answered):
    """One event of its stream; ``usage`` only where stream_options asked for it."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: TokenUsage | None = None


class Said(Shape):
    """What the model says."""

    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(Shape):
    """The answer."""

    index: int
    message: Said
    logprobs: None
    finish_reason: FinishReason | None


class ChatReply(Answered):
    """POST /v1/chat/completions."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: TokenUsage


class Delta(Shape):
    """What came anew: the role once, then text."""

    role: Literal["assistant"] | None = None
    content: str | None = None


class ChatPiece(Shape):
    """A piece of the answer."""

    index: int
    delta: Delta
    logprobs: None
    finish_reason: FinishReason | None


class ChatChunk(Answered):
    """One event of its stream; ``usage`` only where stream_options asked for it."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatPiece]
    usage: TokenUsage | None = None


class ModelCard(Shape):
    """The model that is served."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["colonnade"] = "colonnade"
    max_model_len: int
    """Tokens that a request may have, prompt and answer: the model's context, or what the cache holds of it."""


class ModelList(Shape):
    """GET /v1/models."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class Health(Shape):
    """Whether requests are answered: only "ok" comes with status 200."""

    status: Literal["ok", "stopping", "engine failed"]


Responses = dict[int | str, dict[str, Any]]

_REFUSALS = {
    400: "A bad value, or more tokens than the context or the cache has",
    404: "No model of this name",
    413: "A body over --serve.max_body_bytes",
    429: "The queue is full; Retry-After says when to come back",
    500: "The model's logits were not finite, or a bug",
    503: "The server is stopping, or its engine died",
    "4XX": "Any other refusal",  # besides, FastAPI would add its own 422, which nobody gets
}


def refusals(*statuses: int | str) -> Responses:
    """Those of a route, for its ``responses``; of all statuses where none is named."""
    return {status: {"model": ErrorReply, "description": _REFUSALS[status]} for status in statuses or _REFUSALS}


def answers(whole: type[Shape], chunk: type[Shape]) -> Responses:
    """Of a route that generates."""
    events = {"schema": {"$ref": _place(chunk.__name__)}}
    done = "The answer; with stream=true server-sent events, each a chunk as here, and [DONE]"
    return {200: {"model": whole, "description": done, "content": {"text/event-stream": events}}, **refusals()}


def describe_chunks(app: FastAPI) -> None:
    """Let the description of ``app`` define what :func:`answers` points to: FastAPI looks at whole answers only."""
    describe = app.openapi

    def openapi() -> dict[str, Any]:
        description = describe()
        chunks = [(chunk, "serialization") for chunk in (CompletionChunk, ChatChunk)]
        _, more = models_json_schema(chunks, ref_template=_place("{model}"))  # pyright: ignore[reportArgumentType]
        description["components"]["schemas"].update(more["$defs"])
        return description

    app.openapi = openapi


def _place(name: str) -> str:
    return f"#/components/schemas/{name}"
