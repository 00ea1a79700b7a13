"""The server process: binds the port, starts the engine, answers requests until a signal, and cleans up.

    listen -> start and load the engine -> SIGINT or SIGTERM -> drain -> stop the engine -> return
                                      |  |                           -> second signal: stop at once -> raise
                                      |  -> no engine is left -> all requests end with a 503 -> raise
                                      -> a signal -> raise

It listens from before the model is loaded until after the drain, so that liveness probes are answered (/health). While
it loads or drains, new requests get a 503, and so does /ready.
"""

import asyncio
import contextlib
import errno
import signal
import socket
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

import uvicorn

from colonnade.config import Plan, ServeConfig
from colonnade.config.base import plural
from colonnade.errors import ConfigError, Interrupted, PlanError
from colonnade.serve.api.api_keys import KeyRing
from colonnade.serve.api.connection import ConnectionLimits, connection_class, limit_unsent
from colonnade.serve.api.middleware import ACCESS_LOG, JSON_LOG
from colonnade.serve.api.routes import build_app
from colonnade.serve.api.shadow import Shadow, is_own_address
from colonnade.serve.backend import Backend
from colonnade.serve.engine_process import OpenModel, engine_process, wait_first
from colonnade.serve.ipc import EngineClient
from colonnade.serve.replica_placement import ANYWHERE, Placement, place_engines
from colonnade.serve.replica_processes import ReplicaProcesses
from colonnade.serve.replicas import Replicas
from colonnade.serve.served_models import ServedModels
from colonnade.serve.start_order import start_turns
from colonnade.serve.upstreams import Upstreams

try:
    from uvloop import new_event_loop
except ImportError:  # it has no wheel for every platform
    from asyncio import new_event_loop

if TYPE_CHECKING:  # needs the extra trace
    from colonnade.serve.api.tracing import Tracer

SIGNALS = (signal.SIGINT, signal.SIGTERM)

KEEP_ALIVE_S = 65
"""Time that an idle connection is kept open [s]: longer than clients do, so that they close first."""

GRACE_S = 2
"""Time to send the last bytes after the drain [s]."""

BACKLOG = 2048
"""Connections that wait to be accepted; uvicorn's default."""

FORCED_CLOSE_S = 0.5
"""The same after a second signal [s]."""


def serve(
    open_models: Mapping[str, OpenModel | None],
    plan: Plan | None = None,
    config: ServeConfig | None = None,
    *,
    device: str = "auto",
    announce: Callable[[str], object] = print,
    limits: ConnectionLimits = ConnectionLimits(),
) -> None:
    """Serve models until SIGINT or SIGTERM: ``open_models[name]()(context)`` loads one in each of its processes.

    Clients call it ``name``. With ``config.upstreams`` no model is loaded here, and the only value is None.

    ``announce`` gets a line when it loads, listens and stops; ``limits`` are those of its connections. Must run in the
    main thread. Raises :class:`ConfigError` if the port
    cannot be bound or the key file cannot be read, whatever loading raises, :class:`PlanError` if an engine process
    died, and :class:`Interrupted` for a signal while it loads or for a second signal.
    """
    plan, config = plan or Plan(), config or ServeConfig()
    if plan.world > plan.tp * plan.cp:
        raise PlanError(
            f"a server lays its model out over tp and cp ranks only, not over {plan}; set only --plan.tp, "
            "--plan.cp, --plan.ep and --plan.sh"
        )
    keys = KeyRing(config.keys, config.api_key)
    _check_upstreams(config, keys, len(open_models))
    placements, warning = [[ANYWHERE]], ""
    if not config.upstreams:
        placements, warning = place_engines(len(open_models), config.replicas, plan, device)
    if warning:
        announce(warning)
    config = config.replace(replicas=len(placements[0]))
    shadow = Shadow(config) if config.shadow or config.shadow_log else None
    with (
        _listen(config) as listener,
        _tracing(config) as tracer,
        asyncio.Runner(loop_factory=new_event_loop) as runner,
    ):
        for flag, urls in (("upstreams", config.upstreams), ("shadow", [config.shadow] if config.shadow else [])):
            for url in urls:
                if is_own_address(url, listener):
                    raise ConfigError(f"--serve.{flag} {url} is this server itself; give the address of another one")
        around = _Around(keys, tracer, shadow, limits)
        runner.run(_serve(listener, open_models, plan, config, device, placements, around, announce))


class _Around(NamedTuple):
    """What surrounds the routes."""

    keys: KeyRing
    tracer: "Tracer | None"
    shadow: Shadow | None
    limits: ConnectionLimits


async def _serve(
    listener: socket.socket,
    open_models: Mapping[str, OpenModel | None],
    plan: Plan,
    config: ServeConfig,
    device: str,
    placements: list[list[Placement]],
    around: _Around,
    announce: Callable[[str], object],
) -> None:
    stop = _StopSignals()
    keys, tracer, shadow, limits = around
    limits = limits.within_files()
    replicas = len(placements[0])
    restarts = len(open_models) > 1 or replicas > 1
    engines: dict[str, Backend] = {name: Replicas(replicas) if restarts else EngineClient() for name in open_models}
    if config.upstreams:
        engines = {name: Upstreams(config.upstreams, config.upstream_key, announce) for name in open_models}
    models = ServedModels(engines)
    if config.keys is not None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, _reload_keys, keys, announce)
    names = ", ".join(models.names)
    announce(f"loading {names}")
    server = _Server(
        uvicorn.Config(
            build_app(models, config, keys, tracer=tracer, shadow=shadow, limits=limits),
            http=connection_class(limits),
            lifespan="off",
            ws="none",
            log_config={"off": None, "text": ACCESS_LOG, "json": JSON_LOG}[config.log],
            access_log=config.log == "text",
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=GRACE_S,
        )
    )
    async with (
        contextlib.AsyncExitStack() as closing,
        server.running(listener) as serving,
        _running(models, open_models, plan, config, device, placements, stop, announce),
    ):
        if shadow:
            closing.push_async_callback(shadow.close)
        if stop.graceful.is_set():
            announce(f"stopped before {names} {'was' if models.default else 'were'} loaded")
            raise Interrupted(stop.signal)
        for model in models.all:
            if model.engine.note:
                announce(model.engine.note)
        announce(_ready_message(models, _url(listener), config))
        ends = (stop.graceful, models.stop_requested, server.closed)
        await wait_first(*(event.wait() for event in ends), models.wait_exited())
        models.drain()
        if stop.signal or models.stop_requested.is_set():
            announce(_shutdown_message(models.running, config.drain_s))
        await wait_first(models.wait_idle(), stop.immediate.wait(), timeout_s=config.drain_s)
        models.abort()
        server.should_exit = True
        await wait_first(server.closed.wait(), stop.immediate.wait())
        if stop.immediate.is_set():
            server.force_exit = True
            await asyncio.wait((serving,), timeout=FORCED_CLOSE_S)
            raise Interrupted(stop.signal)
        await serving
        if models.failure:
            raise models.failure


@contextlib.asynccontextmanager
async def _running(
    models: ServedModels,
    open_models: Mapping[str, OpenModel | None],
    plan: Plan,
    config: ServeConfig,
    device: str,
    placements: list[list[Placement]],
    stop: "_StopSignals",
    announce: Callable[[str], object],
) -> AsyncIterator[None]:
    """Start all engines and wait until they are ready; stop them at the end. Raises what the start of one raised."""
    turns = iter(start_turns([each.alone for several in placements for each in several]))
    processes: list[ReplicaProcesses] = []
    async with contextlib.AsyncExitStack() as stack:
        for (name, engine), placed in zip(models.all, placements, strict=True):
            if isinstance(engine, Upstreams):
                await stack.enter_async_context(engine.probing(stop.graceful))
                continue
            open_model = open_models[name]
            assert open_model is not None, "a server without upstreams needs a model"
            if isinstance(engine, EngineClient):
                engine_alone = engine_process(
                    open_model, plan, config, device, stop.graceful, stop.immediate, engine, placed[0]
                )
                await stack.enter_async_context(engine_alone)
                continue
            labels = _labels(name, len(placed), alone=len(models.all) == 1)
            processes.append(
                ReplicaProcesses(
                    engine, open_model, plan, config, device, placed, [next(turns) for _ in placed], labels, announce
                )
            )
            await stack.enter_async_context(processes[-1].running(stop.immediate))
        if processes:
            stack.callback(lambda: [each.stop() for each in processes])  # all at the same time
            exits = (model.engine.exited.wait() for model in models.all)
            await wait_first(models.wait_ready(), stop.graceful.wait(), *exits)
            for model in models.all:
                if model.engine.failure:
                    raise model.engine.failure
        yield


def _labels(model: str, replicas: int, *, alone: bool) -> list[str]:
    """What log lines call the engines of ``model``."""
    if replicas == 1:
        return [f"the engine of {model}"]
    return [f"replica {i}" if alone else f"replica {i} of {model}" for i in range(replicas)]


class _StopSignals:
    """Handles :data:`SIGNALS`: the first sets ``graceful``, a second one ``immediate``."""

    def __init__(self):
        self.graceful, self.immediate = asyncio.Event(), asyncio.Event()
        self.signal = 0
        """The number of the last one."""
        for number in SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, self._handle, number)

    def _handle(self, number: int) -> None:
        (self.immediate if self.signal else self.graceful).set()
        self.signal = number


class _Server(uvicorn.Server):
    """uvicorn in a task, without signal handlers: it would raise signals again at the end."""

    def __init__(self, config: uvicorn.Config):
        super().__init__(config)
        self.listening, self.closed = asyncio.Event(), asyncio.Event()

    @contextlib.asynccontextmanager
    async def running(self, listener: socket.socket) -> AsyncIterator[asyncio.Task[None]]:
        """Answer requests until the end of the block, or until ``should_exit`` is set; the task raises what failed."""
        serving = asyncio.create_task(self.serve(sockets=[listener]))
        serving.add_done_callback(lambda _: self.closed.set())
        try:
            await wait_first(self.listening.wait(), self.closed.wait())
            yield serving
        finally:
            self.should_exit = True
            if self.force_exit:
                serving.cancel()
            await asyncio.wait((serving,))
            if not serving.cancelled() and (error := serving.exception()):
                raise error

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


@contextlib.contextmanager
def _tracing(config: ServeConfig) -> Iterator["Tracer | None"]:
    """The tracer, if there is a collector."""
    if config.trace is None:
        yield None
        return
    from colonnade.serve.api.tracing import Tracer

    tracer = Tracer(config.trace)
    try:
        yield tracer
    finally:
        tracer.close()


def _check_upstreams(config: ServeConfig, keys: KeyRing, models: int) -> None:
    """Raise :class:`ConfigError` for settings that need an engine here."""
    if config.upstreams and models > 1:
        raise ConfigError(
            f"--serve.upstreams passes requests on for one model, not for {models}; give one, or start a server "
            "for each"
        )
    if config.upstreams and config.replicas != 1:
        raise ConfigError(
            "--serve.replicas are engines of this server, which has none with --serve.upstreams; set one of the two"
        )
    if config.upstreams and keys.counts_tokens:
        raise ConfigError(
            f"the key file {config.keys} limits tokens_per_minute, which a server with --serve.upstreams does not "
            "count; limit requests here, and tokens at the upstreams"
        )


def _reload_keys(keys: KeyRing, announce: Callable[[str], object]) -> None:
    """Read the key file again, or keep the keys and say why."""
    try:
        announce(keys.reload())
    except ConfigError as error:
        announce(f"{error}; the old keys stay valid")


def _ready_message(models: ServedModels, url: str, config: ServeConfig) -> str:
    message = f"serving {', '.join(models.names)} at {url} (OpenAI's API under /v1; Ctrl-C stops)"
    for name, engine in models.all:
        whose = "the cache" if models.default else f"the cache of {name}"
        if engine.replicas:
            count = f"{len(engine.replicas)} {'upstreams' if config.upstreams else 'replicas'}"
            message += f"; {count}" if models.default else f"; {count} of {name}"
        if engine.max_request_tokens < engine.context:
            flag = "cache_bytes" if config.pages is None else "pages"
            message += (
                f"; {whose} limits a request to {engine.max_request_tokens:,} tokens of the model's "
                f"{engine.context:,}: raise --serve.{flag} for more"
            )
    sizes = ", ".join(f"{name} {engine.cache_tokens:,}" for name, engine in models.all if engine.pooler is None)
    if sizes and not models.default:
        how = "" if config.pages or config.cache_bytes else ", equal shares of the memory"
        message += f"; tokens in the caches{how}: {sizes}"
    return message


def _shutdown_message(running: int, drain_s: float) -> str:
    if not running:
        return "stopping"
    verb = "has" if running == 1 else "have"
    return f"stopping: {plural(running, 'request')} {verb} {drain_s:g} s to finish; Ctrl-C again ends now"


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _listen(config: ServeConfig) -> socket.socket:
    """A socket that listens at the address of ``config``."""
    where = f"{config.host}:{config.port}"
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"cannot listen on {where}: {error.strerror}; choose another --serve.host") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        limit_unsent(listener)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        reason = (error.strerror or str(error)).lower()
        remedy = "choose another --serve.port, or 0 for any free one"
        if error.errno == errno.EADDRNOTAVAIL:
            remedy = "this machine has no such address; choose another --serve.host"
        raise ConfigError(f"cannot listen on {where}: {reason}; {remedy}") from None
    return listener
