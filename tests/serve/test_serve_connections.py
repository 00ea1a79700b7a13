"""Slow, stalled, half-sent and too many connections, on real sockets; limits shortened by parameters."""

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
import uvicorn
from starlette.types import Receive, Scope, Send

from colonnade.serve.api import connection
from colonnade.serve.api.connection import ConnectionLimits, connection_class, limit_unsent
from colonnade.serve.api.middleware import BodyLimit
from colonnade.serve.server import new_event_loop
from tests.serve.serving import server

CLASSES = [connection.H11Connection]
if connection.HttpToolsProtocol is not None:
    CLASSES.append(connection.HttpToolsConnection)

HOUR_S = 3600.0
REQUEST = (
    b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
)
OVER_S = 120
"""Limit against hanging [s]."""


@dataclass
class Web:
    """uvicorn in a thread, in front of an application that answers or streams without end."""

    port: int = 0
    left: threading.Event = field(default_factory=threading.Event)
    """Set when the endless stream has noticed that its client is gone."""
    busy: threading.Event = field(default_factory=threading.Event)
    """Set when /busy begins to block the event loop."""
    lines: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    """Closes all connections at the end."""

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = (await receive())["body"]
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while scope["path"] == "/endless":
            await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
            with contextlib.suppress(TimeoutError):
                if (await asyncio.wait_for(receive(), 0.001))["type"] == "http.disconnect":
                    self.left.set()
                    return
        if scope["path"] == "/busy":
            self.block_between_two_reads()
        if scope["path"] == "/long":
            body = b"x" * (4 << 20)
        await send({"type": "http.response.body", "body": body})

    def block_between_two_reads(self) -> None:
        """Block the event loop while it handles sockets: libuv runs the timers that are due before it reads again."""
        ours, theirs = (self.lines.enter_context(end) for end in socket.socketpair())
        loop = asyncio.get_running_loop()

        def block() -> None:
            loop.remove_reader(ours)
            self.busy.set()
            time.sleep(2.0)

        loop.add_reader(ours, block)
        theirs.send(b"x")

    def connect(self, data: bytes = b"", receive_bytes: int | None = None) -> socket.socket:
        line = self.lines.enter_context(socket.socket())
        if receive_bytes:
            line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        line.settimeout(OVER_S)
        line.connect(("127.0.0.1", self.port))
        line.sendall(data)
        return line


@contextlib.contextmanager
def web(protocol: type[Any], max_bytes: int = 1 << 20, keep_alive_s: int = 3600, **limits: Any) -> Iterator[Web]:
    calm = {"header_s": HOUR_S, "body_s": HOUR_S, "stall_s": HOUR_S}
    every = ConnectionLimits(**{**calm, **limits})
    it = Web()
    config = uvicorn.Config(
        BodyLimit(it.app, max_bytes, every),
        http=connection_class(every, protocol),
        lifespan="off",
        ws="none",
        log_config=None,
        timeout_keep_alive=keep_alive_s,
        timeout_graceful_shutdown=1,
    )
    running = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0), backlog=512) as listener:
        limit_unsent(listener)
        it.port = listener.getsockname()[1]
        thread = threading.Thread(target=run_on_the_servers_loop, args=(running, listener))
        thread.start()
        try:
            with it.lines:
                yield it
        finally:
            running.should_exit = True
            thread.join()


def run_on_the_servers_loop(running: uvicorn.Server, listener: socket.socket) -> None:
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(running.serve(sockets=[listener]))


def whole_answer(line: socket.socket) -> bytes:
    """All bytes until the server closes."""
    return b"".join(iter(lambda: line.recv(1 << 16), b""))


def error_of(answer: bytes) -> dict[str, Any]:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"connection: close" in head.lower() and b"content-type: application/json" in head.lower()
    return json.loads(body)["error"]


def one_answer(line: socket.socket, end: bytes) -> bytes:
    """Bytes until ``end`` has arrived."""
    answer = b""
    while not answer.endswith(end):
        piece = line.recv(1 << 16)
        assert piece, f"closed after {answer!r}"
        answer += piece
    return answer


each_protocol = pytest.mark.parametrize("protocol", CLASSES)


@each_protocol
def test_half_sent_headers_are_closed(protocol: type[Any]):
    with web(protocol, header_s=0.3) as it:
        lines = [
            it.connect(data)
            for data in (b"", b"POST /v1", b"GET / HTTP/1.1\r\nhost: localhost\r\n")
            for _ in range(120)
        ]
        assert all(whole_answer(line) == b"" for line in lines)
        later = it.connect(REQUEST % 2 + b"ok")
        one_answer(later, b"ok\r\n0\r\n\r\n")
        later.sendall(b"GET / HT")  # a second request on the same connection
        assert whole_answer(later) == b""


@each_protocol
def test_trickled_headers_do_not_extend_their_time(protocol: type[Any]):
    def trickle(line: socket.socket) -> None:
        for _ in range(OVER_S * 20):
            line.sendall(b"a: b\r\n")
            time.sleep(0.05)

    with web(protocol, header_s=0.5) as it, pytest.raises(OSError, match=r"Broken pipe|reset"):
        trickle(it.connect(b"GET / HTTP/1.1\r\n"))


@pytest.mark.sample(1)
@each_protocol
def test_a_busy_event_loop_answers_requests_that_arrived_meanwhile(protocol: type[Any]):
    with web(protocol, header_s=1.0) as it:
        lines = [it.connect() for _ in range(20)]
        it.connect(b"GET /busy HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert it.busy.wait(OVER_S)
        for line in lines:  # the event loop sleeps for twice the header time now
            line.sendall(REQUEST % 2 + b"ok")
        for line in lines:
            one_answer(line, b"ok\r\n0\r\n\r\n")


@pytest.mark.sample(1)
@each_protocol
def test_an_idle_connection_outlives_the_header_time(protocol: type[Any]):
    with web(protocol, header_s=0.2, stall_s=0.2) as it, it.connect(REQUEST % 2 + b"ok") as line:
        for _ in range(2):
            one_answer(line, b"ok\r\n0\r\n\r\n")
            time.sleep(0.6)
            line.sendall(REQUEST % 2 + b"ok")
        one_answer(line, b"ok\r\n0\r\n\r\n")
    with web(protocol, keep_alive_s=1) as it, it.connect(REQUEST % 2 + b"ok") as line:
        one_answer(line, b"ok\r\n0\r\n\r\n")
        assert whole_answer(line) == b""


@each_protocol
def test_a_half_sent_body_gets_408(protocol: type[Any]):
    with web(protocol, header_s=0.1, body_s=0.4) as it, it.connect(REQUEST % 100 + b"{") as line:
        answer = whole_answer(line)
        assert answer.startswith(b"HTTP/1.1 408 ")
        error = error_of(answer)
        assert error["code"] == "request_timeout" and error["message"].startswith("only 1 bytes of the body arrived")


@pytest.mark.sample(1)
@each_protocol
def test_a_trickled_body_gets_408_and_a_steady_one_is_accepted(protocol: type[Any]):
    limits = {"body_s": 0.5, "body_bytes_per_s": 1000}
    with web(protocol, **limits) as it:
        with it.connect(REQUEST % 1000) as slow:
            slow.settimeout(0.05)
            answer = b""
            for _ in range(OVER_S * 20):
                slow.sendall(b"x")
                with contextlib.suppress(TimeoutError):
                    answer = slow.recv(1 << 16)
                    break
        assert answer.startswith(b"HTTP/1.1 408 ")
        with it.connect(REQUEST % 3000) as steady:  # takes longer than body_s
            for _ in range(10):
                steady.sendall(b"x" * 300)
                time.sleep(0.1)
            assert one_answer(steady, b"x\r\n0\r\n\r\n").startswith(b"HTTP/1.1 200 ")


@each_protocol
def test_a_reader_that_stops_is_dropped(protocol: type[Any]):
    with web(protocol, stall_s=0.3) as it:
        stalled = it.connect(b"GET /endless HTTP/1.1\r\nhost: localhost\r\n\r\n", receive_bytes=4096)
        assert it.left.wait(OVER_S), "the stream must see the disconnect"
        with contextlib.suppress(ConnectionResetError):
            whole_answer(stalled)  # what had been sent
        reader = it.connect(b"GET /long HTTP/1.1\r\nhost: localhost\r\n\r\n", receive_bytes=1 << 16)
        count = 0
        for _ in range(8):  # slower than stall_s in all, but never stopped
            time.sleep(0.1)
            count += len(reader.recv(1 << 20))
        while piece := reader.recv(1 << 20):
            count += len(piece)
            if count > 4 << 20:
                break
        assert count > 4 << 20


@each_protocol
def test_connections_over_the_limit_get_503(protocol: type[Any]):
    with web(protocol, connections=3) as it:
        kept = [it.connect(REQUEST % 2 + b"ok") for _ in range(3)]
        for line in kept:
            one_answer(line, b"ok\r\n0\r\n\r\n")
        over = it.connect(REQUEST % (1 << 19) + b"x" * (1 << 19))
        answer = whole_answer(over)
        assert answer.startswith(b"HTTP/1.1 503 ") and b"retry-after: 1" in answer.lower()
        assert error_of(answer)["code"] == "too_many_connections"
        kept[0].sendall(REQUEST % 2 + b"ok")  # the others still work
        one_answer(kept[0], b"ok\r\n0\r\n\r\n")
        kept[1].close()
        while True:
            with it.connect(REQUEST % 2 + b"ok") as again:
                if again.recv(12) == b"HTTP/1.1 200":
                    break


@each_protocol
def test_what_is_no_http_is_refused_in_json(protocol: type[Any]):
    with web(protocol) as it, it.connect(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n") as line:
        answer = whole_answer(line)
        assert answer.startswith(b"HTTP/1.1 400 ") and error_of(answer)["code"] == "invalid_http"


@each_protocol
@pytest.mark.parametrize("piece", [b"a: b\r\n", b"x" * 1000], ids=["many", "long"])
def test_endless_headers_are_refused(protocol: type[Any], piece: bytes):
    with web(protocol) as it, it.connect(b"GET / HTTP/1.1\r\nhost: localhost\r\nlong: ") as line:
        answer = b""
        with contextlib.suppress(ConnectionError):
            for _ in range(200):
                line.sendall(piece * (1000 // len(piece)))
            answer = whole_answer(line)
        assert answer[9:12] in (b"400", b"431", b"")


@each_protocol
def test_endless_trailers_and_chunk_extensions_are_cut_off(protocol: type[Any]):
    head = b"POST / HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
    for start, piece in ((b"1\r\nx\r\n0\r\n", b"a: " + b"b" * 997), (b"1\r\nx\r\n1;", b"e" * 1000)):
        with web(protocol) as it, it.connect(head + start) as line:
            answer = b""
            with contextlib.suppress(ConnectionError):
                for _ in range(2000):
                    line.sendall(piece)
                answer = whole_answer(line)
            assert answer[9:12] in (b"400", b"")


@each_protocol
def test_a_second_request_before_the_answer(protocol: type[Any]):
    """Two requests at once: h11 answers both; httptools the first, and closes, so that the client repeats the other."""
    ask = REQUEST % 2 + b"ok"
    with web(protocol) as it:
        line = it.connect(ask + ask.replace(b"host: localhost", b"host: localhost\r\nconnection: close"))
        answer = whole_answer(line)
        assert answer.count(b"HTTP/1.1 200") == (2 if protocol is connection.H11Connection else 1)


def test_a_dropped_reader_frees_its_pages():
    """Log-probabilities make answers larger than the socket's buffers."""
    with server({"slow_s": 0.01}, limits={"stall_s": 0.5}, max_requests=4) as running:
        body = {"prompt": [[1, 2]] * 60, "max_tokens": 120, "ignore_eos": True, "stream": True, "logprobs": 20}
        raw = json.dumps(body).encode()
        host, port = running.url.removeprefix("http://").split(":")
        with socket.socket() as line:
            line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            line.connect((host, int(port)))
            line.sendall(REQUEST % len(raw) + raw)
            assert line.recv(12) == b"HTTP/1.1 200"
            with httpx.Client() as http:
                limit_s = time.monotonic() + 60
                while 'finished_reason="cancelled"' not in (text := http.get(f"{running.url}/metrics").text):
                    assert time.monotonic() < limit_s, text
                    time.sleep(0.1)
                while 'kv_cache_usage_perc{model_name="tiny"} 0.0' not in http.get(f"{running.url}/metrics").text:
                    assert time.monotonic() < limit_s
                    time.sleep(0.02)
