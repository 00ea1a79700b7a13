"""The server process: binds the port, starts the engine, serves requests until a signal, and cleans up.

    listen -> start and load the engine -> SIGINT or SIGTERM -> drain -> stop the engine -> return
                                      |  |                           -> second signal: stop immediately -> raise
                                      |  -> no engine is left -> all requests end with a 503 -> raise
                                      -> a signal -> raise

It listens from before the model is loaded until after the drain, so that liveness probes are answered (/health). While
it loads or drains, new requests get a 503, and so does /ready.
"""

import asyncio
import contextlib
import signal
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial

from colonnade.config import Plan, ServeConfig
from colonnade.config.base import plural
from colonnade.errors import ConfigError, Interrupted, PlanError
from colonnade.serve.api.api_keys import KeyRing
from colonnade.serve.api.connection import ConnectionLimits
from colonnade.serve.api.shadow import Shadow, is_own_address
from colonnade.serve.backend import Backend, make_engine
from colonnade.serve.engine_client import EngineClient
from colonnade.serve.engine_process import OpenModel, engine_process, wait_first
from colonnade.serve.fronts import Fronts
from colonnade.serve.http_server import (
    HttpServer,
    MiddlewareOptions,
    listen,
    new_event_loop,
    open_tracer,
    reserve_port,
    url_of,
)
from colonnade.serve.replica_placement import ANYWHERE, Placement, place_engines
from colonnade.serve.replica_processes import ReplicaProcesses
from colonnade.serve.served_models import ServedModels
from colonnade.serve.start_order import start_turns
from colonnade.serve.upstreams import Upstreams

SIGNALS = (signal.SIGINT, signal.SIGTERM)


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
            f"a server shards its model over tp and cp ranks only, not over {plan}; set only --plan.tp, "
            "--plan.cp, --plan.ep and --plan.etp"
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
        reserve_port(config) if config.fronts > 1 else listen(config) as listener,
        open_tracer(config) as tracer,
        asyncio.Runner(loop_factory=new_event_loop) as runner,
    ):
        for flag, urls in (("upstreams", config.upstreams), ("shadow", [config.shadow] if config.shadow else [])):
            for url in urls:
                if is_own_address(url, listener):
                    raise ConfigError(f"--serve.{flag} {url} is this server itself; use the address of another one")
        middleware = MiddlewareOptions(keys, tracer, shadow, limits)
        runner.run(_serve(listener, open_models, plan, config, device, placements, middleware, announce))


async def _serve(
    listener: socket.socket,
    open_models: Mapping[str, OpenModel | None],
    plan: Plan,
    config: ServeConfig,
    device: str,
    placements: list[list[Placement]],
    middleware: MiddlewareOptions,
    announce: Callable[[str], object],
) -> None:
    stop = _StopSignals()
    engines: dict[str, Backend] = {name: make_engine(config, len(open_models)) for name in open_models}
    if config.upstreams:
        engines = {name: Upstreams(config.upstreams, config.upstream_key, announce) for name in open_models}
    models = ServedModels(engines, list(config.adapter_paths))
    names = ", ".join(models.names)
    announce(f"loading {names}")
    if config.fronts > 1:
        http = Fronts(models, config, middleware.keys, middleware.limits, announce)
    else:
        http = HttpServer(models, config, middleware)
    if config.keys is not None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, _reload_keys, middleware.keys, http, announce)
    async with (
        http.running(listener),
        _running(models, open_models, plan, config, device, placements, stop, announce, http.connect),
    ):
        if not stop.graceful.is_set():
            await wait_first(http.wait_ready(), stop.graceful.wait(), http.closed.wait())
        if stop.graceful.is_set():
            announce(f"stopped before {names} {'was' if models.default else 'were'} loaded")
            raise Interrupted(stop.signal)
        for model in models.all:
            if model.engine.note:
                announce(model.engine.note)
        announce(_ready_message(models, url_of(listener), config))
        ends = (stop.graceful, models.stop_requested, http.closed)
        await wait_first(*(event.wait() for event in ends), models.wait_exited())
        running = await http.drain()
        if stop.signal or models.stop_requested.is_set():
            announce(_shutdown_message(running, config.drain_s))
        await wait_first(http.wait_idle(), stop.immediate.wait(), timeout_s=config.drain_s)
        http.abort()
        await wait_first(http.closed.wait(), stop.immediate.wait())
        if stop.immediate.is_set():
            await http.kill()
            raise Interrupted(stop.signal)
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
    on_up: Callable[[str, int, EngineClient], object],
) -> AsyncIterator[None]:
    """Start all engines and wait until they are ready; stop them at the end. Raises what the start of one raised.

    ``on_up`` is called with (model, replica, connection) of each engine that is up.
    """
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
                on_up(name, 0, engine)
                continue
            labels = _labels(name, len(placed), alone=len(models.all) == 1)
            own_turns, up = [next(turns) for _ in placed], partial(on_up, name)
            processes.append(
                ReplicaProcesses(engine, open_model, plan, config, device, placed, own_turns, labels, announce, up)
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
    """The names of the engines of ``model`` in log lines."""
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


def _check_upstreams(config: ServeConfig, keys: KeyRing, models: int) -> None:
    """Raise :class:`ConfigError` for settings that need an engine here."""
    if config.upstreams and config.fronts > 1:
        raise ConfigError(
            "--serve.fronts share this server's engines, but with --serve.upstreams it has none; set one of the two"
        )
    if config.fronts > 1 and not hasattr(socket, "SO_REUSEPORT"):
        raise ConfigError("--serve.fronts need SO_REUSEPORT, which this system does not have; remove --serve.fronts")
    if config.upstreams and models > 1:
        raise ConfigError(
            f"--serve.upstreams forwards requests for one model, not for {models}; name one, or start one server per "
            "model"
        )
    if config.upstreams and config.replicas != 1:
        raise ConfigError(
            "--serve.replicas are engines of this server, but with --serve.upstreams it has none; set one of the two"
        )
    if config.upstreams and keys.counts_tokens:
        raise ConfigError(
            f"the key file {config.keys} limits tokens_per_minute, which a server with --serve.upstreams does not "
            "count; limit requests here, and tokens at the upstreams"
        )


def _reload_keys(keys: KeyRing, http: HttpServer | Fronts, announce: Callable[[str], object]) -> None:
    """Read the key file again; on an error, keep the keys and log the reason."""
    try:
        announce(keys.reload())
        http.keys_changed()
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
    return f"stopping: {plural(running, 'request')} {verb} {drain_s:g} s to finish; press Ctrl-C again to exit now"
