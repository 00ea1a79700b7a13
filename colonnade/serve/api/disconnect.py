"""Cancels the work for a client that disconnects."""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from fastapi import Request

from colonnade.errors import RequestError

Result = TypeVar("Result")

CLIENT_CLOSED_REQUEST = 499
"""nginx's status for a client that has disconnected; it appears in the log only."""


async def unless_disconnected(request: Request, work: Awaitable[Result]) -> Result:
    """The result of ``work``, which is cancelled if the client disconnects first."""
    task, disconnect = asyncio.ensure_future(work), asyncio.ensure_future(_wait_disconnect(request))
    try:
        await asyncio.wait((task, disconnect), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise RequestError("the client closed the connection", status=CLIENT_CLOSED_REQUEST, code="client_gone")
    finally:
        for each in (task, disconnect):
            each.cancel()
        await asyncio.gather(task, disconnect, return_exceptions=True)


async def _wait_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
