"""Serves a recogniser: OpenAI's realtime transcription over WebSockets.

    /v1/realtime?intent=transcription   a WebSocket (:mod:`colonnade.speech.realtime`)
    /speech                             a page with microphone and camera
    /v1/models, /health, /ready, /metrics

A key comes in the header ``authorization: Bearer KEY``, or from browsers as subprotocol
``openai-insecure-api-key.KEY``. Browsers let a page of any origin open a WebSocket, so the server checks the header
``origin``: a page must come from this server or from one of ``serve.origins``. Clients without an ``origin`` are not
browsers. Refusals before the handshake are HTTP replies: 400, 401, 403, 429, 503. A client that neither sends nor reads
is disconnected. SIGTERM or SIGINT drains: new connections get a 503, running ones have ``drain_s`` seconds to end, then
they are closed (1001).
"""

import asyncio
import importlib.util
import json
import socket
from collections.abc import Callable, Iterator, Sequence
from urllib.parse import SplitResult, urlsplit

import uvicorn
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from colonnade.config import ServeConfig
from colonnade.config.base import plural, short_repr
from colonnade.errors import Interrupted, RequestError
from colonnade.parallel.launch import STOP_SIGNALS
from colonnade.serve.api.api_keys import KeyRing, KeyState
from colonnade.serve.api.connection import ConnectionLimits, StallTimeout, connection_class
from colonnade.serve.api.errors import error_reply
from colonnade.serve.api.middleware import cors_options
from colonnade.serve.engine_process import wait_first
from colonnade.serve.http_server import GRACE_S, BackgroundServer, listen, new_event_loop, url_of
from colonnade.speech.face import has_weights
from colonnade.speech.model import SpeechModel
from colonnade.speech.page import page_routes
from colonnade.speech.pcm import require
from colonnade.speech.realtime import Event, RealtimeSession
from colonnade.speech.stream_engine import StreamEngine

MAX_MESSAGE_BYTES = 1 << 20
"""Maximum message size: 16 s of audio at 24 kHz."""
IDLE_S = 300.0
"""Time after which a client that sends nothing is disconnected [s]."""
STALL_S = 30.0
"""Time after which a client that does not read an event is disconnected [s]."""
KEY_PROTOCOL = "openai-insecure-api-key."


class SpeechServer:
    """The application and its state."""

    def __init__(
        self,
        model: SpeechModel,
        name: str,
        streams: int,
        keys: KeyRing,
        *,
        origins: Sequence[str] = (),
        metrics_prefix: str = "colonnade",
        idle_s: float = IDLE_S,
        stall_s: float = STALL_S,
        segment: int | None = None,
        lookahead: int | None = None,
        beam: int | None = None,
    ):
        self.engine = StreamEngine(model, streams, model.choose_segments(segment, lookahead), beam)
        self.name, self.keys = name, keys
        self.origins, self.idle_s, self.stall_s = origins, idle_s, stall_s
        self.draining = False
        self.sessions: dict[WebSocket, RealtimeSession] = {}
        self.counts = {"sessions": 0, "refused": 0, "audio_seconds": 0.0}
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self._registry.register(_Metrics(self, metrics_prefix))
        self.empty = asyncio.Event()
        self.empty.set()
        self.app = Starlette(
            routes=[
                WebSocketRoute("/v1/realtime", self._realtime),
                Route("/v1/models", self._models),
                Route("/health", self._health),
                Route("/ready", self._ready),
                Route("/metrics", self._metrics),
                *page_routes(),
            ],
            middleware=[Middleware(CORSMiddleware, **cors_options(origins))] if origins else [],
        )

    async def drain(self, seconds: float) -> None:
        """Refuse new connections; close those that are open after ``seconds``."""
        self.draining = True
        await wait_first(self.empty.wait(), timeout_s=seconds)
        closing = [self._close(websocket, 1001, "the server stops") for websocket in self.sessions]
        await wait_first(asyncio.gather(*closing), timeout_s=GRACE_S)
        await wait_first(self.empty.wait(), timeout_s=self.stall_s)

    async def _realtime(self, websocket: WebSocket) -> None:
        try:
            state, protocol = self._admit(websocket)
            excess = await state.start() if state else None
            if excess:
                what = "this API key has reached a limit; try again later"
                raise RequestError(what, status=429, code="rate_limit_exceeded")
        except RequestError as refusal:
            self.counts["refused"] += 1
            await websocket.send_denial_response(error_reply(refusal))
            return
        try:
            await websocket.accept(subprotocol=protocol)
            await self._serve(websocket)
        finally:
            if state:
                state.end()

    async def _serve(self, websocket: WebSocket) -> None:
        """Serves one connection."""

        async def send(event: Event) -> None:
            if websocket.application_state is not WebSocketState.CONNECTED:  # closed by drain
                raise WebSocketDisconnect(1001)
            await websocket.send_text(json.dumps(event))

        session = RealtimeSession(self.engine, self.name, send)
        self.sessions[websocket] = session
        self.counts["sessions"] += 1
        self.empty.clear()
        try:
            await session.start()
            while True:
                message = await asyncio.wait_for(websocket.receive(), self.idle_s)
                if message["type"] == "websocket.disconnect":
                    return
                if message.get("text") is None:
                    await self._close(websocket, 1003, "messages are text")
                    return
                await session.receive(message["text"])
        except TimeoutError:
            await self._close(websocket, 1008, "nothing was received for too long")
        except WebSocketDisconnect:
            return
        finally:
            session.close()
            self.counts["audio_seconds"] += session.seconds
            del self.sessions[websocket]
            if not self.sessions:
                self.empty.set()

    async def _close(self, websocket: WebSocket, code: int, reason: str) -> None:
        """Close a connection, unless the client has."""
        try:
            await websocket.close(code, reason)
        except (RuntimeError, WebSocketDisconnect):  # it is closed
            return

    def _admit(self, websocket: WebSocket) -> tuple[KeyState | None, str | None]:
        """The key's state and the subprotocol to accept; raises :class:`RequestError`."""
        origin = websocket.headers.get("origin")
        if origin is not None and not is_allowed_origin(origin, websocket.headers.get("host", ""), self.origins):
            raise RequestError(
                f"pages of the origin {short_repr(origin)} may not use this server", status=403,
                code="origin_not_allowed", operator_hint=f"allow it with --origins {short_repr(origin)}",
            )  # fmt: skip
        state, protocol = self._authenticate(websocket)
        query = websocket.query_params
        if self.draining or self.engine.failure:
            raise RequestError("the server is stopping; use another one", status=503, code="server_stopping")
        if query.get("intent") != "transcription":
            raise RequestError("add ?intent=transcription: this server only transcribes", param="intent")
        if query.get("model", self.name) != self.name:
            raise RequestError(f"the model is not served here; use {self.name}", param="model", status=404)
        if len(self.sessions) >= self.engine.streams:
            raise RequestError(
                f"all {self.engine.streams} streams are in use; try again later", status=503, code="server_busy"
            )
        return state, protocol

    def _authenticate(self, connection: WebSocket | Request) -> tuple[KeyState | None, str | None]:
        offered: list[str] = connection.scope.get("subprotocols", [])
        protocol = "realtime" if "realtime" in offered else None
        if not self.keys.required:
            return None, protocol
        scheme, _, secret = connection.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            keys = [each.removeprefix(KEY_PROTOCOL) for each in offered if each.startswith(KEY_PROTOCOL)]
            secret = keys[0] if keys else ""
        known, state = self.keys.find(secret.strip().encode("utf-8", "surrogateescape"))
        if not known:
            what = "the API key is not valid" if secret else "there is no API key"
            raise RequestError(
                f"{what}; send one in the header 'authorization: Bearer KEY'", status=401, code="invalid_api_key"
            )
        if state is not None and state.key.models is not None and self.name not in state.key.models:
            raise RequestError(f"this API key may not use {self.name}", status=403, code="model_not_allowed")
        return state, protocol

    async def _models(self, request: Request) -> Response:
        try:
            self._authenticate(request)
        except RequestError as refusal:
            return error_reply(refusal)
        takes = ["sound"]
        if self.engine.listeners.model.config.picture:
            takes += ["pictures", "faces"] if has_weights() else ["pictures"]
        model = {"id": self.name, "object": "model", "owned_by": "colonnade", "capabilities": takes}
        return JSONResponse({"object": "list", "data": [model]})

    async def _health(self, request: Request) -> Response:
        alive = self.engine.failure is None
        return PlainTextResponse("ok" if alive else "the recogniser has failed", 200 if alive else 503)

    async def _ready(self, request: Request) -> Response:
        ready = not self.draining and self.engine.failure is None
        return PlainTextResponse("ready" if ready else "not ready", 200 if ready else 503)

    async def _metrics(self, request: Request) -> Response:
        return Response(generate_latest(self._registry), media_type=CONTENT_TYPE_PLAIN_0_0_4)


class _Metrics(Collector):
    """A server's counters, in Prometheus' text format."""

    def __init__(self, server: SpeechServer, prefix: str):
        self._server, self._prefix = server, prefix

    def collect(self) -> Iterator[Metric]:
        server, prefix = self._server, f"{self._prefix}:speech"
        running = list(server.sessions.values())
        yield GaugeMetricFamily(f"{prefix}_streams_running", "Connections.", value=len(running))
        counts = {
            "sessions": (server.counts["sessions"], "Connections that were accepted."),
            "refused": (server.counts["refused"], "Connections that were refused."),
            "audio_seconds": (
                server.counts["audio_seconds"] + sum(each.seconds for each in running), "Sound that was received.",
            ),
            "busy_seconds": (server.engine.busy_s, "Time that the recogniser computed."),
        }  # fmt: skip
        for name, (value, text) in counts.items():
            yield CounterMetricFamily(f"{prefix}_{name}", text, value=value)


def is_allowed_origin(origin: str, host: str, origins: Sequence[str]) -> bool:
    """Whether a page of ``origin`` may connect: it is of ``host``, which the request names, or of ``origins``."""
    if "*" in origins or origin in origins:
        return True
    try:
        page, own = urlsplit(origin), urlsplit(f"{urlsplit(origin).scheme}://{host}")
        return bool(page.hostname) and (page.hostname, _port(page)) == (own.hostname, _port(own))
    except ValueError:  # not a host or a port
        return False


def _port(url: SplitResult) -> int | None:
    return url.port or {"http": 80, "https": 443}.get(url.scheme)


def serve(
    model: SpeechModel,
    name: str,
    streams: int,
    config: ServeConfig,
    announce: Callable[[str], object],
    segment: int | None = None,
    lookahead: int | None = None,
    beam: int | None = None,
) -> None:
    """Serve until SIGINT or SIGTERM, then drain. Raises ConfigError if the port cannot be bound or the sizes were not
    trained, Interrupted for a second signal.
    """
    if importlib.util.find_spec("wsproto") is None:
        raise RequestError("WebSockets need wsproto, which is not installed: pip install wsproto")
    require("soxr")
    keys = KeyRing(config.keys, config.api_key)
    with listen(config) as listener, asyncio.Runner(loop_factory=new_event_loop) as runner:
        server = SpeechServer(
            model, name, streams, keys, origins=config.origins, metrics_prefix=config.metrics_prefix,
            segment=segment, lookahead=lookahead, beam=beam,
        )  # fmt: skip
        runner.run(_serve(server, config, listener, announce))


async def _serve(
    server: SpeechServer, config: ServeConfig, listener: socket.socket, announce: Callable[[str], object]
) -> None:
    stop, again = asyncio.Event(), asyncio.Event()
    received: list[int] = []

    def on_signal(number: int) -> None:
        received.append(number)
        (again if stop.is_set() else stop).set()

    for number in STOP_SIGNALS:
        asyncio.get_running_loop().add_signal_handler(number, on_signal, number)
    http = background_server(server)
    server.engine.start()
    try:
        async with http.running(listener):
            announce(f"serving {server.name} at {url_of(listener)} (a page at /speech; Ctrl-C stops)")
            await wait_first(stop.wait(), http.closed.wait())
            running = plural(len(server.sessions), "stream")
            announce(f"stopping: {running} may run for {config.drain_s:g} s; press Ctrl-C again to exit now")
            await wait_first(server.drain(config.drain_s), again.wait())
            if again.is_set():
                http.force_exit = True
    finally:
        server.engine.stop()
    if again.is_set():
        raise Interrupted(received[-1])


def background_server(server: SpeechServer) -> BackgroundServer:
    """uvicorn for the application."""
    return BackgroundServer(
        uvicorn.Config(
            server.app,
            http=connection_class(ConnectionLimits().within_files()),
            ws=websocket_class(server.stall_s),
            lifespan="off",
            ws_max_size=MAX_MESSAGE_BYTES,
            ws_per_message_deflate=False,
            ws_ping_interval=None,  # a pong would queue behind unread audio; idle_s disconnects dead clients
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=GRACE_S,
        ),
        server.keys,
        server.origins,
    )


def websocket_class(stall_s: float) -> type[asyncio.Protocol]:
    """uvicorn's protocol, extended to disconnect a client that reads nothing of its pending output for ``stall_s``."""
    from uvicorn.protocols.websockets.wsproto_impl import WSProtocol  # needs the extra speech

    return type("WebSocketConnection", (StallTimeout, WSProtocol), {"stall_s": stall_s})
