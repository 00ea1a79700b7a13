"""ASGI middleware that repeats a share of the requests at another server, and logs comparisons of the responses.

    answer sent -> bounded queue -> the shadow's answer -> a line of --serve.shadow_log
                   full: dropped    dead, late: counted     (colonnade.serve.shadow_comparison)

No client ever waits for the shadow. A request without a seed gets one before it runs, so that both servers draw the
same tokens. Requests that come from a shadow are not repeated.
"""

import asyncio
import contextlib
import json
import random
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from colonnade.config import ServeConfig
from colonnade.errors import ConfigError
from colonnade.serve.api.disconnect import CLIENT_CLOSED_REQUEST
from colonnade.serve.api.request_record import record_of
from colonnade.serve.ipc import to_thread_if_large
from colonnade.serve.shadow_comparison import UNREADABLE, Comparison, compare

if TYPE_CHECKING:  # of the extra 'serve'; servers without a shadow do not need it
    import httpx

HEADER = "x-colonnade-shadow"

GENERATION_ROUTES = frozenset({"/v1/completions", "/v1/chat/completions"})

ROUTES = GENERATION_ROUTES | {
    "/v1/embeddings", "/v1/classify", "/classify", "/v1/score", "/score", "/v1/rerank", "/v2/rerank", "/rerank",
}  # fmt: skip

MAX_ANSWER_BYTES = 4 << 20
"""Longer responses are not compared [bytes]."""

NOT_COMPARED = frozenset({429, CLIENT_CLOSED_REQUEST, 503, 504})
"""Statuses that depend on the load, or on the client, and not on the request."""

MAX_QUEUED = 256
MAX_QUEUED_BYTES = 64 << 20
"""Requests that wait for the shadow, and the bytes of these and of their responses."""

SENDERS = 8
"""Maximum number of concurrent requests to the shadow."""

CONNECT_S = 5.0
ANSWER_S = 300.0
"""Time for a connection to the shadow, and for its whole response [s]."""


@dataclass(frozen=True)
class _Answered:
    """A request that has been answered."""

    id: str
    path: str
    content_type: str
    body: bytes
    status: int
    answer: bytes
    latency_s: float

    @property
    def size(self) -> int:
        return len(self.body) + len(self.answer)


class Shadow:
    """The other server, and the requests that wait for it. Raises :class:`ConfigError` if the log cannot be written."""

    def __init__(self, config: ServeConfig):
        if config.shadow is None or config.shadow_log is None:
            raise ConfigError("--serve.shadow and --serve.shadow_log must be used together; set both or neither")
        self.url, self.share, self._key = config.shadow.rstrip("/"), config.shadow_share, config.upstream_key
        self.log = Path(config.shadow_log)
        try:
            with self.log.open("a"):
                pass
        except OSError as error:
            raise ConfigError(
                f"--serve.shadow_log {self.log}: {error.strerror}; use a file that can be appended to"
            ) from None
        self.count: Callable[[str], object] = lambda _result: None
        """Called with "compared", "unanswered" or "dropped" for each request."""
        self._waiting: asyncio.Queue[_Answered] = asyncio.Queue(MAX_QUEUED)
        self._waiting_bytes = 0
        self._senders: list[asyncio.Task[None]] = []

    def add(self, answered: _Answered) -> None:
        """Queue a request, or drop it if too many wait."""
        if self._waiting.full() or self._waiting_bytes + answered.size > MAX_QUEUED_BYTES:
            self.count("dropped")
            return
        self._waiting_bytes += answered.size
        self._waiting.put_nowait(answered)
        if not self._senders:
            self._senders = [asyncio.create_task(self._send_all()) for _ in range(SENDERS)]

    async def close(self) -> None:
        """Drop the waiting requests."""
        for task in self._senders:
            task.cancel()
        await asyncio.gather(*self._senders, return_exceptions=True)

    async def _send_all(self) -> None:
        import httpx

        async with httpx.AsyncClient(timeout=httpx.Timeout(ANSWER_S, connect=CONNECT_S), trust_env=False) as http:
            while True:
                answered = await self._waiting.get()
                comparison = await self._compare(answered, http)
                self._waiting_bytes -= answered.size
                self.count("unanswered" if comparison["shadow_status"] is None else "compared")
                await asyncio.to_thread(self._write, json.dumps(comparison))

    def _write(self, line: str) -> None:
        with contextlib.suppress(OSError), self.log.open("a") as file:  # a full disk must not stop the server
            file.write(f"{line}\n")

    async def _compare(self, it: _Answered, http: "httpx.AsyncClient") -> Comparison:
        start_s = time.monotonic()
        status, answer = await self._ask(it, http)
        result: Comparison = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "id": it.id, "route": it.path, "status": it.status, "shadow_status": status,
            "latency_s": round(it.latency_s, 4), "shadow_latency_s": round(time.monotonic() - start_s, 4),
        }  # fmt: skip
        if status == it.status == 200:
            try:
                result |= await to_thread_if_large(len(answer) + len(it.answer), compare, it.answer, answer)
            except UNREADABLE:
                result["shadow_status"] = None
        return result

    async def _ask(self, it: _Answered, http: "httpx.AsyncClient") -> tuple[int | None, bytes]:
        """(status, response) of the shadow; the status is None if it does not respond, or never ends."""
        import httpx

        headers = {"content-type": it.content_type, "x-request-id": it.id, HEADER: "1"}
        if self._key is not None:
            headers["authorization"] = f"Bearer {self._key}"
        answer = bytearray()
        try:
            async with asyncio.timeout(ANSWER_S):
                async with http.stream("POST", self.url + it.path, content=it.body, headers=headers) as reply:
                    async for piece in reply.aiter_bytes():
                        answer += piece
                        if len(answer) > MAX_ANSWER_BYTES:
                            return None, b""
                    return reply.status_code, bytes(answer)
        except (httpx.HTTPError, TimeoutError):
            return None, b""


class ShadowRequests:
    """ASGI middleware around the application; inside of the one that limits bodies."""

    def __init__(self, app: ASGIApp, shadow: Shadow):
        self.app, self.shadow = app, shadow

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the application, and afterwards queue the request for the shadow."""
        if scope["type"] != "http" or not self._wanted(scope):
            await self.app(scope, receive, send)
            return
        start_s, first = time.monotonic(), await receive()
        body: bytes = first.get("body", b"")
        if scope["path"] in GENERATION_ROUTES:
            body = await to_thread_if_large(len(body), with_seed, body)
        replay: list[Message] = [{**first, "body": body}]
        answer, status, complete = bytearray(), 0, False

        async def receive_again() -> Message:
            return replay.pop() if replay else await receive()

        async def observe(message: Message) -> None:
            nonlocal status, complete
            await send(message)
            if message["type"] == "http.response.start":
                status = message["status"]
            elif message["type"] == "http.response.body":
                if len(answer) <= MAX_ANSWER_BYTES:
                    answer.extend(message.get("body", b""))
                complete = not message.get("more_body", False)

        await self.app(scope, receive_again, observe)
        if not complete or status in NOT_COMPARED or len(answer) > MAX_ANSWER_BYTES:
            return
        if answer.startswith(b"data:") and not answer.rstrip().endswith(b"[DONE]"):  # it ended with an error
            return
        content_type = Headers(scope=scope).get("content-type", "")
        latency_s = time.monotonic() - start_s
        key = record_of(scope).id
        self.shadow.add(_Answered(key, scope["path"], content_type, body, status, bytes(answer), latency_s))

    def _wanted(self, scope: Scope) -> bool:
        known = scope["method"] == "POST" and scope["path"] in ROUTES and HEADER not in Headers(scope=scope)
        return known and random.random() < self.shadow.share


def with_seed(body: bytes) -> bytes:
    """The body of a request with a random ``seed``, if it has none; one that is not a JSON object is unchanged."""
    try:
        values: Any = json.loads(body)
    except (ValueError, RecursionError):
        return body
    if not isinstance(values, dict) or values.get("seed") is not None:
        return body
    return json.dumps({**values, "seed": random.getrandbits(63)}).encode()


def is_own_address(url: str, listener: socket.socket) -> bool:
    """Whether ``url`` leads to ``listener``: its port at its address, or at any of this machine if it has all."""
    parts = urlsplit(url)
    host, port = listener.getsockname()[:2]
    if (parts.port or {"https": 443}.get(parts.scheme, 80)) != port:
        return False
    try:
        found = socket.getaddrinfo(parts.hostname, port, type=socket.SOCK_STREAM)
    except OSError:  # an unknown host is a dead shadow
        return False
    return any(
        address[0] == host or (host in ("0.0.0.0", "::") and _is_local(kind, address)) for kind, *_, address in found
    )


def _is_local(family: int, address: tuple[Any, ...]) -> bool:
    """Whether this machine has the address: only its own can be bound."""
    with socket.socket(family, socket.SOCK_DGRAM) as trial:
        try:
            trial.bind((address[0], 0))
        except OSError:
            return False
    return True
