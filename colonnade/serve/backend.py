"""What the HTTP routes talk to: one engine's connection, or replicas or upstreams with the same interface."""

from typing import TYPE_CHECKING, TypeAlias

from colonnade.serve.ipc import EngineClient

if TYPE_CHECKING:  # the routes of a server with one engine need no router
    from colonnade.serve.replicas import Replicas
    from colonnade.serve.upstreams import Upstreams

Backend: TypeAlias = "EngineClient | Replicas | Upstreams"
