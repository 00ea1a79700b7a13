"""Descriptions of responses in /openapi.json: errors by status, and chunks of streams."""

from typing import Any

from fastapi import FastAPI
from pydantic import TypeAdapter

from colonnade.serve.api.replies import ChatChunk, CompletionChunk, ErrorReply

Responses = dict[int | str, dict[str, Any]]
SCHEMA = "#/components/schemas/{model}"

_REFUSALS = {
    400: "A bad value, or more tokens than the context or the cache allows",
    401: "No API key, or an unknown one",
    403: "The API key may not do this",
    404: "No model of this name",
    413: "The body exceeds the size limit given in the message",
    429: "The queue is full, or a wait over timeout_s is expected; Retry-After says when to try again",
    500: "Non-finite logits, or a bug",
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
    text = "The response; with stream=true server-sent events, each with a chunk like this, then [DONE]"
    return {200: {"model": whole, "description": text, "content": {"text/event-stream": events}}, **refusals()}


def describe_chunks(app: FastAPI, *more: type) -> None:
    """Add the schemas of chunks and ``more`` to the description of ``app``: FastAPI adds those of whole responses."""
    describe = app.openapi

    def openapi() -> dict[str, Any]:
        description = describe()
        for chunk in (CompletionChunk, ChatChunk, *more):
            schema = TypeAdapter(chunk).json_schema(ref_template=SCHEMA, mode="serialization")
            description["components"]["schemas"] |= {**schema.pop("$defs"), chunk.__name__: schema}
        return description

    app.openapi = openapi
