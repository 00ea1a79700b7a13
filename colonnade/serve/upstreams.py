"""Other servers behind a router: which of them are up, and the requests that they have.

    each upstream, every second: GET /ready -> 200 up; three failures in a row: down, until it answers again

An upstream that refuses new requests (503: it drains, its queue is full) finishes those that it has; one that does not
answer at all loses them. Which upstream gets a request is decided by :class:`~colonnade.serve.router.Router`.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from colonnade.config.base import plural
from colonnade.errors import ColonnadeError, ConfigError, RequestError
from colonnade.serve.request import Stats
from colonnade.serve.router import Router

PROBE_INTERVAL_S = 1.0
PROBE_S = 5.0
"""Time between two probes, and for the response to one [s]."""

MAX_FAILURES = 3
"""An upstream is taken out after this many failed probes in a row."""

CONNECT_S = 5.0
"""Time for a connection to an upstream [s]."""


class Upstreams:
    """The servers at ``urls``; ``announce`` gets a line when one goes down or comes up."""

    def __init__(self, urls: Sequence[str], key: str | None, announce: Callable[[str], object] = print):
        try:
            import httpx
        except ImportError:
            raise ConfigError("upstreams need the package httpx; run: pip install 'colonnade[serve]'") from None
        self.urls, self.key, self.router = [url.rstrip("/") for url in urls], key, Router(len(urls))
        self.draining, self.running, self.stats = False, 0, Stats()
        self.failure: ColonnadeError | None = None
        """None: a server with all upstreams down continues to probe them."""
        self.ready, self.exited, self.idle = (asyncio.Event() for _ in range(3))
        """An upstream is up; (never); no request runs."""
        self.idle.set()
        self.http = httpx.AsyncClient(
            timeout=httpx.Timeout(None, connect=CONNECT_S), limits=httpx.Limits(max_connections=None), trust_env=False
        )
        self._failures = [MAX_FAILURES] * len(urls)
        """Failed probes in a row; from :data:`MAX_FAILURES` on the upstream is down."""
        self._reasons = [""] * len(urls)
        self._limits: list[set[asyncio.Timeout]] = [set() for _ in urls]
        """Of the requests that each upstream has: they end those of one that is lost, and all after the drain."""
        self.capabilities, self.note = list[str](), ""
        self._announce, self._aborted = announce, False

    @property
    def up(self) -> list[int]:
        """Upstreams that take requests."""
        return [i for i, failures in enumerate(self._failures) if failures < MAX_FAILURES]

    @property
    def replicas(self) -> Mapping[str, bool]:
        """Whether each upstream is up, by URL."""
        return {url: failures < MAX_FAILURES for url, failures in zip(self.urls, self._failures, strict=True)}

    # The application's routes for the model are not reached: their requests are forwarded before.
    context = max_request_tokens = cache_tokens = 0
    tools = pooler = None

    def run(self, request: object) -> AsyncGenerator[tuple[int, Any]]:
        """Raises: requests are forwarded."""
        raise self.unavailable()

    def run_batches(self, request: object) -> AsyncGenerator[list[tuple[int, Any]]]:
        """Raises: requests are forwarded."""
        raise self.unavailable()

    async def ask(self, do: str, **fields: Any) -> dict[str, Any]:
        """Raises :class:`RequestError`: there is no engine to ask."""
        raise RequestError("this server has no engine; send the request to its upstreams", status=404)

    def resident_bytes(self) -> int:
        """Memory of engines on this machine: none."""
        return 0

    def unavailable(self) -> RequestError:
        """The error (503) of a request that no upstream can run now."""
        if self.draining:
            return RequestError("the server is shutting down; try again later", status=503, code="shutting_down")
        return RequestError("no server for this model is ready; try again later", status=503, code="loading")

    @contextlib.contextmanager
    def request(self) -> Iterator[None]:
        """Count a request that runs in the block; raises :class:`RequestError` while none is accepted."""
        if self.draining or not self.up:
            raise self.unavailable()
        self._count(1)
        try:
            yield
        finally:
            self._count(-1)

    @asynccontextmanager
    async def limit(self, upstream: int) -> AsyncIterator[None]:
        """End the block with a TimeoutError if ``upstream`` is lost; RequestError if the server stops."""
        limit = asyncio.timeout(0 if self._aborted else None)
        try:
            async with limit:
                self._limits[upstream].add(limit)
                yield
        except TimeoutError:
            if self._aborted:
                raise self.unavailable() from None
            raise
        finally:
            self._limits[upstream].discard(limit)

    def abort(self) -> None:
        """End all running requests with an error."""
        self._aborted = True
        for upstream in range(len(self.urls)):
            self._end_requests(upstream)

    @asynccontextmanager
    async def probing(self, give_up: asyncio.Event) -> AsyncIterator[None]:
        """Probe all upstreams once, then repeatedly until the end of the block; ``give_up`` ends the first."""
        probes = [asyncio.create_task(self._probe(i)) for i in range(len(self.urls))]
        stop = asyncio.create_task(give_up.wait())
        await asyncio.wait((stop, asyncio.gather(*probes)), return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        for url, (i, reason) in zip(self.urls, enumerate(self._reasons), strict=True):
            if i not in self.up:
                self._announce(f"upstream {url} is not ready: {reason}")
        tasks = [asyncio.create_task(self._probe_for_ever(i)) for i in range(len(self.urls))]
        try:
            yield
        finally:
            self.draining = True
            for task in (*probes, *tasks):
                task.cancel()
            await asyncio.gather(*probes, *tasks, return_exceptions=True)
            await self.http.aclose()

    async def _probe_for_ever(self, upstream: int) -> None:
        while True:
            await asyncio.sleep(PROBE_INTERVAL_S)
            was_up = upstream in self.up
            lost = await self._probe(upstream)
            is_up = upstream in self.up
            if is_up and not was_up:
                self._announce(f"upstream {self.urls[upstream]} is up")
            if was_up and not is_up:
                left = f"{plural(len(self.up), 'upstream')} left"
                self._announce(f"upstream {self.urls[upstream]} is down, {left}: {self._reasons[upstream]}")
                self.router.clear(upstream)
            if lost and not is_up:
                self._end_requests(upstream)

    async def _probe(self, upstream: int) -> bool:
        """Ask whether ``upstream`` is ready; True if it did not respond."""
        import httpx

        lost = False
        try:
            reply = await self.http.get(f"{self.urls[upstream]}/ready", timeout=PROBE_S)
            reason = "" if reply.status_code == 200 else f"GET /ready gave status {reply.status_code}"
        except httpx.HTTPError as error:
            reason, lost = f"GET /ready failed: {str(error) or type(error).__name__}", True
        self._reasons[upstream] = reason
        self._failures[upstream] = self._failures[upstream] + 1 if reason else 0
        if self.up:
            self.ready.set()
        else:
            self.ready.clear()
        return lost

    def _end_requests(self, upstream: int) -> None:
        now_s = asyncio.get_running_loop().time()
        for limit in self._limits[upstream]:
            limit.reschedule(now_s)

    def _count(self, change: int) -> None:
        self.running += change
        self.stats.running = self.running
        if self.running:
            self.idle.clear()
        else:
            self.idle.set()
