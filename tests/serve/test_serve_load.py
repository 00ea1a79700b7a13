"""A server under load: 64 to 1,000 streams at a time, clients that leave, a stop in the middle, steady memory."""

import asyncio
import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.serve.serving import Running, server
from tests.serve.streams import stream, stream_all
from tests.serve.test_serve_http import metric, settle
from tests.serve.test_serve_life import gone, until_requests

MB = 1 << 20


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with server(max_requests=64, pages=1024) as it:
        yield it


@pytest.mark.sample(1)
@pytest.mark.parametrize("count", [64, 256, 1000])
def test_no_stream_fails(running: Running, count: int):
    """Every stream has its tokens: equal prompts, alone and in company, have equal text."""
    done = asyncio.run(stream_all(running, count, max_tokens=6))
    assert {each.finish_reason for each in done} == {"length"}
    assert len({len(each.events) for each in done}) < 6
    (alone,) = asyncio.run(stream_all(running, 1, max_tokens=6))
    assert text(alone.events) == text(done[0].events)
    settle(running)


def text(events: list[str]) -> str:
    return "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1])


def test_pages_are_free_after_clients_left(running: Running):
    async def leave() -> None:
        jobs = (stream(running, prompt=[i, 7], max_tokens=100, leave_after=1 + i % 3) for i in range(256))
        assert {each.status for each in await asyncio.gather(*jobs)} == {200}

    before = metric(running, "request_success_total")
    asyncio.run(leave())
    settle(running)
    assert metric(running, "request_success_total") == before + 256


@pytest.mark.sample(1)
@pytest.mark.parametrize("drain_s", [0, 60])
def test_a_stop_ends_every_stream(drain_s: int):
    """64 streams, half of them in the queue: each ends with its finish reason or an error, and the server with 0."""
    with server({"slow_s": 0.02}, max_requests=32, drain_s=drain_s) as at:
        pids = at.engine_pids()

        async def stop() -> list[str | None]:
            jobs = asyncio.ensure_future(stream_all(at, 64, max_tokens=30))
            await asyncio.to_thread(until_requests, at, running=32, waiting=32)
            at.process.send_signal(signal.SIGTERM)
            return [each.finish_reason or each.error or f"{each.status}" for each in await jobs]

        ends = asyncio.run(stop())
        # Without time to drain, those in the queue are refused: their streams have not begun.
        assert set(ends) == ({"length"} if drain_s else {"shutting_down", "503"}), ends
        code, _, err = at.stop(0)
        assert (code, err) == (0, "") and gone(pids)


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/status").read_text().partition("VmRSS:")[2].split()[0]) << 10


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_memory_is_steady(running: Running):
    """After a minute of load, ten more add less than 5 MB to the HTTP process and to the engine."""
    pids = [running.process.pid, *running.engine_pids()]

    async def load(seconds: float) -> int:
        until_s, done = time.monotonic() + seconds, 0

        async def client(number: int) -> None:
            nonlocal done
            while time.monotonic() < until_s:
                one = await stream(running, prompt=[number, done % 300, 7, 9], max_tokens=16)
                assert one.finish_reason == "length", one
                done += 1

        await asyncio.gather(*(client(i) for i in range(64)))
        return done

    asyncio.run(load(60))
    settle(running)
    before = [resident_bytes(pid) for pid in pids]
    done = asyncio.run(load(600))
    settle(running)
    grown = [(resident_bytes(pid) - old) / MB for pid, old in zip(pids, before, strict=True)]
    print(f"{done} streams; {[old / MB for old in before]} MB, grown by {grown} MB")
    assert max(grown) < 5, grown
