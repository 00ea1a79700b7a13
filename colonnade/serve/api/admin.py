"""Routes for the operator, under /admin; :mod:`colonnade.serve.api.auth` requires the admin key."""

import logging
import time
from typing import Annotated, Literal

from fastapi import FastAPI, Request, Response
from pydantic import BaseModel, ConfigDict, Field
from pydantic_core import to_json

from colonnade.errors import RequestError
from colonnade.serve.api import openapi, replies
from colonnade.serve.api.body import parse_body
from colonnade.serve.served_models import ServedModels


class Draining(replies.Reply):
    """POST /admin/drain."""

    status: Literal["draining"]
    running: int
    """Requests that are still to finish."""


class CacheReset(replies.Reply):
    """POST /admin/cache/reset."""

    status: Literal["reset"]


class WeightsBody(BaseModel):
    """POST /admin/weights."""

    model_config = ConfigDict(extra="forbid", strict=True)
    model: str | None = None
    """The name of the model, if several are served."""
    path: Annotated[str, Field(min_length=1, max_length=4096, pattern=r"^[^\x00]*$")]
    """A checkpoint of the served model on the server's machine: a run, a folder, or anything else that can be
    served."""


class WeightsSwapped(replies.Reply):
    """POST /admin/weights."""

    status: Literal["swapped"]
    path: str
    """The checkpoint of the weights that are served now."""
    preempted: int
    """Running requests, which continue with the new weights."""
    read_s: float
    """Time for reading the weights, while requests continued [s]."""
    pause_s: float
    """Time without steps, for copying the weights [s]."""
    total_s: float


LOG = logging.getLogger("colonnade.serve.admin")
"""Endpoints for the operator."""
LOG.addHandler(logging.NullHandler())


class CacheResetBody(BaseModel):
    """POST /admin/cache/reset; the body may be omitted."""

    model_config = ConfigDict(extra="forbid", strict=True)
    model: str | None = None
    """The name of a model; without one the caches of all are emptied."""


def install_admin(app: FastAPI, models: ServedModels) -> None:
    """Add the routes to ``app``."""

    @app.post("/admin/drain", status_code=202, responses=openapi.refusals(403, "4XX"))
    async def drain() -> Draining:
        """Stop as after SIGTERM: refuse new requests, finish the running ones, exit."""
        return {"status": "draining", "running": await models.request_drain()}

    @app.post("/admin/cache/reset", responses=openapi.refusals(403, 503, "4XX"))
    async def reset_cache(request: Request) -> CacheReset:
        """Empty the prefix cache, of one model or of all; running requests continue."""
        raw = await request.body()
        name = parse_body(CacheResetBody, raw, request.headers.get("content-type", "")).model if raw else None
        for model in models.all if name is None else [models.find(name)]:
            await model.engine.ask("reset_cache")
        return {"status": "reset"}

    @app.post("/admin/weights", responses={200: {"model": WeightsSwapped}, **openapi.refusals(400, 403, 503, "4XX")})
    async def swap_weights(body: WeightsBody, _request: Request) -> Response:
        """Serve the weights of another checkpoint of the same model; running requests continue with them.

        The model keeps its name. If anything fails, the old weights stay.
        """
        name, started_s = models.find(body.model).name, time.monotonic()
        try:
            answer = await models.swap(name, body.path)
        except RequestError as refusal:
            LOG.info("the weights of %r were refused: %s", body.path, refusal.message)
            raise
        reply: WeightsSwapped = {
            "status": "swapped", "path": answer["path"], "preempted": answer["preempted"],
            "read_s": round(answer["read_s"], 3), "pause_s": round(answer["pause_s"], 3),
            "total_s": round(time.monotonic() - started_s, 3),
        }  # fmt: skip
        LOG.info("serving the weights of %r; steps paused for %g s", reply["path"], reply["pause_s"])
        return Response(to_json(reply), media_type="application/json")
