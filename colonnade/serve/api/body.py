"""Reads request bodies: JSON in UTF-8 to a validated :class:`~colonnade.serve.api.request_schemas.Body`.

Large bodies are parsed and validated in a thread, so that the event loop can serve other clients.
"""

import inspect
import json
from collections.abc import Awaitable, Callable
from email.message import Message
from typing import TypeVar

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError

from colonnade.serve.api.errors import content_type_error, unreadable_body, validation_error
from colonnade.serve.client_json import check_json
from colonnade.serve.ipc import to_thread_if_large

Parsed = TypeVar("Parsed", bound=BaseModel)


class BodyRoute(APIRoute):
    """A route with an endpoint that may take ``(body, request)``, with the body read by :func:`parse_body`."""

    def get_route_handler(self) -> Callable[[Request], Awaitable[Response]]:  # type: ignore[override]
        """FastAPI calls the result with each request."""
        endpoint = self.endpoint
        body = inspect.signature(endpoint).parameters.get("body")
        if body is None:
            return super().get_route_handler()
        schema: type[BaseModel] = body.annotation

        async def handle(request: Request) -> Response:
            content_type = request.headers.get("content-type", "")
            raw = await request.body()
            return await endpoint(await to_thread_if_large(len(raw), parse_body, schema, raw, content_type), request)

        return handle


def parse_body(schema: type[Parsed], raw: bytes, content_type: str) -> Parsed:
    """The body ``raw`` as a ``schema``; raises :class:`~colonnade.errors.RequestError` (400) with what is wrong."""
    if not _is_json(content_type):
        raise content_type_error(content_type)
    try:
        text = raw.decode(json.detect_encoding(raw))
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise unreadable_body(error) from None
    check_json(text, values)
    try:
        return schema.model_validate(values)
    except ValidationError as error:
        raise validation_error(error) from None


def _is_json(content_type: str) -> bool:
    header = Message()
    header["content-type"] = content_type
    subtype = header.get_content_subtype()
    return header.get_content_maintype() == "application" and (subtype == "json" or subtype.endswith("+json"))
