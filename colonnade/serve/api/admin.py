"""Routes for the operator, under /admin; :mod:`colonnade.serve.api.auth` asks for the admin key."""

from typing import Literal

from fastapi import FastAPI

from colonnade.serve.api import replies
from colonnade.serve.backend import Backend


class Draining(replies.Reply):
    """POST /admin/drain."""

    status: Literal["draining"]
    running: int
    """Requests that are still to finish."""


class CacheReset(replies.Reply):
    """POST /admin/cache/reset."""

    status: Literal["reset"]


def install_admin(app: FastAPI, engine: Backend) -> None:
    """Add the routes to ``app``."""

    @app.post("/admin/drain", status_code=202, responses=replies.refusals(403, "4XX"))
    async def drain() -> Draining:
        """Stop as after SIGTERM: refuse new requests, finish the running ones, exit."""
        engine.stop_requested.set()
        return {"status": "draining", "running": engine.running}

    @app.post("/admin/cache/reset", responses=replies.refusals(403, 503, "4XX"))
    async def reset_cache() -> CacheReset:
        """Empty the prefix cache; running requests go on."""
        await engine.ask("reset_cache")
        return {"status": "reset"}
