"""The models of a server by name: which engine gets a request, and the state of all engines together.

one model       requests may omit ``model``; if its engine dies, so does the server
several         requests must name one; if an engine dies, requests for its model get a 503 and the others go on
"""

import asyncio
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from colonnade.config.base import plural
from colonnade.errors import ColonnadeError, ConfigError, RequestError
from colonnade.serve.backend import Backend
from colonnade.serve.ipc import Message


class ServedModel(NamedTuple):
    """A model that is served."""

    name: str
    engine: Backend


class ServedModels:
    """``engines`` by the names of their models; each has at least one."""

    def __init__(self, engines: Mapping[str, Backend], adapters: Sequence[str] = ()):
        """``adapters`` are the names of those of the only model, which are called like models.

        Raises :class:`ConfigError` for an adapter with the name of a model, and for adapters of several models.
        """
        if adapters and len(engines) > 1:
            raise ConfigError(f"serve.adapters apply to one model, but {len(engines)} are served; serve one of them")
        if clash := engines.keys() & set(adapters):
            raise ConfigError(f"the model and an adapter are both called '{clash.pop()}'; set --serve.model_name")
        self.adapters = list(adapters)
        self.all = [ServedModel(name, engine) for name, engine in engines.items()]
        self._engines = dict(engines)
        self.stop_requested = asyncio.Event()
        """Set to ask the server to drain and stop."""

    @property
    def names(self) -> list[str]:
        """Of all models."""
        return list(self._engines)

    def base_of(self, name: str) -> str:
        """The model of an adapter; of a model itself."""
        return self.all[0].name if name in self.adapters else name

    @property
    def default(self) -> str | None:
        """The model of requests that name none: the only one."""
        return self.all[0].name if len(self.all) == 1 else None

    def find(self, name: str | None, allowed: Collection[str] | None = None) -> ServedModel:
        """The model ``name``; raises :class:`RequestError`: 404 if there is none, 400 if a name is needed.

        Errors name the ``allowed`` models only; None: all.
        """
        name = self.default if name is None else name
        if name is None:
            raise RequestError(
                f"this server has several models; set model to {self._choice(allowed)}",
                param="model",
                code="model_missing",
            )
        if name in self.adapters:
            return ServedModel(name, self.all[0].engine)
        if name not in self._engines:
            raise RequestError(
                f"there is no model '{name}' here; use {self._choice(allowed)}",
                param="model",
                status=404,
                code="model_not_found",
            )
        return ServedModel(name, self._engines[name])

    def _choice(self, allowed: Collection[str] | None) -> str:
        names = [f"'{name}'" for name in (*self._engines, *self.adapters) if allowed is None or name in allowed]
        if not names:
            return "another API key, since this one may use none of its models"
        *most, last = names
        return f"{', '.join(most)} or {last}" if most else last

    # -- the state of all engines -------------------------------------------------------------------------------------

    @property
    def failure(self) -> ColonnadeError | None:
        """Why the server fails: no engine is left."""
        failures = [model.engine.failure for model in self.all]
        return failures[0] if all(failures) else None

    async def request_drain(self) -> int:
        """Ask the server to drain and stop; returns the number of running requests."""
        self.stop_requested.set()
        return self.running

    async def swap(self, name: str, path: str) -> Message:
        """Replace the weights of the model ``name`` by those at ``path``."""
        return await self._engines[self.base_of(name)].ask("swap", path=path)

    @property
    def running(self) -> int:
        """Number of HTTP requests that wait for outputs."""
        return sum(model.engine.running for model in self.all)

    def drain(self) -> None:
        """Refuse new requests."""
        for model in self.all:
            model.engine.draining = True

    def abort(self) -> None:
        """End all running requests with an error."""
        for model in self.all:
            model.engine.abort()

    async def wait_ready(self) -> None:
        """Wait until all engines are ready."""
        for model in self.all:
            await model.engine.ready.wait()

    async def wait_exited(self) -> None:
        """Wait until no engine is left."""
        for model in self.all:
            await model.engine.exited.wait()

    async def wait_idle(self) -> None:
        """Wait until no request runs, once new ones are refused."""
        for model in self.all:
            await model.engine.idle.wait()


def model_names(sources: Sequence[str], chosen: str | None) -> list[str]:
    """The names of the models of ``sources`` in the API: the last parts of their paths, or those ``chosen`` with
    commas.

    Raises :class:`ConfigError` unless each has a unique name.
    """
    if chosen is None:
        names = [Path(source).name for source in sources]
    else:
        names = [chosen] if len(sources) == 1 else chosen.split(",")
    if len(names) != len(sources):
        raise ConfigError(
            f"--serve.model_name has {plural(len(names), 'name')} for {len(sources)} models; pass one per model, "
            "comma-separated, or remove it"
        )
    for i, name in enumerate(names):
        if name in names[:i]:
            first = sources[names.index(name)]
            example = ",".join(f"{each or 'model'}-{number}" for number, each in enumerate(names, 1))
            raise ConfigError(
                f"{first} and {sources[i]} would both be called '{name}'; name each model: --serve.model_name {example}"
            )
    return names
