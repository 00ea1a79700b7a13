"""Starts, supervises and stops the HTTP processes (fronts) of a server with ``--serve.fronts``.

    server process ── control channel ── front 0, front 1, … ──┐
          └── engines <── a connection from each engine ───────┘

A front that dies is restarted. The engines cancel its requests when its connections close, and these no longer count
against their keys. After :data:`MAX_DEATHS` deaths in :data:`DEATHS_S` it is removed; when the last one is removed, the
server fails. The interface is that of :class:`~colonnade.serve.http_server.HttpServer`.
"""

import asyncio
import contextlib
import dataclasses
import socket
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

from colonnade.config import ServeConfig
from colonnade.errors import ColonnadeError, WorkerError
from colonnade.serve.api.api_keys import KeyRing
from colonnade.serve.api.connection import ConnectionLimits
from colonnade.serve.api.shared_limits import FrontUsage
from colonnade.serve.child_process import exit_reason, start_child
from colonnade.serve.control_channel import ControlChannel
from colonnade.serve.engine_client import EngineClient
from colonnade.serve.engine_process import MAX_MESSAGE_BYTES, socket_folder, wait_first
from colonnade.serve.front import FrontOptions, run_front
from colonnade.serve.ipc import Message
from colonnade.serve.replica_processes import DEATHS_S, MAX_DEATHS
from colonnade.serve.replicas import Replicas
from colonnade.serve.request import Stats
from colonnade.serve.served_models import ServedModels

METRICS_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
"""With it prometheus_client keeps values in files that all processes read; it must be set before it is imported."""

EXIT_S = 5.0
"""Time for the fronts to exit before they are killed [s]."""

DRAIN_ANSWER_S = 1.0
"""Time for a front to report its number of requests [s]."""


class _FrontProcess:
    """One run of one front."""

    def __init__(self, options: FrontOptions, keys: KeyRing):
        self.options, self.use = options, FrontUsage(keys)
        self.process: BaseProcess = start_child(
            run_front, (options,), f"colonnade-front-{options.number}", {METRICS_VARIABLE: options.metrics}
        )
        self.control: ControlChannel | None = None
        self.has_sockets = False
        """Whether engines may connect to it."""
        self.listening, self.ready, self.idle, self.died = (asyncio.Event() for _ in range(4))
        asyncio.get_running_loop().add_reader(self.process.sentinel, self._on_death)

    def _on_death(self) -> None:
        asyncio.get_running_loop().remove_reader(self.process.sentinel)
        self.died.set()


class Fronts:
    """``config.fronts`` HTTP processes for the engines of ``models``."""

    def __init__(
        self,
        models: ServedModels,
        config: ServeConfig,
        keys: KeyRing,
        limits: ConnectionLimits,
        announce: Callable[[str], object],
    ):
        self._models, self._config, self._keys, self._limits = models, config, keys, limits
        self._announce = announce
        self._fronts: dict[int, _FrontProcess] = {}
        self._engines: dict[tuple[str, int], EngineClient] = {}
        """The engines that are up, by model and replica."""
        self._started = self._stopping = False
        self._failure: ColonnadeError | None = None
        self.closed = asyncio.Event()
        """No front is left, or one could not be started."""

    @contextlib.asynccontextmanager
    async def running(self, reserved: socket.socket) -> AsyncIterator[None]:
        """Start all fronts, and wait until they listen at the address of ``reserved``; stop them at the end."""
        with socket_folder() as folder:
            options = FrontOptions(
                0, self._models.names, self._config, self._limits, reserved.family, reserved.getsockname(), folder, 0
            )
            Path(options.metrics).mkdir()
            async with await asyncio.start_unix_server(self._accept, options.control, limit=MAX_MESSAGE_BYTES):
                keeping = [
                    asyncio.create_task(self._supervise(options._replace(number=i))) for i in range(self._config.fronts)
                ]
                watching = [asyncio.create_task(self._report_failure(name)) for name in self._models.names]
                try:
                    await wait_first(self._all("listening"), self.closed.wait())
                    self._started = not self.closed.is_set()
                    if self._started:
                        yield
                    if self._failure:
                        raise self._failure
                finally:
                    self.abort()
                    await asyncio.wait(keeping, timeout=EXIT_S)
                    await self.kill()
                    for task in watching:
                        task.cancel()
                    await asyncio.gather(*keeping)
                    await asyncio.gather(*watching, return_exceptions=True)

    def connect(self, model: str, replica: int, engine: EngineClient) -> None:
        """An engine is up: let it connect to all fronts."""
        self._engines[model, replica] = engine
        for front in self._fronts.values():
            self._connect(front, model, replica)

    async def wait_ready(self) -> None:
        """Wait until all fronts are connected to all engines."""
        await self._all("ready")

    async def drain(self) -> int:
        """Refuse new requests; returns the number of those that run."""
        self._stopping = True
        self._models.drain()
        counts = await asyncio.gather(*(self._drain(front) for front in self._fronts.values()))
        return sum(counts)

    async def wait_idle(self) -> None:
        """Wait until no request runs, after :meth:`drain`."""
        await self._all("idle")

    def abort(self) -> None:
        """End all running requests with an error, and stop the fronts."""
        self._stopping = True
        self._send("exit")

    async def kill(self) -> None:
        """Kill the fronts that are left."""
        for front in self._fronts.values():
            if front.process.is_alive():
                front.process.kill()

    def keys_changed(self) -> None:
        """The server has read the key file again."""
        self._send("keys", keys=[key.model_dump() for key in self._keys.all])

    # -- the processes ------------------------------------------------------------------------------------------------

    async def _supervise(self, options: FrontOptions) -> None:
        """Keep one front up until the server stops, or until it has died too often."""
        deaths: deque[float] = deque(maxlen=MAX_DEATHS + 1)
        while not self._stopping:
            front = self._fronts[options.number] = _FrontProcess(options, self._keys)
            await front.died.wait()
            await asyncio.to_thread(front.process.join)
            front.use.end_all()
            if self._stopping:
                break
            deaths.append(time.monotonic())
            reason = exit_reason(front.process.exitcode)
            if not front.listening.is_set() or (len(deaths) > MAX_DEATHS and deaths[-1] - deaths[0] < DEATHS_S):
                if self._started:
                    self._announce(f"front {options.number} {reason}; it was removed")
                if not self._started or len(self._fronts) == 1:
                    self._failure = WorkerError(f"the HTTP process {reason}; restart the server")
                break
            self._announce(f"front {options.number} {reason}; it is being restarted")
            options = options._replace(generation=options.generation + 1)
        del self._fronts[options.number]
        if not self._fronts or self._failure:
            self.closed.set()

    async def _all(self, event: str) -> None:
        """Wait until all fronts have set ``event``, or have died."""
        for front in list(self._fronts.values()):
            await wait_first(getattr(front, event).wait(), front.died.wait())

    # -- messages -----------------------------------------------------------------------------------------------------

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Talk to a front that has connected."""
        front: _FrontProcess | None = None

        async def handle(message: Message) -> Message | None:
            nonlocal front
            if message["do"] == "hello":
                front = self._fronts[message["front"]]
                front.control = channel
                return self._setup()
            assert front is not None, "the first message is hello"
            return await self._handle(front, message)

        channel = ControlChannel(reader, writer, handle)
        await channel.run()

    def _setup(self) -> Message:
        ended = {
            name: dataclasses.asdict(engine.ended_stats if isinstance(engine, Replicas) else Stats())
            for name, engine in self._models.all
        }
        return {"keys": [key.model_dump() for key in self._keys.all], "stats": ended}

    async def _handle(self, front: _FrontProcess, message: Message) -> Message | None:
        match message["do"]:
            case "engines":
                front.has_sockets = True
                for model, replica in self._engines:
                    self._connect(front, model, replica)
            case "listening" | "ready" | "idle" as event:
                getattr(front, event).set()
            case "drain":
                self._models.stop_requested.set()
                return {"running": await self.drain()}
            case "swap":
                return await self._models.swap(message["model"], message["path"])
            case _:
                return await front.use.handle(message)
        return None

    def _connect(self, front: _FrontProcess, model: str, replica: int) -> None:
        if front.has_sockets:
            address = front.options.engine_address(self._models.names.index(model), replica)
            self._engines[model, replica].connect_front(address)

    async def _drain(self, front: _FrontProcess) -> int:
        if front.control is None:
            return 0
        try:
            async with asyncio.timeout(DRAIN_ANSWER_S):
                return (await front.control.ask("drain"))["running"]
        except (TimeoutError, ColonnadeError):  # it hangs, or has died
            return 0

    async def _report_failure(self, model: str) -> None:
        """Notify the fronts when no engine of ``model`` is left."""
        _, engine = self._models.find(model)
        await engine.exited.wait()
        if engine.failure:
            self._send("failed", model=model, reason=engine.failure.message)

    def _send(self, do: str, **fields: object) -> None:
        for front in self._fronts.values():
            if front.control:
                front.control.send(do, **fields)
