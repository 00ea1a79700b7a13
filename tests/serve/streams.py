"""Many streamed completions at a time, over plain sockets: clients' libraries would take longer than the server."""

import asyncio
import json
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from tests.serve.serving import Running


@dataclass
class Streamed:
    """What came back."""

    status: int
    events: list[str]
    """Data of the server-sent events; of another answer, its body."""

    @property
    def finish_reason(self) -> str | None:
        """The reason in the last chunk, if the stream ended with [DONE] after it."""
        if self.status != 200 or self.events[-1:] != ["[DONE]"] or len(self.events) < 2:
            return None
        return json.loads(self.events[-2])["choices"][0]["finish_reason"]

    @property
    def error(self) -> str | None:
        """The code in the error event with which the stream ended."""
        last = json.loads(self.events[-1]) if self.events and self.events[-1] != "[DONE]" else {}
        return last.get("error", {}).get("code")


async def stream(running: Running, *, leave_after: int | None = None, **body: Any) -> Streamed:
    """One completion; with ``leave_after`` the connection is closed after that many events."""
    address = urlsplit(running.url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    data = json.dumps({"model": "tiny", "temperature": 0, "ignore_eos": True, "stream": True, **body}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json\r\n"
    try:
        writer.write(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
        status = int((await reader.readline()).split()[1])
        while (await reader.readline()).strip():
            pass
        events = list[str]()
        async for line in reader:
            if line.startswith(b"data: "):
                events.append(line[6:].decode().strip())
            if leave_after is not None and len(events) >= leave_after:
                break
        return Streamed(status, events)
    finally:
        writer.close()


async def stream_all(running: Running, count: int, **body: Any) -> list[Streamed]:
    """``count`` completions at the same time, each with a prompt of its own."""
    return await asyncio.gather(*(stream(running, prompt=[i % 300, i // 300, 7], **body) for i in range(count)))
