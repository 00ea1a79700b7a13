"""Starts the engines of :class:`Replicas`, restarts those that die, and stops all at the end.

starting -> up -> died -> restarting, with a cache of the same size and the weights that were swapped in
└ after MAX_DEATHS deaths in DEATHS_S: removed; without the last one the model fails
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from colonnade.config import Plan, ServeConfig
from colonnade.errors import ColonnadeError, RequestError, WorkerError
from colonnade.serve.engine_client import EngineClient
from colonnade.serve.engine_process import OpenModel, engine_process, wait_first
from colonnade.serve.replica_placement import Placement
from colonnade.serve.replicas import Replicas
from colonnade.serve.start_order import Turn

MAX_DEATHS = 3
"""An engine is restarted after up to this many deaths within :data:`DEATHS_S`, and removed after one more."""

DEATHS_S = 600.0
"""[s]"""

PAUSE_S = 1.0
"""Time before an engine whose process could not be started is started again [s]."""


class ReplicaProcesses:
    """The processes of ``replicas``, one engine for each of ``placements``, which allocates its cache in its turn.

    ``announce`` gets a line when one dies, and when it is up again; ``labels`` are their names. ``on_up`` is called
    with the number and the connection of one that is up.
    """

    def __init__(
        self,
        replicas: Replicas,
        open_model: OpenModel,
        plan: Plan,
        config: ServeConfig,
        device: str,
        placements: Sequence[Placement],
        turns: Sequence[Turn],
        labels: Sequence[str],
        announce: Callable[[str], object],
        on_up: Callable[[int, EngineClient], object],
    ):
        self._replicas, self._open_model, self._plan, self._config = replicas, open_model, plan, config
        self._device, self._placements, self._turns = device, placements, turns
        self._labels, self._announce, self._on_up = labels, announce, on_up
        self._left = set(range(len(placements)))
        """Replicas that are up or starting."""
        self._stopping = asyncio.Event()

    @asynccontextmanager
    async def running(self, kill: asyncio.Event) -> AsyncIterator[None]:
        """Start all engines; keep them up until the end of the block, then stop them, or if ``kill`` is set kill them.

        Does not wait until they are up: ``replicas.ready`` or ``replicas.exited`` is set then.
        """
        tasks = [asyncio.create_task(self._supervise(i, kill)) for i in self._left]
        for task in tasks:
            task.add_done_callback(self._on_end)
        try:
            yield
        finally:
            self._replicas.draining = True
            self.stop()
            await asyncio.gather(*tasks)

    def stop(self) -> None:
        """Ask all engines to stop."""
        self._stopping.set()

    async def _supervise(self, replica: int, kill: asyncio.Event) -> None:
        """Keep ``replica`` up until the server stops, or until it has died too often."""
        deaths: deque[float] = deque(maxlen=MAX_DEATHS + 1)
        config, placement, label = self._config, self._placements[replica], self._labels[replica]
        while not self._stopping.is_set():
            client = self._replicas.clients[replica]
            try:
                async with engine_process(
                    self._open_model, self._plan, config, self._device, self._stopping, kill, client, placement,
                    self._turns[replica],
                ):  # fmt: skip
                    if client.ready.is_set():
                        # If it is started again it gets the cache that it had: the others have theirs already.
                        config, placement = (
                            config.replace(pages=client.stats.pages or None, replicas=1),
                            placement.alone,
                        )
                        if path := self._replicas.swapped_path:
                            await client.ask("swap", path=path)
                        self._replicas.set_up(replica)
                        self._on_up(replica, client)
                        if deaths:
                            self._announce(f"{label} is up again")
                    await wait_first(client.exited.wait(), self._stopping.wait())
                failure = client.failure
            except RequestError as error:  # the swap was refused
                failure = client.failure or error
            except ColonnadeError as error:
                failure = error
            except OSError as error:  # no memory for a process, no descriptor, no space for its socket: others go on
                failure = WorkerError(f"its process cannot be started: {error}")
                await wait_first(self._stopping.wait(), timeout_s=PAUSE_S)
            if self._stopping.is_set() or failure is None:
                break
            self._replicas.set_down(replica)
            deaths.append(time.monotonic())
            if not self._replicas.started or (len(deaths) > MAX_DEATHS and deaths[-1] - deaths[0] < DEATHS_S):
                self._remove_replica(replica, failure)
                break
            self._announce(f"{label} died and is being restarted: {_reason(failure)}")

    def _remove_replica(self, replica: int, failure: ColonnadeError) -> None:
        """Continue without ``replica``, or fail: if it has never been up, or if it was the last one."""
        self._left.discard(replica)
        died = f"{self._labels[replica]} died {MAX_DEATHS + 1} times and was removed"
        if self._left and self._replicas.started:
            left = f"{len(self._left)} of {len(self._placements)} are left"
            self._announce(f"{died}, {left}: {_reason(failure)}")
        else:
            if self._replicas.started:
                self._announce(f"{died}: {_reason(failure)}")
            self._replicas.fail(failure)

    def _on_end(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (bug := task.exception()):
            self._replicas.fail(WorkerError(f"a replica's supervisor failed with {type(bug).__name__}: {bug}"))


def _reason(failure: ColonnadeError) -> str:
    """Why an engine died, without the remedy for a server of one engine."""
    return str(failure).removesuffix("; restart the server")
