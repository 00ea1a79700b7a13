"""One of several HTTP processes (fronts) of a server: its application is that of a server with one process.

    clients ──> front ── its own socket, to which each engine connects ──> engines
                  └───── control channel: limits, keys, drain, swaps ──── server process (:mod:`colonnade.serve.fronts`)

Fronts share the port by SO_REUSEPORT, and the kernel gives each new connection to one of them. Global state is
elsewhere: queue and waiting times in the engines, rate limits in the server process, metrics in shared files.
"""

import asyncio
import contextlib
import signal
from collections.abc import Coroutine, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from colonnade.config import ServeConfig
from colonnade.errors import WorkerError
from colonnade.serve.api.api_keys import ApiKey
from colonnade.serve.api.connection import ConnectionLimits, limit_unsent
from colonnade.serve.api.shadow import Shadow
from colonnade.serve.api.shared_limits import FrontKeyRing
from colonnade.serve.backend import make_engine
from colonnade.serve.child_process import ignore_interrupts
from colonnade.serve.control_channel import ControlChannel
from colonnade.serve.engine_client import EngineClient
from colonnade.serve.engine_process import MAX_MESSAGE_BYTES, wait_first
from colonnade.serve.http_server import BACKLOG, HttpServer, MiddlewareOptions, new_event_loop, open_tracer, share_port
from colonnade.serve.ipc import Message
from colonnade.serve.replicas import Replicas
from colonnade.serve.request import Stats
from colonnade.serve.served_models import ServedModels

if TYPE_CHECKING:  # needs the extra trace
    from colonnade.serve.api.tracing import Tracer

READY_S = 30.0
"""A restarted front listens once its engines are ready, or after this time [s]."""

EXIT_S = 3.0
"""Time to close the connections at the end [s]."""


class FrontOptions(NamedTuple):
    """The settings of a front at its start."""

    number: int
    models: list[str]
    config: ServeConfig
    limits: ConnectionLimits
    """Of each front."""
    family: int
    address: tuple
    """Of the port that it shares."""
    folder: str
    """For its sockets; only this user may enter."""
    generation: int
    """Number of times that it has been started."""

    @property
    def control(self) -> str:
        """The server process's socket."""
        return f"{self.folder}/control"

    @property
    def metrics(self) -> str:
        """Folder of the metrics' files."""
        return f"{self.folder}/metrics"

    def engine_address(self, model: int, replica: int) -> str:
        """The socket for one engine."""
        return f"{self.folder}/{self.number}.{self.generation}.{model}.{replica}"


def run_front(options: FrontOptions) -> None:
    """Run one front until the server process asks it to exit, or exits."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the server process decides, also if all processes get the signal
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    ignore_interrupts()
    with open_tracer(options.config) as tracer, asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(_Front(options).run(tracer))


class FrontModels(ServedModels):
    """The models in a front; operations on all fronts are done by the server process."""

    def __init__(
        self, engines: Mapping[str, EngineClient | Replicas], control: ControlChannel, adapters: Sequence[str]
    ):
        super().__init__(engines, adapters)
        self._control = control

    async def request_drain(self) -> int:
        """Ask the server to drain and stop; returns the number of running requests."""
        return (await self._control.ask("drain"))["running"]

    async def swap(self, name: str, path: str) -> Message:
        """Replace the weights of the model ``name``."""
        return await self._control.ask("swap", model=name, path=path)


class _Front:
    def __init__(self, options: FrontOptions):
        self._options = options
        self._exit = asyncio.Event()
        self._tasks = set[asyncio.Task[None]]()
        self._connections: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        """To the engines, by the tasks that read them."""

    async def run(self, tracer: "Tracer | None") -> None:
        it, config = self._options, self._options.config
        reader, writer = await asyncio.open_unix_connection(it.control, limit=MAX_MESSAGE_BYTES)
        control = ControlChannel(reader, writer, self._handle)
        reading = asyncio.create_task(control.run())
        setup = await control.ask("hello", front=it.number)
        engines = {name: make_engine(config, len(it.models)) for name in it.models}
        for name, engine in engines.items():
            if isinstance(engine, Replicas):
                engine.ended_stats = Stats(**setup["stats"][name])
        self._models = models = FrontModels(engines, control, list(config.adapter_paths))
        self._keys = FrontKeyRing(config.keys, config.api_key, [ApiKey(**key) for key in setup["keys"]], control)
        self._control = control
        shadow = Shadow(config) if config.shadow else None
        self._http = HttpServer(models, config, MiddlewareOptions(self._keys, tracer, shadow, it.limits), it.metrics)
        async with contextlib.AsyncExitStack() as stack:
            for i, engine in enumerate(engines.values()):
                for replica in range(len(engine.clients) if isinstance(engine, Replicas) else 1):
                    serve_engine = partial(self._serve_engine, engine, replica)
                    address = it.engine_address(i, replica)
                    sockets = await asyncio.start_unix_server(serve_engine, address, limit=MAX_MESSAGE_BYTES)
                    stack.callback(sockets.close)
            control.send("engines")
            if it.generation:  # others listen meanwhile
                ends = (self._exit.wait(), control.closed.wait())
                await wait_first(models.wait_ready(), *ends, timeout_s=READY_S)
            with share_port(it.family, it.address) as listener:
                limit_unsent(listener)
                listener.listen(BACKLOG)
                async with self._http.running(listener):
                    control.send("listening")
                    self._start(self._report_when_ready())
                    await wait_first(self._exit.wait(), control.closed.wait(), self._http.closed.wait())
                    self._http.abort()
                    await wait_first(self._http.closed.wait(), timeout_s=EXIT_S)
                    await self._http.kill()
        for connection in self._connections.values():
            connection.close()
        reading.cancel()
        await asyncio.gather(*self._connections, reading, return_exceptions=True)

    def _start(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _report_when_ready(self) -> None:
        await self._models.wait_ready()
        self._control.send("ready")

    async def _report_when_idle(self) -> None:
        await self._http.wait_idle()
        self._control.send("idle")

    async def _handle(self, message: Message) -> Message | None:
        """Handle a message of the server process."""
        match message["do"]:
            case "keys":
                self._keys.replace([ApiKey(**key) for key in message["keys"]])
            case "drain":
                running = await self._http.drain()
                self._start(self._report_when_idle())
                return {"running": running}
            case "failed":
                _, engine = self._models.find(message["model"])
                if isinstance(engine, Replicas):  # otherwise the end of the connection shows it
                    engine.fail(WorkerError(message["reason"]))
            case "exit":
                self._exit.set()
        return None

    async def _serve_engine(
        self, engine: EngineClient | Replicas, replica: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Use the connection of an engine until the engine dies."""
        client = engine.clients[replica] if isinstance(engine, Replicas) else engine
        listening = asyncio.create_task(client.listen(reader, writer))
        self._connections[listening] = writer
        await wait_first(client.ready.wait(), client.disconnected.wait())
        if isinstance(engine, Replicas) and client.ready.is_set():
            engine.set_up(replica)
        await listening
        del self._connections[listening]
        client.fail(WorkerError("the engine process has ended"))
        if isinstance(engine, Replicas):
            engine.set_down(replica)
