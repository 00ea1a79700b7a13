"""ASGI middleware that gives each request an id, counts it, logs it and traces it.

An ``x-request-id`` of 1 to 128 letters, digits, ``_``, ``.`` and ``-`` is kept, any other is replaced by a new one; the
response has it. With ``--serve.log json`` each request is one JSON object on stderr, without any text of the client's:

    {"time": "2026-11-22T03:15:32.118Z", "id": "5f0c…", "client": "127.0.0.1", "key": null, "method": "POST",
     "route": "/v1/completions", "model": "smollm2", "status": 200, "prompt_tokens": 5, "generated_tokens": 16,
     "queue_s": 0.0004, "prefill_s": 0.0121, "decode_s": 0.2381, "total_s": 0.2531, "finish_reason": "length"}
"""

import json
import logging
import re
import time
import uuid
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from colonnade.serve.api.middleware import PROBES
from colonnade.serve.api.request_record import RequestRecord, record_of

if TYPE_CHECKING:  # needs the extra trace
    from colonnade.serve.api.tracing import Tracer

LOGGER = logging.getLogger("colonnade.requests")

_REQUEST_ID = re.compile(r"[\w.-]{1,128}", re.ASCII)


class RequestLog:
    """ASGI middleware; ``count(route, status)`` is called for each request, and with ``log`` a line is written.

    ``model`` is that of requests which name none.
    ``routes`` are those of the application: a request that is refused before it is routed is counted under its path.
    """

    def __init__(
        self,
        app: ASGIApp,
        model: str | None,
        routes: Sequence[BaseRoute],
        count: Callable[[str, int], object],
        *,
        log: bool,
        tracer: "Tracer | None" = None,
    ):
        self.app, self.model, self.routes, self.count = app, model, routes, count
        self.log, self.tracer = log, tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the application, and record its response."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        start_s, start_ns, status, record = time.monotonic(), time.time_ns(), 500, record_of(scope)
        given = Headers(scope=scope).get("x-request-id", "")
        record.model = self.model
        record.id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = record.id
            await send(message)

        try:
            await self.app(scope, receive, send_with_id)
        finally:
            route = self._route(scope)
            self.count(route, status)
            is_probe = route in PROBES and status == 200
            if self.tracer and not is_probe:
                self.tracer.record(scope, record, route, status, start_ns, time.time_ns())
            if self.log and not is_probe:
                LOGGER.info(json.dumps(self._line(scope, record, route, status, time.monotonic() - start_s)))

    def _route(self, scope: Scope) -> str:
        """The pattern of the path; empty for an unknown path, so that clients cannot add labels to metrics."""
        if route := getattr(scope.get("route"), "path", ""):
            return route
        return scope["path"] if any(getattr(each, "path", None) == scope["path"] for each in self.routes) else ""

    def _line(self, scope: Scope, record: RequestRecord, route: str, status: int, total_s: float) -> dict[str, Any]:
        times = {
            name: round(max(getattr(timing, name) for timing in record.timings), 6) if record.timings else None
            for name in ("queue_s", "prefill_s", "decode_s")
        }
        return {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "id": record.id,
            "client": (scope.get("client") or ("",))[0],
            "key": record.key and record.key.key.name,
            "method": scope["method"],
            "route": route,
            "model": record.model,
            "status": status,
            "prompt_tokens": sum(record.prompt_tokens.values()),
            "generated_tokens": sum(record.generated_tokens.values()),
            **times,
            "total_s": round(total_s, 6),
            "finish_reason": ",".join(sorted(set(record.finish_reasons.values()))) or None,
        }
