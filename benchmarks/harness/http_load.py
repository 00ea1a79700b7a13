"""A load generator: sends requests over HTTP for some seconds, and reports requests/s and latencies.

    closed loop   each of N clients sends its next request when the last one is answered
    open loop     requests arrive at a given mean rate (exponential gaps), whether or not earlier ones are answered;
                  a latency counts from the planned arrival, so that a stall is not hidden (coordinated omission)

Clients are bound to the URLs in turn. Requests that were sent in time are awaited, and count in the latencies; the rate
counts the answers within the time.
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
class Served:
    """The answers of a run."""

    seconds: float
    in_time: int = 0
    latencies_s: list[float] = field(default_factory=list[float])
    failures: int = 0

    @property
    def requests_per_s(self) -> float:
        """Answers within the time of the run, by that time."""
        return self.in_time / self.seconds

    def percentile_ms(self, percent: float) -> float:
        """The latency that ``percent`` of the answers do not exceed; NaN without answers."""
        ordered = sorted(self.latencies_s)
        index = min(len(ordered) - 1, max(0, -int(-percent * len(ordered) // 100) - 1))
        return 1e3 * ordered[index] if ordered else float("nan")


def closed_loop(urls: Sequence[str], request: dict[str, Any], clients: int, seconds: float) -> Served:
    """Load of ``clients`` clients; ``request`` are the arguments of ``httpx``'s ``post``."""

    async def run() -> Served:
        served, began = Served(seconds), time.perf_counter()

        async def client(http: httpx.AsyncClient, url: str) -> None:
            while (start := time.perf_counter()) - began < seconds:
                await _send(http, url, request, start, served, began + seconds)

        async with _http(clients) as http:
            await asyncio.gather(*(client(http, urls[i % len(urls)]) for i in range(clients)))
        return served

    return asyncio.run(run())


def open_loop(urls: Sequence[str], request: dict[str, Any], rate: float, seconds: float, seed: int = 0) -> Served:
    """Load of ``rate`` requests per second on average."""
    draw, arrivals = random.Random(seed), [0.0]
    while arrivals[-1] < seconds:
        arrivals.append(arrivals[-1] + draw.expovariate(rate))
    del arrivals[-1]

    async def run() -> Served:
        served, began = Served(seconds), time.perf_counter()
        async with _http(4096) as http, asyncio.TaskGroup() as tasks:
            for i, arrival in enumerate(arrivals):
                await asyncio.sleep(max(0.0, began + arrival - time.perf_counter()))
                url = urls[i % len(urls)]
                tasks.create_task(_send(http, url, request, began + arrival, served, began + seconds))
        return served

    return asyncio.run(run())


def _http(connections: int) -> httpx.AsyncClient:
    return httpx.AsyncClient(timeout=TIMEOUT_S, limits=httpx.Limits(max_connections=connections))


async def _send(
    http: httpx.AsyncClient, url: str, request: dict[str, Any], start: float, served: Served, end: float
) -> None:
    try:
        reply = await http.post(url, **request)
    except httpx.HTTPError:
        served.failures += 1
        return
    now = time.perf_counter()
    if reply.is_error:
        served.failures += 1
        return
    served.latencies_s.append(now - start)
    served.in_time += now <= end
