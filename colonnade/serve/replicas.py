"""Several engines with the same model on this machine, behind a router, with the interface of one engine.

    routes -> Replicas.run -> router.choose -> EngineClient.run of a replica -> outputs
                  ^---------- the replica died: the rest of the request (continuation.py), on another

Each replica has its own processes, cores or GPUs, and cache (:mod:`colonnade.serve.replica_processes`). While none is
up, running requests wait for one, and new ones are refused.
"""

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, overload

from colonnade.errors import ColonnadeError, RequestError
from colonnade.serve.continuation import Progress
from colonnade.serve.engine_client import EngineClient, timed_out
from colonnade.serve.engine_process import wait_first
from colonnade.serve.generation_request import GenerationRequest
from colonnade.serve.ipc import Message
from colonnade.serve.pooler_spec import PoolerSpec
from colonnade.serve.pooling_request import PoolingOutput, PoolingRequest
from colonnade.serve.request import Output, Stats
from colonnade.serve.router import Router, text_bytes
from colonnade.serve.tool_calls import ToolNotation


class Replicas:
    """``count`` engines, numbered from 0; with one, requests also survive its death, if it is restarted."""

    def __init__(self, count: int):
        self.draining = False
        self.failure: ColonnadeError | None = None
        self.ready, self.exited, self.idle = (asyncio.Event() for _ in range(3))
        """Requests are accepted; none is left; no request runs."""
        self.idle.set()
        self.running = 0
        """Number of HTTP requests that wait for outputs."""
        self.router = Router(count)
        self.clients = [EngineClient() for _ in range(count)]
        self.started = False
        """Whether all have been up."""
        self.swapped_path: str | None = None
        """The checkpoint with the weights that replaced the first ones."""
        self._loaded = set[int]()
        self.ended_stats = Stats()
        """Counters of engines that have died."""
        self._aborted, self._changed = False, asyncio.Event()
        """``_changed`` is replaced when it is set: another replica is up, or none is left."""

    # -- the model's properties, from a replica that has loaded it ----------------------------------------------------

    @property
    def _model(self) -> EngineClient:
        return next((client for client in self.clients if client.ready.is_set()), self.clients[0])

    @property
    def context(self) -> int:
        """Maximum number of tokens of a request that the model supports."""
        return self._model.context

    @property
    def max_request_tokens(self) -> int:
        """Tokens that a request may have, prompt and output, on any replica."""
        return min((self.clients[i].max_request_tokens for i in self.up), default=0)

    @property
    def cache_tokens(self) -> int:
        """Tokens that the cache of any replica holds."""
        return min((self.clients[i].cache_tokens for i in self.up), default=0)

    @property
    def tools(self) -> ToolNotation | None:
        """How the model writes tool calls, once it is loaded."""
        return self._model.tools

    @property
    def capabilities(self) -> list[str]:
        """The endpoints that the model supports."""
        return self._model.capabilities

    @property
    def pooler(self) -> PoolerSpec | None:
        """The pooling of the hidden states; None if the model generates text."""
        return self._model.pooler

    @property
    def note(self) -> str:
        """A note about the model for the operator, or empty."""
        return self._model.note

    # -- the replicas' state --------------------------------------------------------------------------------------

    @property
    def up(self) -> list[int]:
        """Replicas that take requests."""
        return [i for i, client in enumerate(self.clients) if i in self._loaded and not client.failure]

    @property
    def replicas(self) -> Mapping[int, bool]:
        """Whether each replica accepts requests; empty if there is one engine."""
        up = self.up
        return {i: i in up for i in range(len(self.clients))} if len(self.clients) > 1 else {}

    @property
    def stats(self) -> Stats:
        """The sums over all replicas, counters also over those that have died."""
        return sum_stats([self.ended_stats, *(client.stats for client in self.clients)])

    def resident_bytes(self) -> int:
        """RSS of the engine processes."""
        return sum(self.clients[i].resident_bytes() for i in self.up)

    def set_up(self, replica: int) -> None:
        """Send requests to ``replica``, whose engine is ready."""
        self._loaded.add(replica)
        self.started = self.started or len(self.up) == len(self.clients)
        if self.started:
            self.ready.set()
        self._notify()

    def set_down(self, replica: int) -> None:
        """Drop the engine of ``replica``, which has ended; another connection replaces it."""
        self.ended_stats = sum_stats([self.ended_stats, _counters(self.clients[replica].stats)])
        self.router.clear(replica)
        self._loaded.discard(replica)
        self.clients[replica] = EngineClient()
        if not self.up:
            self.ready.clear()

    def fail(self, failure: ColonnadeError) -> None:
        """No replica is left, or the start has failed."""
        self.failure = self.failure or failure
        self.exited.set()
        self._notify()

    def unavailable(self) -> RequestError:
        """The error (503) of a request that no replica can run now."""
        if self.failure:
            return RequestError(f"the engine failed: {self.failure}", status=503, code="engine_failed")
        if self.draining:
            return RequestError("the server is shutting down; try again later", status=503, code="shutting_down")
        return RequestError("the model is still loading; try again later", status=503, code="loading")

    # -- requests -------------------------------------------------------------------------------------------------

    @overload
    def run(self, request: GenerationRequest) -> AsyncGenerator[tuple[int, Output]]: ...
    @overload
    def run(self, request: PoolingRequest) -> AsyncGenerator[tuple[int, PoolingOutput]]: ...
    async def run(self, request: GenerationRequest | PoolingRequest) -> AsyncGenerator[tuple[int, Any]]:
        """Yield the outputs of :meth:`run_batches` one by one."""
        async with aclosing(self.run_batches(request)) as batches:
            async for batch in batches:
                for each in batch:
                    yield each

    async def run_batches(self, request: GenerationRequest | PoolingRequest) -> AsyncGenerator[list[tuple[int, Any]]]:
        """Yield lists of (index of the completion, output) as outputs arrive; closing it cancels the request.

        Raises :class:`RequestError` as one engine does, but continues elsewhere if a replica dies.
        """
        if self.failure or self.draining or not self.ready.is_set():
            raise self.unavailable()
        progress, full, begun = Progress(request), set[int](), False
        todo, prompt = progress.request, prompt_bytes(request)
        self.running += 1
        self.idle.clear()
        try:
            while True:
                await self._wait_until_up(progress)
                replica = self.router.choose(prompt, [i for i in self.up if i not in full] or self.up)
                try:
                    async with aclosing(self.clients[replica].run_batches(todo)) as batches:
                        async for batch in batches:
                            begun = True
                            if new := [(index, output) for index, output in batch if progress.observe(index, output)]:
                                yield new
                    return
                except RequestError as error:
                    full.add(replica)
                    if error.code == "engine_failed" and not self._aborted:
                        todo, full = progress.remaining_request(), set()
                    elif error.code != "queue_full" or begun or full.issuperset(self.up):
                        raise
                finally:
                    self.router.end(replica)
        finally:
            self.running -= 1
            if not self.running:
                self.idle.set()

    async def _wait_until_up(self, progress: Progress) -> None:
        """Wait until a replica is up; raises :class:`RequestError` if none will be, or the request times out."""
        while not self.up:
            if self.failure or self._aborted:
                raise self.unavailable()
            changed, remaining_s = self._changed, progress.remaining_s
            await wait_first(changed.wait(), timeout_s=remaining_s)
            if not changed.is_set() and progress.request.timeout_s is not None:
                raise timed_out(progress.request.timeout_s)

    async def ask(self, do: str, **fields: Any) -> Message:
        """Send the message ``do`` to a replica and return its reply; the prefix caches of all are reset."""
        if do == "swap" and len(self.clients) > 1:
            raise RequestError(
                "a server with several replicas cannot swap weights; restart it with the other checkpoint"
            )
        if do == "reset_cache":
            for replica in self.up:
                self.router.clear(replica)
            answers = await asyncio.gather(*(self.clients[i].ask(do, **fields) for i in self.up))
            return answers[0]
        while self.up and not self.draining:
            try:
                answer = await self.clients[min(self.up, key=self.router.loads.__getitem__)].ask(do, **fields)
                if do == "swap":
                    self.swapped_path = answer["path"]
                return answer
            except RequestError as error:
                if error.code != "engine_failed":
                    raise
        raise self.unavailable()

    def abort(self) -> None:
        """End all running requests with an error."""
        self._aborted = True
        for client in self.clients:
            client.draining = True
            client.abort()
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def prompt_bytes(request: GenerationRequest | PoolingRequest) -> bytes:
    """The bytes by which the prompt of ``request`` is compared: the first one's, or those of all messages."""
    if isinstance(request, PoolingRequest):
        return b""  # encoders have no prefix cache
    if request.messages is None:
        return text_bytes(request.prompts[0])
    return b"".join(map(text_bytes, request.messages))


def sum_stats(several: Sequence[Stats]) -> Stats:
    """The sum of all fields."""
    total = Stats()
    for stats in several:
        for each in dataclasses.fields(Stats):
            if each.name != "finished":
                setattr(total, each.name, getattr(total, each.name) + getattr(stats, each.name))
        for reason, count in stats.finished.items():
            total.finished[reason] = total.finished.get(reason, 0) + count
    return total


def _counters(stats: Stats) -> Stats:
    """``stats`` of an engine that has died: it has no requests and no pages."""
    return dataclasses.replace(stats, running=0, waiting=0, pages=0, pages_used=0)
