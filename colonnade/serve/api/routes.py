"""The HTTP routes. Every response comes from one loop over an engine's outputs, sent whole or as a stream of chunks.

When a client disconnects its request is cancelled: closing the generator of :meth:`EngineClient.run_batches` does that,
and it is closed however the handler ends.
"""

import dataclasses
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from starlette.middleware.cors import CORSMiddleware

from colonnade.config import ServeConfig
from colonnade.errors import RequestError
from colonnade.serve.api import errors, openapi, pooling_routes, replies
from colonnade.serve.api.admin import install_admin
from colonnade.serve.api.api_keys import KeyRing
from colonnade.serve.api.auth import Authenticate, allowed_models, check_allowed
from colonnade.serve.api.body import BodyRoute
from colonnade.serve.api.chat_page import add_chat_page
from colonnade.serve.api.chat_schemas import ChatBody
from colonnade.serve.api.connection import ConnectionLimits
from colonnade.serve.api.disconnect import unless_disconnected
from colonnade.serve.api.event_stream import Batches, EventStream, reply_events
from colonnade.serve.api.metrics import Metrics, RequestTimer
from colonnade.serve.api.middleware import BodyLimit, cors_options
from colonnade.serve.api.reply_builders import ChatReplies, CompletionReplies, Usage
from colonnade.serve.api.request_log import RequestLog
from colonnade.serve.api.request_record import RequestRecord, record_of
from colonnade.serve.api.request_schemas import Body, CompletionBody
from colonnade.serve.api.responses_replies import ResponseEvent, ResponseReplies, ResponseReply, response_events
from colonnade.serve.api.responses_schemas import ResponsesBody, renamed
from colonnade.serve.api.shadow import Shadow, ShadowRequests
from colonnade.serve.api.tokenize import install_tokenize
from colonnade.serve.backend import Backend
from colonnade.serve.generation_request import GenerationRequest
from colonnade.serve.ipc import to_thread_if_large
from colonnade.serve.request import Output
from colonnade.serve.served_models import ServedModel, ServedModels
from colonnade.serve.tool_calls import ToolNotation
from colonnade.serve.upstreams import Upstreams

if TYPE_CHECKING:  # needs the extra trace
    from colonnade.serve.api.tracing import Tracer


def build_app(
    models: ServedModels,
    config: ServeConfig,
    keys: KeyRing | None = None,
    *,
    tracer: "Tracer | None" = None,
    shadow: Shadow | None = None,
    limits: ConnectionLimits = ConnectionLimits(),
    metrics_folder: str | None = None,
) -> FastAPI:
    """The application that serves ``models``; if there are ``keys``, clients need one.

    Answered requests are repeated at a ``shadow``. With ``metrics_folder``, metrics are the sums over all processes
    that use it.
    """
    app = FastAPI(title="Colonnade", description="An OpenAI-compatible server.", docs_url=None, redoc_url=None)
    app.router.route_class = BodyRoute
    keys = keys or KeyRing(None, None)
    if isinstance(upstreams := models.all[0].engine, Upstreams):
        from colonnade.serve.api.forward import ForwardRequests  # imports httpx

        app.add_middleware(
            ForwardRequests, upstreams=upstreams, model=models.all[0].name, forward_keys=not keys.required
        )
    if shadow:
        app.add_middleware(ShadowRequests, shadow=shadow)
    app.add_middleware(BodyLimit, max_bytes=config.max_body_bytes, limits=limits)
    app.add_middleware(Authenticate, keys=keys, admin_key=config.admin_key, max_body_bytes=config.max_body_bytes)
    if config.origins:
        app.add_middleware(CORSMiddleware, **cors_options(config.origins))
    metrics = Metrics(models, config.metrics_prefix, metrics_folder)
    if tracer:
        metrics.watch_exporter(tracer.exporter)
    if shadow:
        shadow.count = metrics.count_shadow
    log, count = config.log == "json", metrics.count_request
    app.add_middleware(RequestLog, model=models.default, routes=app.routes, count=count, log=log, tracer=tracer)
    errors.install(app)
    openapi.describe_chunks(app, ResponseEvent)
    add_chat_page(app)
    created = int(time.time())

    def find_model(name: str | None, request: Request) -> ServedModel:
        """The model of a request; raises :class:`RequestError` if there is none, or its key may not use it."""
        found = models.find(name, allowed_models(request.scope))
        check_allowed(request.scope, found.name)
        record_of(request.scope).model = found.name
        return found

    def card(name: str, engine: Backend) -> replies.ModelCard:
        if not engine.ready.is_set():
            raise engine.unavailable()
        return {
            "id": name, "object": "model", "created": created, "owned_by": "colonnade",
            "max_model_len": engine.max_request_tokens, "capabilities": engine.capabilities,
        }  # fmt: skip

    @app.post(
        "/v1/completions", responses=openapi.completion_responses(replies.CompletionReply, replies.CompletionChunk)
    )
    async def completions(body: CompletionBody, request: Request) -> Response:
        """Continue a prompt, or several."""
        model = find_model(body.model, request)
        builder = CompletionReplies(model.name, body.logprobs_options, token_ids=bool(body.return_token_ids))
        return await answer(model, body, builder, request, body.to_generation_request)

    @app.post("/v1/chat/completions", responses=openapi.completion_responses(replies.ChatReply, replies.ChatChunk))
    async def chat(body: ChatBody, request: Request) -> Response:
        """Reply to a conversation, with the model's chat template."""
        model = find_model(body.model, request)
        options = body.tool_options(tool_notation(model))
        tool_format, token_ids = options.format if options else None, bool(body.return_token_ids)
        builder = ChatReplies(model.name, body.logprobs_options, tool_format, token_ids=token_ids)
        return await answer(model, body, builder, request, partial(body.to_generation_request, options))

    @app.post("/v1/responses", responses=openapi.typed_event_responses(ResponseReply, ResponseEvent))
    async def responses(body: ResponsesBody, request: Request) -> Response:
        """Respond to messages and function calls; nothing is stored."""
        model = find_model(body.model, request)
        options = body.chat.tool_options(tool_notation(model))
        builder = ResponseReplies(model.name, body, options.format if options else None)
        try:
            prepare = partial(body.chat.to_generation_request, options)
            return await answer(model, body, builder, request, prepare, response_events)
        except RequestError as error:
            raise renamed(error) from None

    @app.get("/v1/models", responses=openapi.refusals(503, "4XX"))
    async def list_models(request: Request) -> replies.ModelList:
        """List the served models that are ready and that the request's key may use."""
        allowed = allowed_models(request.scope)
        known = [*models.all, *(models.find(name) for name in models.adapters)]
        visible = [model for model in known if allowed is None or model.name in allowed]
        ready = [model for model in visible if model.engine.ready.is_set()] or visible
        return {"object": "list", "data": [card(*model) for model in ready]}

    @app.get("/v1/models/{name:path}", responses=openapi.refusals(404, 503, "4XX"))
    async def one_model(name: str, request: Request) -> replies.ModelCard:
        """Describe a served model, by its name."""
        found = models.find(name, allowed_models(request.scope))
        check_allowed(request.scope, found.name)
        return card(*found)

    @app.head("/health", include_in_schema=False)
    @app.get("/health", responses={503: {"model": replies.Health, "description": "No engine is left"}})
    async def health(response: Response) -> replies.Health:
        """Liveness: whether the server works, also while it loads or drains."""
        response.status_code = 503 if models.failure else 200
        return {"status": "engine failed" if models.failure else "ok"}

    @app.head("/ready", include_in_schema=False)
    @app.get("/ready", responses={503: {"model": replies.Readiness, "description": "It accepts no requests now"}})
    async def ready(response: Response) -> replies.Readiness:
        """Readiness: whether new requests are accepted, for all models."""
        statuses: dict[str, replies.ReadinessStatus] = {name: _readiness(engine, config) for name, engine in models.all}
        not_ready: list[replies.ReadinessStatus] = [status for status in statuses.values() if status != "ready"]
        response.status_code = 503 if not_ready else 200
        reply = replies.Readiness(status=not_ready[0] if not_ready else "ready")
        if not models.default:
            reply["models"] = statuses
        if up := [each for model in models.all for each in model.engine.replicas.values()]:
            reply["replicas"] = {"up": sum(up), "all": len(up)}
        return reply

    @app.get("/metrics", response_class=PlainTextResponse)
    async def scrape() -> Response:
        """Prometheus metrics."""
        return Response(metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    pooling_routes.install(app, find_model, metrics)

    async def answer(
        model: ServedModel,
        body: Body | ResponsesBody,
        builder: CompletionReplies | ResponseReplies,
        request: Request,
        prepare: Callable[[], GenerationRequest],
        events: Callable[..., AsyncGenerator[bytes]] = reply_events,
    ) -> Response:
        pooling_routes.check_generates(model)
        generation = await to_thread_if_large(len(await request.body()), prepare)
        if generation.num_completions > config.max_waiting:
            raise RequestError(
                f"{generation.num_completions:,} completions; send at most {config.max_waiting:,} in one request",
                param="prompt",
                code="too_many_prompts",
                operator_hint="raise --serve.max_waiting for more prompts in a request",
            )
        record = record_of(request.scope)
        priority = record.priority(body.priority)
        generation = dataclasses.replace(
            generation, client=record.client, priority=priority, timeout_s=body.timeout_s,
            adapter=model.name if model.name in models.adapters else "",
        )  # fmt: skip
        timer = metrics.start_timer(models.base_of(model.name))
        batches = _with_metrics(model.engine.run_batches(generation), timer, record)
        usage = Usage(generation.n)
        if body.stream:
            # The first output decides between a stream and an error with its own status.
            first = await unless_disconnected(request, anext(batches))
            options = {"include_usage": body.include_usage, "continuous": body.continuous_usage}
            return EventStream(events(first, batches, builder, usage, **options))
        return JSONResponse(await unless_disconnected(request, _complete_reply(batches, builder, usage)))

    install_admin(app, models)
    install_tokenize(app, find_model)
    if config.look:
        from colonnade.serve.api.look import install_look  # imports torch

        install_look(app, models)
    return app


def tool_notation(model: ServedModel) -> ToolNotation:
    """How ``model``, which must generate text, writes tool calls; raises :class:`RequestError` while it loads."""
    pooling_routes.check_generates(model)
    if model.engine.tools is None:
        raise model.engine.unavailable()
    return model.engine.tools


def _readiness(engine: Backend, config: ServeConfig) -> replies.ReadinessStatus:
    if engine.failure:
        return "engine failed"
    if engine.draining:
        return "draining"
    if not engine.ready.is_set():
        return "loading"
    queues = max(1, sum(engine.replicas.values()))
    return "queue full" if engine.stats.waiting >= queues * config.max_waiting else "ready"


async def _with_metrics(batches: Batches, timer: RequestTimer, record: RequestRecord) -> Batches:
    """``batches``, each output observed by ``timer`` and ``record``."""
    async with aclosing(batches):
        async for batch in batches:
            for index, output in batch:
                timer.observe_output(index, output)
                record.observe(index, output)
            yield batch
    timer.observe_longest()


async def _complete_reply(
    batches: Batches, builder: CompletionReplies | ResponseReplies, usage: Usage
) -> replies.CompletionReply | replies.ChatReply | ResponseReply:
    completions: dict[int, list[Output]] = {}
    async with aclosing(batches):
        async for batch in batches:
            for index, output in batch:
                completions.setdefault(index, []).append(output)
                usage.add(index, output)
    return builder.whole([completions[i] for i in range(len(completions))], usage)
