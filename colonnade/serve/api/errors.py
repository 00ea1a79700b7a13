"""Errors in OpenAI's shape: ``{"error": {"message", "type", "param", "code"}}``, for every way a request can fail."""

import json
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from colonnade.errors import RequestError

TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}
"""OpenAI's error type by status; the rest are the client's fault."""

LONGEST_SHOWN = 80
"""Characters of a value that a message tells."""

RETRY_AFTER_S = 1
"""When to ask again after a 429 [s]."""


def error_body(error: RequestError) -> dict[str, Any]:
    """``error`` as clients know it; also what a stream says when it fails midway."""
    kind = TYPES.get(error.status, "invalid_request_error")
    return {"error": {"message": str(error), "type": kind, "param": error.param, "code": error.code}}


def error_reply(error: RequestError) -> JSONResponse:
    """The response that refuses a request."""
    headers = {"Retry-After": str(RETRY_AFTER_S)} if error.status == 429 else None
    return JSONResponse(error_body(error), status_code=error.status, headers=headers)


def install(app: FastAPI) -> None:
    """Give every error of ``app`` this shape."""

    @app.exception_handler(RequestError)
    async def refused(_request: Request, error: RequestError) -> JSONResponse:
        return error_reply(error)

    @app.exception_handler(RequestValidationError)
    async def malformed(request: Request, error: RequestValidationError) -> JSONResponse:
        return error_reply(_first_fault(error, request.headers.get("content-type", "")))

    @app.exception_handler(HTTPException)
    async def elsewhere(request: Request, error: HTTPException) -> JSONResponse:
        if error.status_code == 400 and error.__cause__ is not None:
            return error_reply(_unreadable(error.__cause__))
        allowed = (error.headers or {}).get("Allow")
        remedy = f"use {allowed}" if allowed else "/openapi.json lists what there is, under /v1 first of all"
        what = f"{request.method} {request.url.path}: {error.detail.lower()}; {remedy}"
        return error_reply(RequestError(what, status=error.status_code))

    @app.exception_handler(Exception)
    async def bug(_request: Request, error: Exception) -> JSONResponse:
        return error_reply(RequestError(f"internal error ({type(error).__name__})", status=500, code="server_error"))


def quoted(value: object) -> str:
    """``value`` of a request as a message tells it: numbers and words as in JSON, text quoted, the long cut off."""
    if isinstance(value, list | dict):
        return f"a list of {len(value)}" if isinstance(value, list) else "an object"
    told = repr(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else json.dumps(value)
    return told if len(told) <= LONGEST_SHOWN else f"{told[:LONGEST_SHOWN]}…"


def _unreadable(cause: BaseException) -> RequestError:
    """What a body's parser choked on, other than JSON's grammar."""
    if isinstance(cause, UnicodeDecodeError):
        byte = f"0x{cause.object[cause.start]:02x}"
        what = f"is not {cause.encoding.upper()}: {cause.reason} ({byte}) at byte {cause.start}; send JSON in UTF-8"
    elif isinstance(cause, RecursionError):
        what = "nests lists or objects deeper than can be read; nothing here takes more than a few levels"
    else:
        what = f"cannot be read: {str(cause).partition(';')[0].lower()}"
    return RequestError(f"the body {what}", code="invalid_json")


def _first_fault(report: RequestValidationError, content_type: str) -> RequestError:
    """Pydantic's first complaint in one line, with the field's name as ``param``."""
    if "json" not in content_type:
        return RequestError(
            f"the body came as '{content_type[:80]}'; send JSON with the header 'content-type: application/json'",
            code="invalid_body",
        )
    fault = report.errors()[0]
    path = [str(step) for step in fault["loc"] if step != "body"]
    if fault["type"] == "json_invalid":
        reason = fault.get("ctx", {}).get("error", "")
        return RequestError(f"the body is not valid JSON: {reason} at character {path[0]}", code="invalid_json")
    if not path:
        return RequestError(f"the body must be a JSON object: {fault['msg'].lower()}", code="invalid_body")
    where = ".".join(path)
    if fault["type"] == "missing":
        return RequestError(f"'{where}' is missing", param=path[0])
    return RequestError(f"{where} is {quoted(fault['input'])}: {fault['msg'].lower()}", param=path[0])
