"""The HTTP server of one process: uvicorn in a task, and the application with its middleware around it."""

import asyncio
import contextlib
import errno
import socket
from collections.abc import AsyncIterator, Generator, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, cast

import uvicorn
from starlette.types import ASGIApp

from colonnade.config import ServeConfig
from colonnade.errors import ConfigError
from colonnade.serve.api.api_keys import KeyRing
from colonnade.serve.api.connection import ConnectionLimits, connection_class, limit_unsent
from colonnade.serve.api.host_check import HostCheck, is_loopback
from colonnade.serve.api.middleware import ACCESS_LOG, JSON_LOG
from colonnade.serve.api.routes import build_app
from colonnade.serve.api.shadow import Shadow
from colonnade.serve.engine_client import EngineClient
from colonnade.serve.engine_process import wait_first
from colonnade.serve.served_models import ServedModels

try:
    from uvloop import new_event_loop
except ImportError:  # it has no wheel for every platform
    from asyncio import new_event_loop

if TYPE_CHECKING:  # needs the extra trace
    from colonnade.serve.api.tracing import Tracer

__all__ = ["new_event_loop"]

KEEP_ALIVE_S = 65
"""Time that an idle connection is kept open [s]: longer than clients do, so that they close first."""

GRACE_S = 2
"""Time to send the last bytes after the drain [s]."""

FORCED_CLOSE_S = 0.5
"""The same after a second signal [s]."""

BACKLOG = 2048
"""Connections that wait to be accepted; uvicorn's default."""


class MiddlewareOptions(NamedTuple):
    """The middleware around the routes."""

    keys: KeyRing
    tracer: "Tracer | None"
    shadow: Shadow | None
    limits: ConnectionLimits


class HttpServer:
    """Serves requests for ``models``; with ``metrics_folder`` its metrics are those of all processes that use it."""

    def __init__(
        self,
        models: ServedModels,
        config: ServeConfig,
        middleware: MiddlewareOptions,
        metrics_folder: str | None = None,
    ):
        self._models, self._shadow = models, middleware.shadow
        limits = middleware.limits.within_files()
        app = build_app(
            models, config, middleware.keys, tracer=middleware.tracer, shadow=middleware.shadow, limits=limits,
            metrics_folder=metrics_folder,
        )  # fmt: skip
        self._server = BackgroundServer(
            uvicorn.Config(
                app,
                http=connection_class(limits),
                lifespan="off",
                ws="none",
                log_config={"off": None, "text": ACCESS_LOG, "json": JSON_LOG}[config.log],
                access_log=config.log == "text",
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=GRACE_S,
            ),
            middleware.keys,
            config.origins,
        )
        self.closed = self._server.closed
        """Set when the last connection is closed, or the server has failed."""

    @contextlib.asynccontextmanager
    async def running(self, listener: socket.socket) -> AsyncIterator[None]:
        """Serve requests until the end of the block, or until :meth:`abort`; raises what failed."""
        async with self._server.running(listener):
            yield
        if self._shadow:
            await self._shadow.close()

    def connect(self, model: str, replica: int, engine: EngineClient) -> None:
        """An engine is up, and the application has been notified."""

    def keys_changed(self) -> None:
        """The key file has been read again; the application has the same keys."""

    async def wait_ready(self) -> None:
        """Wait until requests are accepted: as soon as the models are ready."""

    async def drain(self) -> int:
        """Refuse new requests; returns the number of those that run."""
        self._models.drain()
        return self._models.running

    async def wait_idle(self) -> None:
        """Wait until no request runs, after :meth:`drain`."""
        await self._models.wait_idle()

    def abort(self) -> None:
        """End all running requests with an error, and close all connections."""
        self._models.abort()
        self._server.should_exit = True

    async def kill(self) -> None:
        """Close all connections immediately, after :meth:`abort`."""
        self._server.force_exit = True
        await wait_first(self.closed.wait(), timeout_s=FORCED_CLOSE_S)


class BackgroundServer(uvicorn.Server):
    """uvicorn in a task, without signal handlers: it would raise signals again at the end."""

    def __init__(self, config: uvicorn.Config, keys: KeyRing, origins: Sequence[str]):
        super().__init__(config)
        self._keys, self._origins = keys, origins
        self.listening, self.closed = asyncio.Event(), asyncio.Event()

    @contextlib.asynccontextmanager
    async def running(self, listener: socket.socket) -> AsyncIterator[None]:
        """Serve requests until the end of the block, or until ``should_exit`` is set; raises what failed."""
        serving = asyncio.create_task(self.serve(sockets=[listener]))
        serving.add_done_callback(lambda _: self.closed.set())
        try:
            await wait_first(self.listening.wait(), self.closed.wait())
            yield
        finally:
            self.should_exit = True
            if self.force_exit:
                serving.cancel()
            await asyncio.wait((serving,))
            if not serving.cancelled() and (error := serving.exception()):
                raise error

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        if not self._keys.required and all(map(is_loopback, sockets or ())):
            self.config.app = HostCheck(cast(ASGIApp, self.config.app), self._origins)
        await super().serve(sockets)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


@contextlib.contextmanager
def open_tracer(config: ServeConfig) -> Iterator["Tracer | None"]:
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


def listen(config: ServeConfig) -> socket.socket:
    """A socket that listens at the address of ``config``."""
    listener = bind(config)
    limit_unsent(listener)
    _start_listening(listener, config)
    return listener


def bind(config: ServeConfig) -> socket.socket:
    """A socket bound to the address of ``config``; raises :class:`ConfigError` if another program has it."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
    except OSError as error:
        where = f"{config.host}:{config.port}"
        raise ConfigError(f"cannot listen on {where}: {error.strerror}; choose another --serve.host") from None
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise _port_error(config, error) from None
    return bound


def _start_listening(bound: socket.socket, config: ServeConfig) -> None:
    try:
        bound.listen(BACKLOG)
    except OSError as error:
        bound.close()
        raise _port_error(config, error) from None


def _port_error(config: ServeConfig, error: OSError) -> ConfigError:
    reason = (error.strerror or str(error)).lower()
    remedy = "choose another --serve.port, or 0 for any free one"
    if error.errno == errno.EADDRNOTAVAIL:
        remedy = "this machine does not have this address; choose another --serve.host"
    return ConfigError(f"cannot listen on {config.host}:{config.port}: {reason}; {remedy}")


def reserve_port(config: ServeConfig) -> socket.socket:
    """A socket that keeps the address of ``config`` for sockets of :func:`share_port`, and does not listen itself.

    Raises :class:`ConfigError` if another program listens there.
    """
    with bind(config) as free:  # without SO_REUSEPORT: it would share the port with another server
        family, address = free.family, free.getsockname()
        _start_listening(free, config)
    return share_port(family, address)


def share_port(family: int, address: tuple) -> socket.socket:
    """A socket bound to an address that others share (SO_REUSEPORT): the kernel distributes connections."""
    shared = socket.socket(family, socket.SOCK_STREAM)
    shared.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    shared.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    shared.bind(address)
    return shared


def url_of(listener: socket.socket) -> str:
    """The address of ``listener`` for clients."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
