"""ASGI middleware that limits the size and the time of a body, and the configuration of uvicorn's access log.

The limits count the bytes that arrive, not those announced, and apply before anything parses them. The log has one line
per request on stderr, with the route and the status but never a prompt or a completion:

    2026-11-22 03:15:32,118 127.0.0.1:53406 "POST /v1/chat/completions HTTP/1.1" 200 OK
"""

import asyncio
import json
import logging
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from colonnade.errors import RequestError
from colonnade.serve.api.connection import ConnectionLimits
from colonnade.serve.api.errors import HINTS, error_reply

MAX_READ_RATIO = 8
"""A body over the limit is read and dropped up to this multiple of it: a client that is disconnected while writing
would see a broken connection instead of the error."""


class BodyLimit:
    """ASGI middleware: 413 for a body over ``max_bytes``, 408 for one that does not arrive within ``limits``.

    And 429 if the bodies of all unanswered requests would exceed ``max_held_bytes``.
    """

    def __init__(self, app: ASGIApp, max_bytes: int, limits: ConnectionLimits, max_held_bytes: int | None = None):
        self.app, self.max_bytes, self.limits, self.max_held_bytes = app, max_bytes, limits, max_held_bytes
        self.held_bytes = 0
        """Bytes of the bodies of all unanswered requests, including those still arriving."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the body, then call the application with it."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        body, held = bytearray(), 0
        try:
            more, refusal = await self._read(body, receive)
            if refusal is not None:
                await self._refuse(refusal, more, scope, receive, send)
                return
            if more:  # the client has gone
                return
            held = len(body)
            first: list[Message] = [{"type": "http.request", "body": bytes(body), "more_body": False}]
            body.clear()

            async def replay() -> Message:
                return first.pop() if first else await receive()

            await self.app(scope, replay, send)
        finally:
            self.held_bytes -= held or len(body)

    async def _read(self, body: bytearray, receive: Receive) -> tuple[bool, RequestError | None]:
        """Fill ``body``; returns (whether more of it is to come, why it is refused)."""
        seen, more, full = 0, True, None
        start_s, limit_s = asyncio.get_running_loop().time(), self.limits.body_s
        try:
            async with asyncio.timeout_at(start_s + limit_s) as clock:
                while more and seen <= MAX_READ_RATIO * self.max_bytes:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return True, None
                    seen += len(message.get("body", b""))
                    if seen <= self.max_bytes:
                        full = full or self._hold(body, message.get("body", b""))
                        limit_s = self.limits.body_s + seen / self.limits.body_bytes_per_s
                        clock.reschedule(start_s + limit_s)
                    more = message.get("more_body", False)
        except TimeoutError:
            return more, _slow_body(seen, limit_s)
        if seen > self.max_bytes:
            return more, RequestError(
                f"the body has {seen:,} bytes or more; send at most {self.max_bytes:,}",
                status=413,
                code="body_too_large",
                operator_hint="raise --serve.max_body_bytes for larger bodies",
            )
        return more, full

    def _hold(self, body: bytearray, part: bytes) -> RequestError | None:
        """Append ``part`` to ``body``; if there is no room for it, empty ``body`` and return the refusal."""
        if self.max_held_bytes is not None and self.held_bytes + len(part) > self.max_held_bytes:
            self.held_bytes -= len(body)
            body.clear()
            return RequestError(
                f"the queue is full: bodies of {self.held_bytes:,} bytes are already waiting, of at most "
                f"{self.max_held_bytes:,}; try again later",
                status=429,
                code="queue_full",
            )
        self.held_bytes += len(part)
        body += part
        return None

    @staticmethod
    async def _refuse(error: RequestError, more: bool, scope: Scope, receive: Receive, send: Send) -> None:
        """Respond with ``error``; close the connection if ``more`` of the body is to come."""
        reply = error_reply(error)
        if more:
            reply.headers["connection"] = "close"
        await reply(scope, receive, send)


def _slow_body(seen: int, limit_s: float) -> RequestError:
    return RequestError(
        f"only {seen} bytes of the body arrived in {limit_s:g} s; send all of it at once",
        status=408,
        code="request_timeout",
    )


def cors_options(origins: Sequence[str]) -> dict[str, Any]:
    """Arguments of Starlette's CORSMiddleware that allow ``origins`` to use every route, without cookies."""
    limits = (f"x-ratelimit-{what}-{of}" for what in ("limit", "remaining", "reset") for of in ("requests", "tokens"))
    return {
        "allow_origins": list(origins),
        "allow_methods": ["GET", "HEAD", "POST"],
        "allow_headers": ["*"],
        "expose_headers": ["x-request-id", "retry-after", *limits],
    }


PROBES = ("/health", "/ready", "/metrics")
"""Routes that monitoring requests every few seconds; only failures are logged."""


class ProbeFilter(logging.Filter):
    """Drops successful probes."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether uvicorn's ``record`` (client, method, path, version, status) is shown."""
        if not isinstance(record.args, tuple):
            return True
        *_, path, _version, status = record.args
        return path not in PROBES or status != 200


ACCESS_LOG: dict[str, Any] = {
    "version": 1,
    "disable_existing_loggers": False,
    "filters": {"probes": {"()": ProbeFilter}},
    "formatters": {
        "plain": {"format": "%(asctime)s %(message)s"},
        "access": {
            "()": "uvicorn.logging.AccessFormatter",
            "fmt": '%(asctime)s %(client_addr)s "%(request_line)s" %(status_code)s',
            "use_colors": False,
        },
    },
    "handlers": {
        "access": {"class": "logging.StreamHandler", "formatter": "access", "filters": ["probes"]},
        "hints": {"class": "logging.StreamHandler", "formatter": "plain"},
    },
    "loggers": {
        "uvicorn.access": {"handlers": ["access"], "level": "INFO", "propagate": False},
        HINTS.name: {"handlers": ["hints"], "level": "INFO", "propagate": False},
        "colonnade.serve.admin": {"handlers": ["hints"], "level": "INFO", "propagate": False},
    },
}
"""Configuration for :func:`logging.config.dictConfig`: uvicorn's lines."""


class JsonFormatter(logging.Formatter):
    """Writes a record as a JSON object with its time and message."""

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        return json.dumps({"time": time.replace("+00:00", "Z"), "message": record.getMessage()})


JSON_LOG: dict[str, Any] = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {"json": {"()": JsonFormatter}},
    "handlers": {
        "requests": {"class": "logging.StreamHandler"},
        "admin": {"class": "logging.StreamHandler", "formatter": "json"},
    },
    "loggers": {
        "colonnade.requests": {"handlers": ["requests"], "level": "INFO", "propagate": False},
        "colonnade.serve.admin": {"handlers": ["admin"], "level": "INFO", "propagate": False},
    },
}
"""The same for the lines of :mod:`colonnade.serve.api.request_log`."""
