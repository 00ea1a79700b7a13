"""What the HTTP routes talk to: the connection to one engine, or several replicas with the same interface."""

from typing import TYPE_CHECKING, TypeAlias

from colonnade.serve.ipc import EngineClient

if TYPE_CHECKING:  # the routes of a server with one engine need no router
    from colonnade.serve.replicas import Replicas

Backend: TypeAlias = "EngineClient | Replicas"
