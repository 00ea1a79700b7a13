"""A whole server: bind the port, start the engine, answer until a signal, leave nothing behind.

    bind -> engine starts and loads -> listen -> SIGINT or SIGTERM -> drain -> engine stops -> return
                                    |         |                            -> another: everything ends at once -> raise
                                    |         -> the engine dies -> everybody gets a 503 -> raise
                                    -> a signal -> raise

The port is bound first, so that a taken one costs no loading, but listened on last, so that nobody connects to a
server that cannot answer. During the drain it is still listened on: who comes then is told so.
"""

import asyncio
import contextlib
import errno
import signal
import socket
from collections.abc import Callable, Generator

import uvicorn

from colonnade.config import Plan, ServeConfig
from colonnade.config.base import plural
from colonnade.errors import ConfigError, Interrupted, PlanError
from colonnade.serve.api.middleware import ACCESS_LOG
from colonnade.serve.api.routes import build_app
from colonnade.serve.engine_client import EngineClient
from colonnade.serve.engine_process import engine_process, first
from colonnade.serve.worker import Load

SIGNALS = (signal.SIGINT, signal.SIGTERM)

KEEP_ALIVE_S = 65
"""How long an idle connection is kept: longer than clients keep theirs, so that they close first [s]."""

GRACE_S = 2
"""After the drain: time to send the last bytes [s]."""

LAST_WORDS_S = 0.5
"""The same when everything is to end at once [s]."""


def serve(
    load: Load,
    plan: Plan | None = None,
    config: ServeConfig | None = None,
    *,
    name: str = "model",
    device: str = "auto",
    announce: Callable[[str], object] = print,
) -> None:
    """Serve the model that ``load(ground)`` gives in each engine process, until SIGINT or SIGTERM.

    ``name`` is what clients call it unless ``config.model_name`` says otherwise; ``announce`` is told, a line each,
    that it loads, where it listens and that it stops. Must run in the main thread. Raises :class:`ConfigError` when
    the port cannot be had; whatever ends the engine: what loading raises, or :class:`PlanError` when a process died;
    and :class:`Interrupted` for a signal while it loads, or a second one.
    """
    plan, config = plan or Plan(), config or ServeConfig()
    if plan.world > plan.tp * plan.cp:
        raise PlanError(f"a server lays its model over tp and cp ranks only, not over {plan}; set no other of --plan")
    with _bind(config) as listener:
        asyncio.run(_serve(listener, load, plan, config, config.model_name or name, device, announce))


async def _serve(
    listener: socket.socket,
    load: Load,
    plan: Plan,
    config: ServeConfig,
    name: str,
    device: str,
    announce: Callable[[str], object],
) -> None:
    asked = _Asked()
    announce(f"loading {name}")
    async with engine_process(load, plan, config, device, asked.to_stop, asked.at_once) as engine:
        if asked.to_stop.is_set():
            announce(f"stopped before {name} was loaded")
            raise Interrupted(asked.signal)
        server = _Server(
            uvicorn.Config(
                build_app(engine, name, config),
                lifespan="off",
                ws="none",
                log_config=ACCESS_LOG if config.log else None,
                access_log=config.log,
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=GRACE_S,
            ),
            lambda: announce(_greeting(name, _url(listener), engine, config)),
        )
        serving, closed = asyncio.create_task(server.serve(sockets=[listener])), asyncio.Event()
        serving.add_done_callback(lambda _: closed.set())
        await first(asked.to_stop.wait(), engine.ended.wait(), closed.wait())
        engine.draining = True
        if asked.signal:
            announce(_farewell(engine.under_way, config.drain_s))
        await first(engine.idle.wait(), asked.at_once.wait(), timeout_s=config.drain_s)
        engine.abort()
        server.should_exit = True
        await first(closed.wait(), asked.at_once.wait())
        if asked.at_once.is_set():
            server.force_exit = True
            await asyncio.wait((serving,), timeout=LAST_WORDS_S)
            raise Interrupted(asked.signal)
        await serving
        if engine.failure:
            raise engine.failure


class _Asked:
    """What signals ask of this process: the first to stop, another to end at once."""

    def __init__(self):
        self.to_stop, self.at_once = asyncio.Event(), asyncio.Event()
        self.signal = 0
        """The number of the last one."""
        for number in SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, self._note, number)

    def _note(self, number: int) -> None:
        (self.at_once if self.signal else self.to_stop).set()
        self.signal = number


class _Server(uvicorn.Server):
    """uvicorn, which says when it listens, and leaves signals to us: it would raise them again at the end."""

    def __init__(self, config: uvicorn.Config, listening: Callable[[], object]):
        super().__init__(config)
        self._listening = listening

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._listening()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


def _greeting(name: str, url: str, engine: EngineClient, config: ServeConfig) -> str:
    said = f"serving {name} at {url} (OpenAI's API under /v1; Ctrl-C stops)"
    if engine.longest < engine.context:
        said += (
            f"; a request may have {engine.longest:,} tokens of the model's {engine.context:,}, which is what the "
            f"cache holds: raise --serve.{'cache_bytes' if config.pages is None else 'pages'} for more"
        )
    return said


def _farewell(under_way: int, drain_s: float) -> str:
    if not under_way:
        return "stopping"
    return (
        f"stopping: {plural(under_way, 'request')} {'has' if under_way == 1 else 'have'} {drain_s:g} s; again to "
        "end now"
    )


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _bind(config: ServeConfig) -> socket.socket:
    """A socket bound to the address of ``config``, not listening yet."""
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
        listener.bind(address)
    except OSError as error:
        listener.close()
        reason = (error.strerror or str(error)).lower()
        remedy = "choose another --serve.port, or 0 for any free one"
        if error.errno == errno.EADDRNOTAVAIL:
            remedy = "this machine has no such address; choose another --serve.host"
        raise ConfigError(f"cannot listen on {where}: {reason}; {remedy}") from None
    return listener
