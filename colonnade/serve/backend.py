"""The backend of the HTTP routes: one engine's connection, or replicas or upstreams with the same interface."""

from typing import TYPE_CHECKING, TypeAlias

from colonnade.config import ServeConfig
from colonnade.serve.engine_client import EngineClient
from colonnade.serve.replicas import Replicas

if TYPE_CHECKING:  # most servers have none
    from colonnade.serve.upstreams import Upstreams

Backend: TypeAlias = "EngineClient | Replicas | Upstreams"


def make_engine(config: ServeConfig, models: int) -> EngineClient | Replicas:
    """The engine, or the replicas, of one of ``models``: with several, an engine that dies is restarted."""
    assert config.replicas != "auto", "the server has decided how many"
    return Replicas(config.replicas) if models > 1 or config.replicas > 1 else EngineClient()
