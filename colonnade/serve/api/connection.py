"""Limits on connections, so that slow, stalled and idle clients cannot hold the server's memory or descriptors.

uvicorn's protocols wait forever for the rest of a header, and for a client that does not read its response. Here:

    connect ── 10 s ──> headers complete ── 30 s, more for long bodies ──> body complete ──> answer ──> keep-alive, 65 s
                 |                               |                              |
               closed                    408 (BodyLimit)       dropped once nothing of it is read for 60 s

A connection over the limit gets a 503 and is closed. Pipelined requests are not served: the connection closes after
the running request, and clients send the others again (RFC 9112, section 9.3.2).
"""

import asyncio
import resource
import socket
from dataclasses import dataclass
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from colonnade.errors import RequestError
from colonnade.serve.api.errors import error_reply

try:
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
except ImportError:  # httptools has no wheel for every platform
    HttpToolsProtocol = None

MAX_HEADER_BYTES = 64 << 10
"""Bytes of request line, headers, trailers and chunk sizes that a request may have in addition to one per byte of its
body."""

REFUSAL_LINGER_S = 1.0
"""A refused connection stays open until the client closes it, at most this long [s]: closing it while the request still
arrives would reset it, and the client would not see the reason."""

MAX_UNSENT_BYTES = 64 << 10
"""Bytes of a response that the kernel buffers. Its own limit is megabytes: a slow reader would look stalled, and a
stalled reader would not be noticed."""

HEADER_TICKS = 10
"""A header timeout is this many short timers, each started by the one before. An event loop that was busy for the whole
time fires one of them and then reads its sockets, so it does not close connections whose requests have arrived."""

RESERVED_FILES = 256
"""File descriptors reserved for everything except connections."""


@dataclass(frozen=True)
class ConnectionLimits:
    """Time limits and the largest number of connections of one server."""

    header_s: float = 10.0
    """From connecting, or from the first byte of a later request, to the end of its headers [s]."""
    body_s: float = 30.0
    """From the headers to the end of the body [s]; each :attr:`body_bytes_per_s` bytes extend it by a second."""
    body_bytes_per_s: int = 32 << 10
    """Minimum transfer rate of a long body: 8 MiB may take 30 + 256 s."""
    stall_s: float = 60.0
    """Time in which a client must read any part of its pending response [s]."""
    connections: int = 4096
    """Open connections; further ones are refused."""

    def within_files(self) -> "ConnectionLimits":
        """These limits, with as many connections as the process may open files; raises its soft limit if it can."""
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = self.connections + RESERVED_FILES
        if resource.RLIM_INFINITY not in (soft, hard):
            wanted = min(wanted, hard)
        if soft != resource.RLIM_INFINITY and soft < wanted:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        connections = max(1, min(self.connections, wanted - RESERVED_FILES))
        return ConnectionLimits(self.header_s, self.body_s, self.body_bytes_per_s, self.stall_s, connections)


def limit_unsent(listener: socket.socket) -> None:
    """Apply :data:`MAX_UNSENT_BYTES` to the connections that ``listener`` accepts."""
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, MAX_UNSENT_BYTES)


class StallTimeout(asyncio.Protocol):
    """Mixin for uvicorn's protocols: disconnects a client that reads nothing of its pending output for ``stall_s``."""

    loop: asyncio.AbstractEventLoop
    transport: asyncio.Transport
    stall_s: float
    _stall_timer: asyncio.TimerHandle | None = None

    def pause_writing(self) -> None:
        """Start the timer: bytes wait for the client."""
        super().pause_writing()
        self._watch_reader(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        """Cancel the timer: the client has read."""
        super().resume_writing()
        self._cancel_stall_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the timer."""
        self._cancel_stall_timer()
        super().connection_lost(exc)

    def _watch_reader(self, unsent: int) -> None:
        """Drop the connection unless some of ``unsent`` bytes have been read in time."""
        self._stall_timer = self.loop.call_later(self.stall_s, self._check_reader, unsent)

    def _check_reader(self, before: int) -> None:
        unsent = self.transport.get_write_buffer_size()
        if unsent < before:
            self._watch_reader(unsent)
        else:
            self.transport.abort()

    def _cancel_stall_timer(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None


class _Timed(StallTimeout):
    """Mixin for uvicorn's protocols: header and read timeouts, and the limit on connections."""

    connections: set[Any]
    cycle: Any
    limits = ConnectionLimits()

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._refused = self._upgraded = False
        self._header_timer: asyncio.TimerHandle | None = None
        self.stall_s = self.limits.stall_s

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        # Any unsent byte counts as a pause, so that a short response that is not read is noticed as well.
        transport.set_write_buffer_limits(high=0)
        if len(self.connections) >= self.limits.connections:
            self.transport = transport
            self._refuse(_TOO_MANY)
            return
        super().connection_made(transport)
        self._start_header_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
        self._cancel_stall_timer()
        if self.transport is not None and self in self.connections:
            super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        super().data_received(data)
        if self._upgraded:
            return
        if self._reads_headers:
            if self._header_timer is None and not self.transport.is_closing():
                self._start_header_timer()
        elif self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def handle_websocket_upgrade(self, *args: Any) -> None:
        """The headers are complete, and a WebSocket's protocol takes over the connection, with its own limits."""
        self._upgraded = True
        if self._header_timer is not None:
            self._header_timer.cancel()
        super().handle_websocket_upgrade(*args)  # type: ignore[misc]

    def pause_writing(self) -> None:
        if not self._refused:
            super().pause_writing()

    def resume_writing(self) -> None:
        if self._refused:
            self._cancel_stall_timer()
        else:
            super().resume_writing()

    @property
    def _reads_headers(self) -> bool:
        """Whether no request runs: the next bytes are headers."""
        return self.cycle is None or self.cycle.response_complete

    def _start_header_timer(self, ticks: int = HEADER_TICKS) -> None:
        self._header_timer = self.loop.call_later(self.limits.header_s / HEADER_TICKS, self._header_tick, ticks - 1)

    def _header_tick(self, ticks: int) -> None:
        if ticks:
            self._start_header_timer(ticks)
        else:
            self.transport.abort()

    def _refuse(self, error: RequestError) -> None:
        """Respond with ``error`` and close the connection once the client has."""
        self._refused = True
        self.transport.write(_http_response(error))
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(REFUSAL_LINGER_S, self.transport.abort)


class H11Connection(_Timed, H11Protocol):  # pyrefly: ignore[inconsistent-inheritance]
    """A connection parsed by h11, which bounds headers itself."""

    def send_400_response(self, msg: str) -> None:
        """Respond to data that is not HTTP."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self._refuse(_NO_HTTP)
        else:  # in the middle of a response
            self.transport.abort()


def _http_response(error: RequestError) -> bytes:
    """The whole response that refuses a connection."""
    reply = error_reply(error)
    phrase = {400: "Bad Request", 431: "Request Header Fields Too Large", 503: "Service Unavailable"}[error.status]
    head = [f"HTTP/1.1 {error.status} {phrase}".encode(), *(name + b": " + value for name, value in reply.raw_headers)]
    return b"\r\n".join([*head, b"connection: close", b"", bytes(reply.body)])


_TOO_MANY = RequestError(
    "the server has too many connections; try again later", status=503, code="too_many_connections"
)
_NO_HTTP = RequestError(
    "the request is not valid HTTP/1.1; send a request line, headers and a body", code="invalid_http"
)
_LONG_HEADERS = RequestError(
    f"the headers have over {MAX_HEADER_BYTES} bytes; send fewer or shorter ones", status=431, code="headers_too_large"
)

Connection: type[_Timed] = H11Connection

if HttpToolsProtocol is not None:

    class HttpToolsConnection(_Timed, HttpToolsProtocol):
        """A connection parsed by httptools, which is several times as fast as h11 but has no limits."""

        _framing_bytes = 0
        """Bytes of this request that are not of its body, minus those that its body pays for."""
        _pipelined = False
        """Whether a request has begun before the last one was answered."""

        def data_received(self, data: bytes) -> None:
            """Parse ``data``, unless an earlier request is still being processed."""
            if self._pipelined:
                return
            self._framing_bytes += len(data)
            super().data_received(data)
            if self._framing_bytes > MAX_HEADER_BYTES and not self._refused:
                self._stop(_LONG_HEADERS)

        def on_headers_complete(self) -> None:
            """Start the request, unless another one runs."""
            if not self._reads_headers:
                self._pipelined, self.cycle.keep_alive = True, False
            else:
                super().on_headers_complete()

        def on_body(self, body: bytes) -> None:
            """Add to the body; each of its bytes may come with one byte of framing."""
            if not self._pipelined:
                self._framing_bytes -= 2 * len(body)
                super().on_body(body)

        def on_message_complete(self) -> None:
            """End the body."""
            self._framing_bytes = 0
            if not self._pipelined:
                super().on_message_complete()

        def send_400_response(self, msg: str) -> None:
            """Respond to data that is not HTTP."""
            self._stop(_NO_HTTP)

        def _stop(self, error: RequestError) -> None:
            if self._reads_headers:
                self._refuse(error)
            else:  # a response that has begun cannot be replaced
                self.transport.abort()

    Connection = HttpToolsConnection


def connection_class(limits: ConnectionLimits, base: type[asyncio.Protocol] = Connection) -> type[asyncio.Protocol]:
    """uvicorn's ``http``: the class of all connections of a server with these ``limits``."""
    return type(base.__name__, (base,), {"limits": limits})
