"""The HTTP routes. Every answer is one loop over an engine's outputs, sent whole or as a stream of chunks.

When a client disconnects its request is cancelled: closing the generator of :meth:`EngineClient.run_batches` does that,
and it is closed however the handler ends.
"""

import asyncio
import time
from collections.abc import Awaitable
from contextlib import aclosing
from typing import Literal, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse

from colonnade.config import ServeConfig
from colonnade.errors import RequestError
from colonnade.serve.api import errors, replies
from colonnade.serve.api.body import BodyRoute
from colonnade.serve.api.connection import ConnectionLimits
from colonnade.serve.api.event_stream import Batches, EventStream, reply_events
from colonnade.serve.api.metrics import Metrics
from colonnade.serve.api.middleware import BodyLimit
from colonnade.serve.api.replies import ChatReplies, CompletionReplies, Usage
from colonnade.serve.api.request_schemas import Body, ChatBody, CompletionBody
from colonnade.serve.ipc import EngineClient, to_thread_if_large
from colonnade.serve.request import Output

Result = TypeVar("Result")

CLIENT_CLOSED_REQUEST = 499
"""nginx's status for a client that has disconnected; it appears in the log only."""


def build_app(
    engine: EngineClient, model: str, config: ServeConfig, limits: ConnectionLimits = ConnectionLimits()
) -> FastAPI:
    """The application that serves ``engine`` under the name ``model``."""
    app = FastAPI(title="Colonnade", description="An OpenAI-compatible server.", docs_url=None, redoc_url=None)
    app.router.route_class = BodyRoute
    app.add_middleware(BodyLimit, max_bytes=config.max_body_bytes, limits=limits)
    errors.install(app)
    replies.describe_chunks(app)
    metrics = Metrics(engine, model)
    created = int(time.time())

    def card() -> replies.ModelCard:
        if not engine.ready.is_set():
            raise engine.unavailable()
        return {
            "id": model, "object": "model", "created": created, "owned_by": "colonnade",
            "max_model_len": engine.max_request_tokens,
        }  # fmt: skip

    @app.post("/v1/completions", responses=replies.answers(replies.CompletionReply, replies.CompletionChunk))
    async def completions(body: CompletionBody, request: Request) -> Response:
        """Continue a prompt, or several."""
        return await answer(body, CompletionReplies(model, body.logprobs_options), request)

    @app.post("/v1/chat/completions", responses=replies.answers(replies.ChatReply, replies.ChatChunk))
    async def chat(body: ChatBody, request: Request) -> Response:
        """Answer a conversation, with the model's chat template."""
        return await answer(body, ChatReplies(model, body.logprobs_options), request)

    @app.get("/v1/models", responses=replies.refusals(503, "4XX"))
    async def models() -> replies.ModelList:
        """List the served model."""
        return {"object": "list", "data": [card()]}

    @app.get("/v1/models/{name:path}", responses=replies.refusals(404, 503, "4XX"))
    async def one_model(name: str) -> replies.ModelCard:
        """Describe the served model, by its name."""
        check_model(name)
        return card()

    @app.head("/health", include_in_schema=False)
    @app.get("/health", responses={503: {"model": replies.Health, "description": "Its engine died"}})
    async def health(response: Response) -> replies.Health:
        """Liveness: whether the server works, also while it loads or drains."""
        response.status_code = 503 if engine.failure else 200
        return {"status": "engine failed" if engine.failure else "ok"}

    @app.head("/ready", include_in_schema=False)
    @app.get("/ready", responses={503: {"model": replies.Readiness, "description": "It accepts no requests now"}})
    async def ready(response: Response) -> replies.Readiness:
        """Readiness: whether new requests are accepted."""
        status = _readiness(engine, config)
        response.status_code = 200 if status == "ready" else 503
        return {"status": status}

    @app.get("/metrics", response_class=PlainTextResponse)
    async def scrape() -> Response:
        """Prometheus metrics."""
        return Response(metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    def check_model(name: str | None) -> None:
        if name not in (None, model):
            raise RequestError(
                f"there is no model '{name}' here; use '{model}'", param="model", status=404, code="model_not_found"
            )

    async def answer(body: Body, builder: CompletionReplies, request: Request) -> Response:
        check_model(body.model)
        generation = await to_thread_if_large(len(await request.body()), body.to_generation_request)
        if generation.num_completions > config.max_waiting:
            raise RequestError(
                f"{generation.num_completions} prompts; at most {config.max_waiting} in one request "
                "(--serve.max_waiting); send the others in another",
                param="prompt",
                code="too_many_prompts",
            )
        batches = _with_metrics(engine.run_batches(generation), metrics)
        if body.stream:
            # The first output decides between a stream and an error with a status of its own.
            first = await _unless_disconnected(request, anext(batches))
            usage = {"include_usage": body.include_usage, "continuous": body.continuous_usage}
            return EventStream(reply_events(first, batches, builder, **usage))
        return JSONResponse(await _unless_disconnected(request, _complete_reply(batches, builder)))

    return app


def _readiness(
    engine: EngineClient, config: ServeConfig
) -> Literal["ready", "loading", "draining", "queue full", "engine failed"]:
    if engine.failure:
        return "engine failed"
    if engine.draining:
        return "draining"
    if not engine.ready.is_set():
        return "loading"
    return "queue full" if engine.stats.waiting >= config.max_waiting else "ready"


async def _with_metrics(batches: Batches, metrics: Metrics) -> Batches:
    """``batches``, each output observed by a timer."""
    timer = metrics.start_timer()
    async with aclosing(batches):
        async for batch in batches:
            for index, output in batch:
                timer.observe_output(index, output)
            yield batch


async def _complete_reply(batches: Batches, builder: CompletionReplies) -> replies.CompletionReply | replies.ChatReply:
    completions: dict[int, list[Output]] = {}
    usage = Usage()
    async with aclosing(batches):
        async for batch in batches:
            for index, output in batch:
                completions.setdefault(index, []).append(output)
                usage.add(index, output)
    return builder.whole([completions[i] for i in range(len(completions))], usage)


async def _unless_disconnected(request: Request, work: Awaitable[Result]) -> Result:
    """The result of ``work``, which is cancelled if the client disconnects first."""
    task, disconnect = asyncio.ensure_future(work), asyncio.ensure_future(_wait_disconnect(request))
    try:
        await asyncio.wait((task, disconnect), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise RequestError("the client closed the connection", status=CLIENT_CLOSED_REQUEST, code="client_gone")
    finally:
        for each in (task, disconnect):
            each.cancel()
        await asyncio.gather(task, disconnect, return_exceptions=True)


async def _wait_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
