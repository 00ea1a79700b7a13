"""The routes. Every answer is one loop over an engine's outputs, told whole or in chunks.

A client that goes away cancels its requests: closing the generator of :meth:`EngineClient.run` does, and it is closed
however the handler ends.
"""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Awaitable
from contextlib import aclosing
from typing import TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from sse_starlette import EventSourceResponse, ServerSentEvent

from colonnade.config import ServeConfig
from colonnade.errors import RequestError
from colonnade.serve.api import errors, reply_schemas
from colonnade.serve.api.metrics import Metrics
from colonnade.serve.api.middleware import BodyLimit
from colonnade.serve.api.replies import Chats, Completions, Reply, Usage
from colonnade.serve.api.request_schemas import Body, ChatBody, CompletionBody
from colonnade.serve.engine_client import EngineClient
from colonnade.serve.output import Output

Outputs = AsyncGenerator[tuple[int, Output]]
Result = TypeVar("Result")

CLIENT_GONE = 499
"""nginx's status for a client that left; nobody reads it but the logs."""


def build_app(engine: EngineClient, model: str, config: ServeConfig) -> FastAPI:
    """The application that serves ``engine`` under the name ``model``."""
    app = FastAPI(title="Colonnade", description="An OpenAI-compatible server.", docs_url=None, redoc_url=None)
    app.add_middleware(BodyLimit, max_bytes=config.max_body_bytes)
    errors.install(app)
    reply_schemas.describe_chunks(app)
    metrics = Metrics(engine, model)
    card = reply_schemas.ModelCard(id=model, created=int(time.time()), max_model_len=engine.longest)

    @app.post(
        "/v1/completions", responses=reply_schemas.answers(reply_schemas.CompletionReply, reply_schemas.CompletionChunk)
    )
    async def completions(body: CompletionBody, request: Request) -> Response:
        """Continue a prompt, or several."""
        return await answer(body, Completions(model), request)

    @app.post("/v1/chat/completions", responses=reply_schemas.answers(reply_schemas.ChatReply, reply_schemas.ChatChunk))
    async def chat(body: ChatBody, request: Request) -> Response:
        """Answer a conversation, through the model's chat template."""
        return await answer(body, Chats(model), request)

    @app.get("/v1/models")
    async def models() -> reply_schemas.ModelList:
        """The one model there is."""
        return reply_schemas.ModelList(data=[card])

    @app.get("/v1/models/{name:path}", responses=reply_schemas.refusals(404, "4XX"))
    async def one_model(name: str) -> reply_schemas.ModelCard:
        """Its card, if this is its name."""
        check_model(name)
        return card

    @app.get(
        "/health", responses={503: {"model": reply_schemas.Health, "description": "It is stopping, or its engine died"}}
    )
    async def health(response: Response) -> reply_schemas.Health:
        """Whether it answers requests."""
        status = "engine failed" if engine.failure else "stopping" if engine.draining else "ok"
        response.status_code = 200 if status == "ok" else 503
        return reply_schemas.Health(status=status)

    @app.get("/metrics", response_class=PlainTextResponse)
    async def scrape() -> Response:
        """Prometheus metrics."""
        return Response(metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    def check_model(name: str | None) -> None:
        if name not in (None, model):
            raise RequestError(
                f"there is no model '{name}' here; use '{model}'", param="model", status=404, code="model_not_found"
            )

    async def answer(body: Body, shape: Completions, request: Request) -> Response:
        check_model(body.model)
        ask = body.ask()
        if ask.answers > config.max_waiting:
            raise RequestError(
                f"{ask.answers} prompts; at most {config.max_waiting} in one request (--serve.max_waiting); send the "
                "others in another",
                param="prompt",
                code="too_many_prompts",
            )
        outputs = _timed(engine.run(ask), metrics)
        if body.stream:
            # The first output decides between a stream and an error with its own status.
            first = await _unless_gone(request, anext(outputs))
            events = _events(first, outputs, shape, include_usage=body.include_usage)
            return EventSourceResponse(events, sep="\n")
        return JSONResponse(await _unless_gone(request, _whole(outputs, shape)))

    return app


async def _timed(outputs: Outputs, metrics: Metrics) -> Outputs:
    """``outputs``, noted by a clock."""
    clock = metrics.clock()
    async with aclosing(outputs):
        async for index, output in outputs:
            clock.note(index, output)
            yield index, output


async def _whole(outputs: Outputs, shape: Completions) -> Reply:
    texts: dict[int, str] = {}
    reasons: dict[int, str | None] = {}
    usage = Usage()
    async with aclosing(outputs):
        async for index, output in outputs:
            texts[index] = texts.get(index, "") + output.text
            reasons[index] = output.finish_reason
            usage.note(index, output)
    return shape.whole([texts[i] for i in range(len(texts))], [reasons[i] for i in range(len(texts))], usage)


async def _events(
    first: tuple[int, Output], outputs: Outputs, shape: Completions, *, include_usage: bool
) -> AsyncGenerator[ServerSentEvent]:
    """Server-sent events: chunks with text, the end of each answer, the usage if wanted, and [DONE]."""
    usage, opened = Usage(), set[int]()
    absent = {"usage": None} if include_usage else {}
    async with aclosing(outputs):
        try:
            async for index, output in _chain(first, outputs):
                usage.note(index, output)
                if index not in opened and (opening := shape.opening(index)):
                    yield _event({**opening, **absent})
                opened.add(index)
                if output.text or output.finish_reason:
                    yield _event({**shape.chunk(index, output.text, output.finish_reason), **absent})
            if include_usage:
                yield _event(shape.last(usage))
            yield ServerSentEvent("[DONE]", sep="\n")
        except RequestError as error:  # the status line is long gone: say it in the stream, as OpenAI does
            yield _event(errors.error_body(error))


async def _chain(first: tuple[int, Output], outputs: Outputs) -> Outputs:
    yield first
    async for each in outputs:
        yield each


def _event(reply: Reply) -> ServerSentEvent:
    return ServerSentEvent(json.dumps(reply, ensure_ascii=False, separators=(",", ":")), sep="\n")


async def _unless_gone(request: Request, work: Awaitable[Result]) -> Result:
    """The result of ``work``, which is cancelled when the client leaves first."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise RequestError("the client closed the connection", status=CLIENT_GONE, code="client_gone")
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
