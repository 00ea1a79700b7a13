"""Messages between the server and one of its fronts: one JSON object per line, over a Unix socket, in both directions.

{"do": …, …}                     needs no answer
{"do": …, "id": n, …}            is answered by {"answer": n, …}, or {"answer": n, "error": {…}}
"""

import asyncio
import contextlib
import itertools
from collections.abc import Awaitable, Callable
from typing import Any

from colonnade.errors import ColonnadeError, RequestError
from colonnade.serve.ipc import Message, decode_message, encode_message, error_to_dict

Handler = Callable[[Message], Awaitable[Message | None]]


class ControlChannel:
    """One end; ``handle`` processes a message and returns its reply. Messages are started in order."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, handle: Handler):
        self._reader, self._writer, self._handle = reader, writer, handle
        self._numbers = itertools.count()
        self._answers: dict[int, asyncio.Future[Message]] = {}
        self._tasks = set[asyncio.Task[None]]()
        self.closed = asyncio.Event()
        """The other process has exited."""

    async def run(self) -> None:
        """Read messages until the other end closes."""
        try:
            with contextlib.suppress(ConnectionError):
                async for line in self._reader:
                    self._receive(decode_message(line))
        finally:
            self._writer.close()
            self.closed.set()
            for answer in self._answers.values():
                if not answer.done():
                    answer.set_exception(_gone())

    def send(self, do: str, **fields: Any) -> None:
        """Send a message that needs no reply."""
        self._write({"do": do, **fields})

    async def ask(self, do: str, **fields: Any) -> Message:
        """The reply to a message; raises the :class:`RequestError` of the other end, or one if it has exited."""
        if self.closed.is_set():
            raise _gone()
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        try:
            self._write({"do": do, "id": number, **fields})
            return await answer
        finally:
            del self._answers[number]

    def _write(self, message: Message) -> None:
        if not self._writer.is_closing():
            self._writer.write(encode_message(message))

    def _receive(self, message: Message) -> None:
        if "answer" not in message:
            task = asyncio.create_task(self._do(message))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            return
        answer = self._answers.get(message["answer"])
        if answer is None or answer.done():
            return
        if error := message.get("error"):
            answer.set_exception(RequestError(error.pop("message"), **error))
        else:
            answer.set_result(message)

    async def _do(self, message: Message) -> None:
        try:
            answer = await self._handle(message) or {}
        except ColonnadeError as error:
            answer = {"error": error_to_dict(error)}
        if "id" in message:
            self._write({"answer": message["id"], **answer})


def _gone() -> RequestError:
    return RequestError("the server is shutting down; try again later", status=503, code="shutting_down")
