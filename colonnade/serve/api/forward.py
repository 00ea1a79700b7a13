"""ASGI middleware that forwards requests to upstreams; the application serves probes and metrics.

Bodies and responses are forwarded unchanged. If an upstream fails before any part of its response has been sent to the
client, the request goes to another one; a stream that has begun ends with an error event, since another server cannot
continue it.
"""

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import httpx
from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from colonnade.errors import RequestError
from colonnade.serve.api.auth import check_allowed
from colonnade.serve.api.disconnect import unless_disconnected
from colonnade.serve.api.errors import error_body, error_reply
from colonnade.serve.api.request_record import record_of
from colonnade.serve.api.shadow import GENERATION_ROUTES, ROUTES
from colonnade.serve.ipc import to_thread_if_large
from colonnade.serve.router import text_bytes
from colonnade.serve.upstreams import Upstreams

FORWARDED = {
    "POST": ROUTES | {"/tokenize", "/detokenize"},
    "GET": frozenset({"/v1/models", "/tokenizer_info"}),
}
"""Paths by method; ``/v1/models/NAME`` too."""

RETRIED_STATUSES = frozenset({429, 503})
"""Statuses of an upstream that does not take the request: another one may."""

UPSTREAM_FAILED = RequestError(
    "the server that generated this response failed; send the request again", status=503, code="engine_failed"
)


@dataclass(frozen=True)
class _Route:
    """The attributes of a route that the request log and the metrics read."""

    path: str


class ForwardRequests:
    """ASGI middleware; ``forward_keys`` forwards the clients' API keys, unless the upstreams have their own.

    The keys here must allow ``model``.
    """

    def __init__(self, app: ASGIApp, upstreams: Upstreams, model: str, *, forward_keys: bool):
        self.app, self.upstreams, self.model, self.forward_keys = app, upstreams, model, forward_keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward the request, or call the application with it."""
        path = _pattern(scope) if scope["type"] == "http" else None
        if path is None:
            await self.app(scope, receive, send)
            return
        scope["route"] = _Route(path)
        request = Request(scope, receive)
        try:
            async with AsyncExitStack() as running:
                running.enter_context(self.upstreams.request())
                body = await request.body()
                if scope["method"] == "POST":
                    check_allowed(scope, self.model)
                prompt = await to_thread_if_large(len(body), prompt_of, body) if path in GENERATION_ROUTES else b""
                response = await unless_disconnected(request, self._forward(request, body, prompt, running))
                await response(scope, receive, send)
        except RequestError as error:
            await error_reply(error)(scope, receive, send)

    async def _forward(self, request: Request, body: bytes, prompt: bytes, running: AsyncExitStack) -> Response:
        """The response of the first upstream that returns one; the connection of a stream is closed with
        ``running``.
        """
        upstreams, tried = self.upstreams, set[int]()
        refusal: Response | None = None
        while True:
            left = [i for i in upstreams.up if i not in tried]
            if not left:
                if refusal is not None:
                    return refusal
                raise UPSTREAM_FAILED if tried else upstreams.unavailable()
            upstream = upstreams.router.choose(prompt, left)
            tried.add(upstream)
            async with AsyncExitStack() as connection:
                connection.callback(upstreams.router.end, upstream)
                try:
                    async with upstreams.limit(upstream):
                        reply = await self._open(upstream, request, body)
                        connection.push_async_callback(reply.aclose)
                        pieces = reply.aiter_raw() if _is_stream(reply) else None
                        begin = await reply.aread() if pieces is None else await anext(pieces, b"")
                except (httpx.HTTPError, TimeoutError):
                    continue
                if pieces is not None:
                    running.push_async_exit(connection.pop_all())
                    events = self._events(upstream, begin, pieces)
                    return StreamingResponse(events, reply.status_code, _headers(reply))
                response = Response(begin, reply.status_code, _headers(reply))
                if reply.status_code not in RETRIED_STATUSES:
                    return response
                refusal = response

    async def _open(self, upstream: int, request: Request, body: bytes) -> httpx.Response:
        """Send the request; returns when the status has arrived."""
        headers = {"x-request-id": record_of(request.scope).id, "accept-encoding": "identity"}
        if request.client:
            headers["x-forwarded-for"] = request.client.host
        for name in ("content-type", "traceparent", "x-colonnade-shadow"):
            if name in request.headers:
                headers[name] = request.headers[name]
        if self.upstreams.key is not None:
            headers["authorization"] = f"Bearer {self.upstreams.key}"
        elif self.forward_keys and "authorization" in request.headers:
            headers["authorization"] = request.headers["authorization"]
        url = self.upstreams.urls[upstream] + request.scope.get("raw_path", request.url.path.encode()).decode("latin-1")
        http = self.upstreams.http
        return await http.send(http.build_request(request.method, url, content=body, headers=headers), stream=True)

    async def _events(self, upstream: int, first: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """Whole lines of a stream, and an error event if it breaks off."""
        rest_of_line = b""
        try:
            async with self.upstreams.limit(upstream):
                piece = first
                while piece:
                    lines, newline, rest_of_line = (rest_of_line + piece).rpartition(b"\n")
                    if newline:
                        yield lines + newline
                    piece = await anext(rest, b"")
            if rest_of_line:
                yield rest_of_line
        except (httpx.HTTPError, TimeoutError):
            yield _error_event(UPSTREAM_FAILED)
        except RequestError as error:
            yield _error_event(error)


def prompt_of(body: bytes) -> bytes:
    """The bytes by which the router compares prompts; none if the body cannot be read: the upstream reports why."""
    try:
        values: Any = json.loads(body)
        prompt = values.get("prompt") if values.get("messages") is None else values["messages"]
        return text_bytes(prompt if isinstance(prompt, str) else json.dumps(prompt))
    except (ValueError, AttributeError, RecursionError):
        return b""


def _pattern(scope: Scope) -> str | None:
    """The pattern of the path, if its requests are forwarded."""
    path = scope["path"]
    if path in FORWARDED.get(scope["method"], ()):
        return path
    one_model = scope["method"] == "GET" and path.startswith("/v1/models/") and ".." not in path
    return "/v1/models/{name:path}" if one_model else None


def _is_stream(reply: httpx.Response) -> bool:
    return reply.headers.get("content-type", "").startswith("text/event-stream")


def _headers(reply: httpx.Response) -> dict[str, str]:
    return {name: reply.headers[name] for name in ("content-type", "retry-after") if name in reply.headers}


def _error_event(error: RequestError) -> bytes:
    return b"\ndata: " + to_json(error_body(error)) + b"\n\n"
