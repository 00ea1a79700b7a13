"""Descriptions of responses in /openapi.json: errors by status, and the events of streams."""

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


def completion_responses(whole: type, chunk: type) -> Responses:
    """FastAPI's ``responses`` of a completion route: ``whole`` as JSON, or events with chunks and then [DONE]."""
    text = "The response; with stream=true server-sent events, each with a chunk, then [DONE]"
    data = {"anyOf": [{"const": "[DONE]"}, _json_text(chunk, ErrorReply)]}
    return _generation_responses(whole, text, {"data": data})


def typed_event_responses(whole: type, event: type) -> Responses:
    """FastAPI's ``responses`` of a route whose events have a type: ``whole`` as JSON, or events of ``event``."""
    text = "The response; with stream=true server-sent events, whose names are the types of their data"
    return _generation_responses(whole, text, {"event": {"type": "string"}, "data": _json_text(event)})


def _json_text(*models: type) -> dict[str, Any]:
    """The schema of a string that contains the JSON of one of ``models``."""
    choices = [{"$ref": SCHEMA.format(model=model.__name__)} for model in models]
    content = choices[0] if len(choices) == 1 else {"anyOf": choices}
    return {"type": "string", "contentMediaType": "application/json", "contentSchema": content}


def _generation_responses(whole: type, text: str, fields: dict[str, Any]) -> Responses:
    # As OpenAPI 3.2 describes a stream, and FastAPI its own: itemSchema is for one event, with the fields of its text.
    event = {"type": "object", "required": list(fields), "properties": fields}
    content = {"text/event-stream": {"itemSchema": event}}
    return {200: {"model": whole, "description": text, "content": content}, **refusals()}


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
