"""A whole server: bind the port, start the engine, answer until a signal, leave nothing behind.

    bind -> engine starts and loads -> listen -> SIGINT or SIGTERM -> drain -> engine stops -> return
                                              -> the engine dies -> everybody gets a 503 -> raise

The port is bound first, so that a taken one costs no loading, but listened on last, so that nobody connects to a
server that cannot answer.
"""

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable, Generator

import uvicorn

from colonnade.config import Plan, ServeConfig
from colonnade.errors import ConfigError, PlanError
from colonnade.serve.api.app import build_app
from colonnade.serve.process import engine_process, first
from colonnade.serve.worker import Load

SIGNALS = (signal.SIGINT, signal.SIGTERM)

KEEP_ALIVE_S = 65
"""How long an idle connection is kept: longer than clients keep theirs, so that they close first [s]."""

GRACE_S = 2
"""After the drain: time to send the last bytes [s]."""


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

    ``name`` is what clients call it unless ``config.model_name`` says otherwise; ``announce`` is told when and where
    it listens. Must run in the main thread. Raises :class:`ConfigError` when the port cannot be had, and whatever ends
    the engine: what loading raises, or :class:`PlanError` when a process died.
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
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in SIGNALS:
        loop.add_signal_handler(number, stop.set)
    async with engine_process(load, plan, config, device, stop) as engine:
        if stop.is_set():
            return
        server = _Server(
            uvicorn.Config(
                build_app(engine, name, config.max_body_bytes),
                lifespan="off",
                ws="none",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=int(config.drain_s) + GRACE_S,
            ),
            lambda: announce(f"serving {name} at {_url(listener)} (OpenAI's API under /v1; Ctrl-C stops)"),
        )
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        serving.add_done_callback(lambda _: stop.set())
        await first(stop.wait(), engine.ended.wait())
        engine.draining = server.should_exit = True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(engine.idle.wait(), config.drain_s)
        engine.abort()
        await serving
        if engine.failure:
            raise engine.failure


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
        raise ConfigError(
            f"cannot listen on {where}: {reason}; choose another --serve.port, or 0 for any free one"
        ) from None
    return listener
