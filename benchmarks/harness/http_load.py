"""A load generator: sends requests over HTTP for some seconds, and reports requests/s and latencies.

    closed loop   each of N clients sends its next request when the last one is answered
    open loop     requests arrive at a given mean rate (exponential gaps), whether or not earlier ones are answered;
                  a latency counts from the planned arrival, so that a stall is not hidden (coordinated omission)

Clients are bound to the URLs in turn. Requests that were sent in time are awaited and count; the rate is that of all
answers until the last one, so that a server whose answers take longer than the run does not have a rate of 0. A closed
loop may limit that wait: requests that are still unanswered then are cancelled, and their ages are lower bounds of
their latencies.
"""

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

TIMEOUT_S = 120.0


@dataclass
class LoadResult:
    """The answers of a run."""

    seconds: float = 0.0
    """Time until the last answer, at least that of sending."""
    latencies_s: list[float] = field(default_factory=list[float])
    failures: int = 0
    unanswered_s: list[float] = field(default_factory=list[float])
    """Ages of the requests that were cancelled at the end."""

    @property
    def requests_per_s(self) -> float:
        """Answers by time."""
        return len(self.latencies_s) / self.seconds

    def percentile_ms(self, percent: float) -> float:
        """The latency that ``percent`` of the requests do not exceed, unanswered ones by their age; NaN without any."""
        ordered = sorted([*self.latencies_s, *self.unanswered_s])
        index = min(len(ordered) - 1, max(0, -int(-percent * len(ordered) // 100) - 1))
        return 1e3 * ordered[index] if ordered else float("nan")


def closed_loop(
    urls: Sequence[str], request: dict[str, Any], clients: int, seconds: float, patience_s: float = TIMEOUT_S
) -> LoadResult:
    """Load of ``clients`` clients; ``request`` are the arguments of ``httpx``'s ``post``.

    Requests are sent for ``seconds``; ``patience_s`` later those that are not answered are cancelled.
    """

    async def run() -> LoadResult:
        served = LoadResult()

        async def client(http: httpx.AsyncClient, url: str, end: float) -> None:
            while (start := time.perf_counter()) < end:
                await _send(http, url, request, start, served)

        async with _http(clients) as http:
            began = time.perf_counter()
            tasks = [asyncio.create_task(client(http, urls[i % len(urls)], began + seconds)) for i in range(clients)]
            done, late = await asyncio.wait(tasks, timeout=seconds + patience_s)
            served.seconds = max(seconds, time.perf_counter() - began)
            for task in late:
                task.cancel()
            await asyncio.gather(*done)  # raises what a client raised
            await asyncio.gather(*late, return_exceptions=True)
        return served

    return asyncio.run(run())


def open_loop(urls: Sequence[str], request: dict[str, Any], rate: float, seconds: float, seed: int = 0) -> LoadResult:
    """Load of ``rate`` requests per second on average."""
    draw, arrivals = random.Random(seed), [0.0]
    while arrivals[-1] < seconds:
        arrivals.append(arrivals[-1] + draw.expovariate(rate))
    del arrivals[-1]

    async def run() -> LoadResult:
        served, http = LoadResult(), _http(4096)
        began = time.perf_counter()
        async with http, asyncio.TaskGroup() as tasks:
            for i, arrival in enumerate(arrivals):
                await asyncio.sleep(max(0.0, began + arrival - time.perf_counter()))
                url = urls[i % len(urls)]
                tasks.create_task(_send(http, url, request, began + arrival, served))
        served.seconds = max(seconds, time.perf_counter() - began)
        return served

    return asyncio.run(run())


def _http(connections: int) -> httpx.AsyncClient:
    return httpx.AsyncClient(timeout=TIMEOUT_S, limits=httpx.Limits(max_connections=connections))


async def _send(http: httpx.AsyncClient, url: str, request: dict[str, Any], start: float, served: LoadResult) -> None:
    try:
        reply = await http.post(url, **request)
    except httpx.HTTPError:
        served.failures += 1
        return
    except asyncio.CancelledError:
        served.unanswered_s.append(time.perf_counter() - start)
        raise
    if reply.is_error:
        served.failures += 1
    else:
        served.latencies_s.append(time.perf_counter() - start)
