"""Errors in OpenAI's format, ``{"error": {"message", "type", "param", "code"}}``, for every failed request."""

import json
import logging
import math

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from colonnade.errors import RequestError
from colonnade.serve.api.replies import ErrorReply
from colonnade.serve.api.request_record import record_of

TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
"""OpenAI's error type by status; "invalid_request_error" for all others."""

MAX_VALUE_CHARACTERS = 80
"""Longer values are cut off in error messages."""

RETRY_AFTER_S = 1
"""Retry-After of a 429 and a 503 if the time is not known [s]."""


HINTS = logging.getLogger("colonnade.serve.hints")
"""Logger of settings that would have avoided a refusal: logged once for each kind of refusal, and never sent to
clients."""
HINTS.addHandler(logging.NullHandler())  # without it, a server that logs nothing would print them

_hinted: set[str | None] = set()
"""Codes of the refusals with a hint that has been logged."""


def error_body(error: RequestError) -> ErrorReply:
    """The JSON object for ``error``; also sent in a stream that fails midway."""
    if error.operator_hint and error.code not in _hinted:
        _hinted.add(error.code)
        HINTS.info("refused (%s, logged once): %s", error.code, error)
    kind = TYPES.get(error.status, "invalid_request_error")
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}


def error_reply(error: RequestError) -> JSONResponse:
    """The response that refuses a request."""
    wait_s = RETRY_AFTER_S if error.retry_after_s is None else max(1, math.ceil(error.retry_after_s))
    headers = {"Retry-After": str(wait_s)} if error.status in (429, 503) else {}
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(error_body(error), status_code=error.status, headers=headers)


def install(app: FastAPI) -> None:
    """Make ``app`` report every error in this format."""

    @app.exception_handler(RequestError)
    async def request_error(_request: Request, error: RequestError) -> JSONResponse:
        return error_reply(error)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> JSONResponse:
        allowed = (error.headers or {}).get("Allow")
        remedy = f"use {allowed}" if allowed else "/openapi.json lists the routes; OpenAI's are under /v1"
        what = f"{request.method} {request.url.path}: {error.detail.lower()}; {remedy}"
        reply = error_reply(RequestError(what, status=error.status_code))
        reply.headers.update(error.headers or {})
        return reply

    @app.exception_handler(Exception)
    async def internal_error(request: Request, error: Exception) -> JSONResponse:
        what = RequestError(f"internal error ({type(error).__name__})", status=500, code="server_error")
        reply = error_reply(what)
        reply.headers["x-request-id"] = record_of(request.scope).id  # this is outside of the middleware that adds it
        return reply


def format_value(value: object) -> str:
    """``value`` for an error message: numbers and literals as in JSON, text quoted, long values cut off."""
    if isinstance(value, list | dict):
        return f"a list of {len(value)}" if isinstance(value, list) else "an object"
    plain = isinstance(value, str | int | float) and not isinstance(value, bool)
    text = repr(value) if plain else json.dumps(value)
    return text if len(text) <= MAX_VALUE_CHARACTERS else f"{text[:MAX_VALUE_CHARACTERS]}…"


def content_type_error(content_type: str) -> RequestError:
    """The error for a body that is not announced as JSON."""
    return RequestError(
        f"the body came as '{content_type[:80]}'; send JSON with the header 'content-type: application/json'",
        code="invalid_body",
    )


def unreadable_body(cause: ValueError | RecursionError) -> RequestError:
    """The error for a body that cannot be parsed."""
    if isinstance(cause, json.JSONDecodeError):
        what = f"is not valid JSON: {cause.msg} at character {cause.pos}"
    elif isinstance(cause, UnicodeDecodeError):
        byte = f"0x{cause.object[cause.start]:02x}"
        what = f"is not {cause.encoding.upper()}: {cause.reason} ({byte}) at byte {cause.start}; send JSON in UTF-8"
    elif isinstance(cause, RecursionError):
        what = "nests lists or objects too deeply; no request needs more than a few levels"
    else:
        what = f"cannot be read: {str(cause).partition(';')[0].lower()}"
    return RequestError(f"the body {what}", code="invalid_json")


def validation_error(invalid: ValidationError) -> RequestError:
    """Pydantic's first error in one line, with the field's name as ``param``."""
    error = invalid.errors(include_url=False, include_context=False)[0]
    path = [str(step) for step in error["loc"]]
    if not path:
        return RequestError(f"the body is {format_value(error['input'])}; send a JSON object", code="invalid_body")
    where = ".".join(path)
    if error["type"] == "missing":
        return RequestError(f"'{where}' is missing", param=path[0])
    return RequestError(f"{where} is {format_value(error['input'])}: {error['msg'].lower()}", param=path[0])
