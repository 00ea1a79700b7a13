"""Several engines with the same model on this machine, behind a router, with the interface of one engine.

    routes -> Replicas.run -> router.choose -> EngineClient.run of a replica -> outputs
                  ^---------- the replica died: the rest of the request (continuation.py), on another

Each replica has its own processes, cores or GPUs, and cache. One that dies is started again at once, after
:data:`MAX_DEATHS` deaths in :data:`DEATHS_S` no more. While none is up, requests that run wait for one, and new ones
are refused; when none is left, the server fails.
"""

import asyncio
import dataclasses
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from typing import Any, overload

from colonnade.config import Plan, ServeConfig
from colonnade.errors import ColonnadeError, RequestError, WorkerError
from colonnade.serve.continuation import Progress
from colonnade.serve.engine_process import OpenModel, engine_process, wait_first
from colonnade.serve.ipc import EngineClient, GenerationRequest, Message, timed_out
from colonnade.serve.pooler_spec import PoolerSpec
from colonnade.serve.pooling_request import PoolingOutput, PoolingRequest
from colonnade.serve.replica_placement import Placement
from colonnade.serve.request import Output, Stats
from colonnade.serve.router import Router, text_bytes
from colonnade.serve.tool_calls import ToolNotation

MAX_DEATHS = 3
"""A replica is started again after this many deaths within :data:`DEATHS_S`, and left out after one more."""

DEATHS_S = 600.0
"""[s]"""


class Replicas:
    """A replica for each of ``placements``; ``announce`` gets a line when one dies, and when it is up again."""

    def __init__(self, placements: Sequence[Placement], announce: Callable[[str], object] = print):
        count = len(placements)
        self.draining = False
        self.failure: ColonnadeError | None = None
        self.ready, self.exited, self.idle, self.stop_requested = (asyncio.Event() for _ in range(4))
        """Requests are accepted; none is left; no request runs; the server is to drain and stop."""
        self.idle.set()
        self.running = 0
        """Number of HTTP requests that wait for outputs."""
        self.router = Router(count)
        self._placements = placements
        self._clients = [EngineClient() for _ in range(count)]
        self._left = set(range(count))
        """Replicas that are up or starting."""
        self._ended_stats = Stats()
        """Counters of engines that have died."""
        self._announce, self._started, self._aborted = announce, False, False
        """``_started``: all have been up."""
        self._stopping, self._changed = asyncio.Event(), asyncio.Event()
        """``_changed`` is replaced when it is set: another replica is up, or none is left."""

    # -- the model's properties, from a replica that has loaded it ----------------------------------------------------

    @property
    def _model(self) -> EngineClient:
        return next((client for client in self._clients if client.ready.is_set()), self._clients[0])

    @property
    def context(self) -> int:
        """Largest number of tokens of a request that the model supports."""
        return self._model.context

    @property
    def max_request_tokens(self) -> int:
        """Tokens that a request may have, prompt and output, on any replica."""
        return min((self._clients[i].max_request_tokens for i in self.up), default=0)

    @property
    def tools(self) -> ToolNotation | None:
        """How the model writes tool calls, once it is loaded."""
        return self._model.tools

    @property
    def capabilities(self) -> list[str]:
        """What the model is served for."""
        return self._model.capabilities

    @property
    def pooler(self) -> PoolerSpec | None:
        """What is made of the hidden states; None if the model generates text."""
        return self._model.pooler

    @property
    def note(self) -> str:
        """What the operator should know about the model, or nothing."""
        return self._model.note

    # -- the replicas' state --------------------------------------------------------------------------------------

    @property
    def up(self) -> list[int]:
        """Replicas that take requests."""
        return [i for i, client in enumerate(self._clients) if client.ready.is_set() and not client.failure]

    @property
    def replicas(self) -> Mapping[int, bool]:
        """Whether each replica takes requests."""
        up = self.up
        return {i: i in up for i in range(len(self._clients))}

    @property
    def stats(self) -> Stats:
        """The sums over all replicas, counters also over those that have died."""
        return sum_stats([self._ended_stats, *(client.stats for client in self._clients)])

    def resident_bytes(self) -> int:
        """RSS of the engine processes."""
        return sum(self._clients[i].resident_bytes() for i in self.up)

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
        """Yield (index of the completion, output) as outputs arrive; closing the generator cancels the request.

        Raises :class:`RequestError` as one engine does, but goes on elsewhere if a replica dies.
        """
        if self.failure or self.draining or not self.ready.is_set():
            raise self.unavailable()
        progress, full, begun = Progress(request), set[int](), False
        todo, prompt = progress.request, prompt_bytes(request)
        self.running += 1
        self.idle.clear()
        try:
            while True:
                await self._until_up(progress)
                replica = self.router.choose(prompt, [i for i in self.up if i not in full] or self.up)
                try:
                    async with aclosing(self._clients[replica].run(todo)) as outputs:
                        async for index, output in outputs:
                            begun = True
                            if progress.observe(index, output):
                                yield index, output
                    return
                except RequestError as error:
                    full.add(replica)
                    if error.code == "engine_failed" and not self._aborted:
                        todo, full = progress.remaining(), set()
                    elif error.code != "queue_full" or begun or full.issuperset(self.up):
                        raise
                finally:
                    self.router.end(replica)
        finally:
            self.running -= 1
            if not self.running:
                self.idle.set()

    async def run_batches(self, request: GenerationRequest | PoolingRequest) -> AsyncGenerator[list[tuple[int, Any]]]:
        """Yield the outputs of :meth:`run` in lists of one."""
        async with aclosing(self.run(request)) as outputs:
            async for each in outputs:
                yield [each]

    async def _until_up(self, progress: Progress) -> None:
        """Wait until a replica is up; raises :class:`RequestError` if none will be, or the request times out."""
        while not self.up:
            if self.failure or self._aborted:
                raise self.unavailable()
            changed, left_s = self._changed, progress.left_s
            await wait_first(changed.wait(), timeout_s=left_s)
            if not changed.is_set() and progress.request.timeout_s is not None:
                raise timed_out(progress.request.timeout_s)

    async def ask(self, do: str, **fields: Any) -> Message:
        """Send the message ``do`` to a replica and return its answer; the prefix caches of all are reset."""
        if do == "swap":
            raise RequestError(
                "a server with several replicas does not swap weights; start it again with the other checkpoint"
            )
        if do == "reset_cache":
            for replica in self.up:
                self.router.forget(replica)
            answers = await asyncio.gather(*(self._clients[i].ask(do, **fields) for i in self.up))
            return answers[0]
        while self.up and not self.draining:
            try:
                return await self._clients[min(self.up, key=self.router.loads.__getitem__)].ask(do, **fields)
            except RequestError as error:
                if error.code != "engine_failed":
                    raise
        raise self.unavailable()

    def abort(self) -> None:
        """End all running requests with an error."""
        self._aborted = True
        for client in self._clients:
            client.draining = True
            client.abort()
        self._notify()

    # -- processes ------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def engine_processes(
        self,
        open_model: OpenModel,
        plan: Plan,
        config: ServeConfig,
        device: str,
        give_up: asyncio.Event,
        kill: asyncio.Event,
    ) -> AsyncIterator[None]:
        """Start all replicas and wait until they are up; keep them up until the end of the block, then stop them.

        Setting ``give_up`` ends the wait; setting ``kill`` kills them at the end. Raises what the start of one raised.
        """

        def start(replica: int, client: EngineClient, pages: int) -> AbstractAsyncContextManager[EngineClient]:
            # One that is started again gets the cache that it had: the others have theirs already.
            own = config.replace(pages=pages, replicas=1) if pages else config
            return engine_process(
                open_model, plan, own, device, self._stopping, kill, client, self._placements[replica]
            )

        tasks = [asyncio.create_task(self._keep(i, start)) for i in range(len(self._clients))]
        for task in tasks:
            task.add_done_callback(self._on_end)
        try:
            await wait_first(self.ready.wait(), self.exited.wait(), give_up.wait())
            if self.failure:
                raise self.failure
            yield
        finally:
            self.draining = True
            self._stopping.set()
            self._notify()
            await asyncio.gather(*tasks)

    async def _keep(
        self, replica: int, start: Callable[[int, EngineClient, int], AbstractAsyncContextManager[EngineClient]]
    ) -> None:
        """Keep ``replica`` up until the server stops, or until it has died too often."""
        deaths: deque[float] = deque(maxlen=MAX_DEATHS + 1)
        pages = 0
        while not self._stopping.is_set():
            client = self._clients[replica]
            try:
                async with start(replica, client, pages):
                    if client.ready.is_set():
                        pages = client.stats.pages
                        self._on_up(replica, again=bool(deaths))
                    await wait_first(client.exited.wait(), self._stopping.wait())
                failure = client.failure
            except ColonnadeError as error:
                failure = error
            if self._stopping.is_set() or failure is None:
                break
            self._ended_stats = sum_stats([self._ended_stats, _counters(client.stats)])
            self.router.forget(replica)
            deaths.append(time.monotonic())
            if not self.up:
                self.ready.clear()
            if not self._started or (len(deaths) > MAX_DEATHS and deaths[-1] - deaths[0] < DEATHS_S):
                self._leave_out(replica, failure)
                break
            self._clients[replica] = EngineClient()
            self._announce(f"replica {replica} died and is started again: {_reason(failure)}")

    def _on_up(self, replica: int, *, again: bool) -> None:
        if again:
            self._announce(f"replica {replica} is up again")
        self._started = self._started or len(self.up) == len(self._clients)
        if self._started:
            self.ready.set()
        self._notify()

    def _leave_out(self, replica: int, failure: ColonnadeError) -> None:
        """Go on without ``replica``, or fail: if it has never been up, or if it was the last one."""
        self._clients[replica] = EngineClient()
        self._left.discard(replica)
        if self._left and self._started:
            left = f"{len(self._left)} of {len(self._clients)} are left"
            self._announce(f"replica {replica} died {MAX_DEATHS + 1} times and is left out, {left}: {_reason(failure)}")
        else:
            self._fail(failure)

    def _on_end(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (bug := task.exception()):
            self._fail(WorkerError(f"a replica's supervisor failed with {type(bug).__name__}: {bug}"))

    def _fail(self, failure: ColonnadeError) -> None:
        self.failure = self.failure or failure
        self.exited.set()
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


def _reason(failure: ColonnadeError) -> str:
    """Why a replica died, without the remedy for a server of one engine."""
    return str(failure).removesuffix("; start the server again")
