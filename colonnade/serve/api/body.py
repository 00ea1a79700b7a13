"""Reads request bodies: JSON in UTF-8 to a validated :class:`~colonnade.serve.api.request_schemas.Body`.

Large bodies are parsed and validated in a thread, so that the event loop goes on answering other clients.
"""

import inspect
import json
import re
from collections.abc import Awaitable, Callable
from email.message import Message
from typing import TypeVar

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError

from colonnade.errors import RequestError
from colonnade.serve.api.errors import content_type_error, unreadable_body, validation_error
from colonnade.serve.ipc import to_thread_if_large

Parsed = TypeVar("Parsed", bound=BaseModel)

_ESCAPED_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_SURROGATE = re.compile("[\ud800-\udfff]")


class BodyRoute(APIRoute):
    """A route whose endpoint may take ``(body, request)``, with the body read by :func:`parse_body`."""

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
    """The body ``raw`` as a ``schema``; raises :class:`RequestError` (400) with what is wrong."""
    if not _is_json(content_type):
        raise content_type_error(content_type)
    try:
        text = raw.decode(json.detect_encoding(raw))
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise unreadable_body(error) from None
    if _ESCAPED_SURROGATE.search(text):
        check_unicode(values)
    try:
        return schema.model_validate(values)
    except ValidationError as error:
        raise validation_error(error) from None


def check_unicode(values: object) -> None:
    """Raise :class:`RequestError` if a string or a field's name anywhere in ``values`` has a lone surrogate."""
    stack: list[tuple[tuple[str, ...], object]] = [((), values)]
    while stack:
        path, value = stack.pop()
        if isinstance(value, str):
            _check_text(value, ".".join(path) or "the body", path)
        elif isinstance(value, list):
            stack += [((*path, str(i)), each) for i, each in enumerate(value) if isinstance(each, str | list | dict)]
        elif isinstance(value, dict):
            for name, each in value.items():
                _check_text(name, f"the name of a field in {'.'.join(path) or 'the body'}", path)
                stack.append(((*path, name), each))


def _check_text(text: str, where: str, path: tuple[str, ...]) -> None:
    if not text.isascii() and (found := _SURROGATE.search(text)):
        raise RequestError(
            f"{where[:80]} has the lone surrogate U+{ord(found.group()):04X} at character {found.start()}, which is no "
            "character; send both halves of the pair, or the character itself in UTF-8",
            param=path[0][:80] if path else None,
            code="invalid_unicode",
        )


def _is_json(content_type: str) -> bool:
    header = Message()
    header["content-type"] = content_type
    subtype = header.get_content_subtype()
    return header.get_content_maintype() == "application" and (subtype == "json" or subtype.endswith("+json"))
