"""The HTTP routes. Every answer is one loop over an engine's outputs, sent whole or as a stream of chunks.

When a client disconnects its request is cancelled: closing the generator of :meth:`EngineClient.run` does that, and it
is closed however the handler ends.
"""

import dataclasses
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from functools import partial
from typing import Any, Literal

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from pydantic_core import to_json
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.middleware.cors import CORSMiddleware

from colonnade.config import ServeConfig
from colonnade.errors import RequestError
from colonnade.serve.api import errors, pooling_routes, replies
from colonnade.serve.api.admin import install_admin
from colonnade.serve.api.api_keys import KeyRing
from colonnade.serve.api.auth import Authenticate
from colonnade.serve.api.body import BodyRoute
from colonnade.serve.api.chat_page import add_chat_page
from colonnade.serve.api.chat_schemas import ChatBody
from colonnade.serve.api.disconnect import unless_disconnected
from colonnade.serve.api.metrics import Metrics
from colonnade.serve.api.middleware import BodyLimit, cors_options
from colonnade.serve.api.replies import ChatReplies, CompletionReplies, Usage
from colonnade.serve.api.request_log import RequestLog
from colonnade.serve.api.request_record import RequestRecord, record_of
from colonnade.serve.api.request_schemas import Body, CompletionBody
from colonnade.serve.api.shadow import Shadow, ShadowRequests
from colonnade.serve.api.tokenize import install_tokenize
from colonnade.serve.backend import Backend
from colonnade.serve.ipc import GenerationRequest, to_thread_if_large
from colonnade.serve.request import Output
from colonnade.serve.upstreams import Upstreams

Outputs = AsyncGenerator[tuple[int, Output]]


def build_app(
    engine: Backend, model: str, config: ServeConfig, keys: KeyRing | None = None, shadow: Shadow | None = None
) -> FastAPI:
    """The application that serves ``engine`` under the name ``model``; if there are ``keys``, clients need one.

    A ``shadow`` gets requests again that have been answered.
    """
    app = FastAPI(title="Colonnade", description="An OpenAI-compatible server.", docs_url=None, redoc_url=None)
    app.router.route_class = BodyRoute
    keys = keys or KeyRing(None, None)
    if isinstance(engine, Upstreams):
        from colonnade.serve.api.forward import ForwardRequests  # imports httpx

        app.add_middleware(ForwardRequests, upstreams=engine, forward_keys=not keys.required)
    if shadow:
        app.add_middleware(ShadowRequests, shadow=shadow)
    app.add_middleware(BodyLimit, max_bytes=config.max_body_bytes)
    app.add_middleware(
        Authenticate, keys=keys, admin_key=config.admin_key, model=model, max_body_bytes=config.max_body_bytes
    )
    if config.origins:
        app.add_middleware(CORSMiddleware, **cors_options(config.origins))
    metrics = Metrics(engine, model, config.metrics_prefix)
    if shadow:
        shadow.count = metrics.count_shadow
    app.add_middleware(RequestLog, model=model, count=metrics.count_request, log=config.log == "json")
    errors.install(app)
    replies.describe_chunks(app)
    add_chat_page(app)
    created = int(time.time())

    def card() -> replies.ModelCard:
        if not engine.ready.is_set():
            raise engine.unavailable()
        return {
            "id": model, "object": "model", "created": created, "owned_by": "colonnade",
            "max_model_len": engine.max_request_tokens, "capabilities": engine.capabilities,
        }  # fmt: skip

    @app.post("/v1/completions", responses=replies.answers(replies.CompletionReply, replies.CompletionChunk))
    async def completions(body: CompletionBody, request: Request) -> Response:
        """Continue a prompt, or several."""
        builder = CompletionReplies(model, body.logprobs_options)
        return await answer(body, builder, request, body.to_generation_request)

    @app.post("/v1/chat/completions", responses=replies.answers(replies.ChatReply, replies.ChatChunk))
    async def chat(body: ChatBody, request: Request) -> Response:
        """Answer a conversation, with the model's chat template."""
        if engine.tools is None:
            raise engine.unavailable()
        options = body.tool_options(engine.tools)
        builder = ChatReplies(model, body.logprobs_options, options and options.format)
        return await answer(body, builder, request, partial(body.to_generation_request, options))

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
        reply: replies.Readiness = {"status": status}
        if up := list(engine.replicas.values()):
            reply["replicas"] = {"up": sum(up), "all": len(up)}
        return reply

    @app.get("/metrics", response_class=PlainTextResponse)
    async def scrape() -> Response:
        """Prometheus metrics."""
        return Response(metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    def check_model(name: str | None) -> None:
        if name not in (None, model):
            raise RequestError(
                f"there is no model '{name}' here; use '{model}'", param="model", status=404, code="model_not_found"
            )

    pooling_routes.install(app, engine, model, metrics, check_model)

    async def answer(
        body: Body, builder: CompletionReplies, request: Request, prepare: Callable[[], GenerationRequest]
    ) -> Response:
        check_model(body.model)
        pooling_routes.check_generates(engine, model)
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
        generation = dataclasses.replace(generation, client=record.client, priority=priority, timeout_s=body.timeout_s)
        outputs = _with_metrics(engine.run(generation), metrics, record)
        if body.stream:
            # The first output decides between a stream and an error with a status of its own.
            first = await unless_disconnected(request, anext(outputs))
            events = _events(
                first, outputs, builder, Usage(body.n or 1), include_usage=body.include_usage,
                continuous=body.continuous_usage,
            )  # fmt: skip
            return EventSourceResponse(events, sep="\n")
        return JSONResponse(await unless_disconnected(request, _complete_reply(outputs, builder, Usage(body.n or 1))))

    install_admin(app, engine)
    install_tokenize(app, engine, check_model)
    return app


def _readiness(
    engine: Backend, config: ServeConfig
) -> Literal["ready", "loading", "draining", "queue full", "engine failed"]:
    if engine.failure:
        return "engine failed"
    if engine.draining:
        return "draining"
    if not engine.ready.is_set():
        return "loading"
    queues = max(1, sum(engine.replicas.values()))
    return "queue full" if engine.stats.waiting >= queues * config.max_waiting else "ready"


async def _with_metrics(outputs: Outputs, metrics: Metrics, record: RequestRecord) -> Outputs:
    """``outputs``, each observed by a timer and ``record``."""
    timer = metrics.start_timer()
    async with aclosing(outputs):
        async for index, output in outputs:
            timer.observe_output(index, output)
            record.observe(index, output)
            yield index, output


async def _complete_reply(
    outputs: Outputs, builder: CompletionReplies, usage: Usage
) -> replies.CompletionReply | replies.ChatReply:
    completions: dict[int, list[Output]] = {}
    async with aclosing(outputs):
        async for index, output in outputs:
            completions.setdefault(index, []).append(output)
            usage.add(index, output)
    return builder.whole([completions[i] for i in range(len(completions))], usage)


async def _events(
    first: tuple[int, Output],
    outputs: Outputs,
    builder: CompletionReplies,
    usage: Usage,
    *,
    include_usage: bool,
    continuous: bool,
) -> AsyncGenerator[ServerSentEvent]:
    """Server-sent events: chunks with text, the end of each completion, the usage if wanted, and [DONE].

    With ``include_usage`` every chunk has the field, null except in the last, or with ``continuous`` the usage so far.
    """
    started = set[int]()

    def usage_field() -> dict[str, Any]:
        return {"usage": usage.reply() if continuous else None} if include_usage else {}

    async with aclosing(outputs):
        try:
            async for index, output in _chain(first, outputs):
                usage.add(index, output)
                if index not in started and (chunk := builder.first_chunk(index)):
                    yield _event({**chunk, **usage_field()})
                started.add(index)
                if output.text or output.finish_reason or output.logprobs:
                    yield _event({**builder.chunk(index, output), **usage_field()})
            if include_usage:
                yield _event(builder.usage_chunk(usage))
            yield ServerSentEvent("[DONE]", sep="\n")
        except RequestError as error:  # the status was sent long ago: report it in the stream, as OpenAI does
            yield _event(errors.error_body(error))


async def _chain(first: tuple[int, Output], outputs: Outputs) -> Outputs:
    yield first
    async for each in outputs:
        yield each


def _event(reply: Mapping[str, Any]) -> ServerSentEvent:
    return ServerSentEvent(to_json(reply).decode(), sep="\n")
