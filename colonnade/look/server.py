"""A local single-user server of the viewer's page and API on 127.0.0.1.

It accepts only requests with its own address as Host, which prevents DNS rebinding from other pages.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar
from urllib.parse import urlsplit

from colonnade.errors import ConfigError
from colonnade.look.app import MAX_BODY, PREFIX, Answer, LookApp, error_answer, json_answer, page_headers, static_file

HOST = "127.0.0.1"
READ_TIMEOUT_S = 30.0
"""Time after which an idle connection is closed [s]."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version = "colonnade"
    sys_version = ""
    timeout = READ_TIMEOUT_S
    app: ClassVar[LookApp | None] = None
    lock: ClassVar[threading.Lock]
    headers_of_page: ClassVar[dict[str, str]]

    def do_GET(self) -> None:
        self._respond(b"")

    do_HEAD = do_GET

    def do_POST(self) -> None:
        length = self.headers.get("content-length", "")
        if not length.isdigit() or len(length) > 9 or int(length) > MAX_BODY:
            self.close_connection = True
            self._send(error_answer(f"send a body of at most {MAX_BODY:,} bytes, with its length", 413))
        elif self.headers.get_content_type() != "application/json":
            self.close_connection = True  # a form of another page cannot send this type unasked
            self._send(error_answer("send application/json", 415))
        else:
            self._respond(self.rfile.read(int(length)))

    def _respond(self, body: bytes) -> None:
        host, port = self.headers.get("host", ""), self.connection.getsockname()[1]
        if host not in (f"{HOST}:{port}", f"localhost:{port}"):
            self._send(error_answer("this server answers only on its own address", 403))
            return
        url = urlsplit(self.path)
        if url.path.startswith(PREFIX) and self.app is not None:
            with self.lock:
                self._send(self.app.answer(self.command, url.path.removeprefix(PREFIX), url.query, body))
            return
        if url.path == f"{PREFIX}model" and self.command == "GET":
            self._send(json_answer(None))
            return
        found = static_file(url.path.removeprefix("/")) if self.command != "POST" else None
        self._send(found or error_answer("there is no such page", 404))

    def _send(self, answer: Answer) -> None:
        self.send_response(answer.status)
        for name, value in self.headers_of_page.items():
            self.send_header(name, value)
        self.send_header("Content-Type", answer.content_type)
        self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body)

    def log_message(self, format: str, *args: object) -> None:
        """Disables request logging."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignores clients that close their connection; other errors are printed as usual."""
        import sys

        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]


def make_server(app: LookApp | None, port: int = 0, *, framed: bool = False) -> ThreadingHTTPServer:
    """A server that listens on 127.0.0.1; ``port`` 0 is any free one. Without an ``app`` there is only the page."""
    handler = type("Handler", (_Handler,), {
        "app": app, "lock": threading.Lock(), "headers_of_page": page_headers(framed=framed),
    })  # fmt: skip
    try:
        return _Server((HOST, port), handler)
    except OSError as error:
        raise ConfigError(f"cannot listen on {HOST}:{port}: {error.strerror}; choose another --port, or 0") from None


@contextmanager
def running(app: LookApp | None, port: int = 0, *, framed: bool = False) -> Iterator[str]:
    """Serve in a thread during the block; yields the address, such as ``http://127.0.0.1:8123/``."""
    with make_server(app, port, framed=framed) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://{HOST}:{server.server_address[1]}/"
        finally:
            server.shutdown()
            thread.join()
