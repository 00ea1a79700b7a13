"""The engine's connections to HTTP processes: the server's own, and one to each of its fronts.

    front ── messages, each read and tokenised by a thread ──> inbox ──> engine
    front <── outputs of its own requests, statistics of all ─────────── engine

The engine connects to a front when the server tells it to. If a front exits, its requests are cancelled; when the
server's own connection ends, the engine stops. Output that a front does not read immediately is buffered here, so that
a hanging front does not delay the others.
"""

import queue
import socket
import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress

from colonnade.serve.engine import Engine
from colonnade.serve.ipc import Message, encode_message, output_to_list
from colonnade.serve.message_reader import read_messages
from colonnade.serve.pooling_engine import PoolingEngine
from colonnade.serve.pooling_request import PoolingOutput
from colonnade.serve.request import Output

MAX_UNSENT_BYTES = 64 << 20
"""A connection with more unread output is closed [bytes]."""

RETRY_S = 0.01
"""Interval at which an idle engine retries to send pending output [s]."""


class HttpConnection:
    """One HTTP process; ``is_server``: the one that started the engine."""

    def __init__(self, connection: socket.socket, *, is_server: bool):
        self.socket, self.is_server = connection, is_server
        self.ids = set[str]()
        """Its requests that have not ended."""
        self.closed = False
        self._unsent = bytearray()

    @property
    def has_unsent(self) -> bool:
        """Whether something waits to be sent."""
        return bool(self._unsent)

    def send(self, line: bytes) -> None:
        """Send ``line``, or as much as the process takes now."""
        self._unsent += line
        self.flush()

    def flush(self) -> None:
        """Send pending output; drops it if the process has exited or does not read."""
        try:
            while self._unsent:
                del self._unsent[: self.socket.send(self._unsent, socket.MSG_DONTWAIT)]
        except BlockingIOError:
            if len(self._unsent) > MAX_UNSENT_BYTES:
                with suppress(OSError):
                    self.socket.shutdown(socket.SHUT_RDWR)  # the reader then ends the connection
        except OSError:  # it has exited: the reader ends the connection
            self._unsent.clear()


class HttpConnections:
    """All connections of one engine; ``inbox`` has (connection, message), or a bug of a reader."""

    def __init__(self, engine: Engine | PoolingEngine, ready: Message):
        self.inbox: queue.SimpleQueue[tuple[HttpConnection | None, Message | BaseException]] = queue.SimpleQueue()
        self._engine, self._ready = engine, encode_message(ready)
        self._open: list[HttpConnection] = []
        self._owners: dict[str, HttpConnection] = {}
        """By id of a request that has not ended."""

    def add(self, connection: socket.socket, *, is_server: bool = False) -> None:
        """Read the messages of ``connection`` in a thread, and notify it that the engine is ready."""
        it = HttpConnection(connection, is_server=is_server)
        self._open.append(it)
        it.send(self._ready)

        def put(message: Message | BaseException) -> None:
            self.inbox.put((it, message))

        threading.Thread(target=read_messages, args=(connection, self._engine, put), daemon=True).start()

    def connect(self, address: str) -> None:
        """Connect to a front; nothing happens if it has exited."""
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(address)
        except (ConnectionError, FileNotFoundError):
            connection.close()
        else:
            self.add(connection)

    def end(self, connection: HttpConnection) -> list[str]:
        """Close a front's connection; returns the ids of its requests, which are to be cancelled."""
        self._open.remove(connection)
        connection.socket.close()
        connection.closed = True
        return list(connection.ids)

    def begin(self, connection: HttpConnection, ids: Iterable[str]) -> None:
        """Requests of ``connection`` have arrived."""
        connection.ids.update(ids)
        self._owners.update(dict.fromkeys(ids, connection))

    def forget(self, ids: Iterable[str]) -> None:
        """Requests have ended."""
        for key in ids:
            if owner := self._owners.pop(key, None):
                owner.ids.discard(key)

    def reply(self, message: Message) -> None:
        """Send a refusal or a reply to its recipient; the request has ended."""
        if owner := self._owners.get(message["ids"][0]):
            owner.send(encode_message(message))
        self.forget(message["ids"])

    def send_outputs(self, outputs: Sequence[Output | PoolingOutput], stats: Message | None) -> None:
        """Send each process the outputs of its requests, and all processes ``stats``."""
        if stats is None and not outputs:
            self.flush()
            return
        lists: dict[HttpConnection, list[list[object]]] = {}
        for output in outputs:
            if owner := self._owners.get(output.id):
                lists.setdefault(owner, []).append(output_to_list(output))
        for connection in self._open if stats else lists:
            event: Message = {"event": "outputs", "outputs": lists.get(connection, [])}
            if stats:
                event["stats"] = stats
            connection.send(encode_message(event))
        self.forget([output.id for output in outputs if output.finish_reason])
        self.flush()

    def flush(self) -> None:
        """Send as much pending output as is accepted."""
        for connection in self._open:
            if connection.has_unsent:
                connection.flush()

    @property
    def has_unsent(self) -> bool:
        """Whether something waits to be sent."""
        return any(connection.has_unsent for connection in self._open)
