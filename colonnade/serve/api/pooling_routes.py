"""The routes of models that do not generate: embeddings, classes, scores and rankings.

Scores and rankings are those of a class head with one class (a cross-encoder), otherwise cosines of embeddings. A
request to the wrong kind of model is refused, naming the right endpoint.
"""

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Literal

from fastapi import FastAPI, Request, Response

from colonnade.errors import RequestError
from colonnade.serve.api import openapi, pooling_replies
from colonnade.serve.api.disconnect import unless_disconnected
from colonnade.serve.api.metrics import Metrics, RequestTimer
from colonnade.serve.api.pooling_schemas import ClassifyBody, EmbeddingBody, PairsBody, RerankBody, ScoreBody
from colonnade.serve.ipc import to_thread_if_large
from colonnade.serve.pooler_spec import PoolerSpec
from colonnade.serve.pooling_request import PoolingOutput, PoolingRequest, Text
from colonnade.serve.served_models import ServedModel

Wanted = Literal["embed", "classify", "score"]

FindModel = Callable[[str | None, Request], ServedModel]
"""Finds the model of a request by the name in its body; raises :class:`RequestError` if it cannot be used."""

SCORES = "/v1/score or /v1/rerank"
GENERATION = "/v1/chat/completions or /v1/completions"


def install(app: FastAPI, find_model: FindModel, metrics: Metrics) -> None:
    """Add the routes to ``app``; ``find_model`` returns the model of a request with this ``model``."""

    async def run(model: ServedModel, pooling: PoolingRequest, request: Request) -> list[PoolingOutput]:
        timer = metrics.start_timer(model.name)
        return await unless_disconnected(request, _collect(model.engine.run(pooling), timer))

    async def score(model: ServedModel, body: PairsBody, request: Request) -> tuple[list[float], list[PoolingOutput]]:
        """(score of each pair, the engine's outputs)."""
        spec = pooler_for(model, "score")
        first, second, fields = body.pairs()
        truncate = body.truncation(spec.context)
        if spec.scores_pairs:
            whole = first * len(second) if len(first) == 1 else first
            pairs: list[Text] = list(zip(whole, second, strict=True))
            field = fields[1] if fields[1][1] else fields[0]
            outputs = await run(model, PoolingRequest(pairs, [field], truncate), request)
            return [output.numbers()[0] for output in outputs], outputs
        outputs = await run(model, PoolingRequest([*first, *second], fields, truncate), request)
        size = 4 * spec.width * len(outputs)
        parts = outputs[: len(first)], outputs[len(first) :]
        return await to_thread_if_large(size, pooling_replies.cosines, *parts), outputs

    @app.post("/v1/embeddings", responses=_answers(pooling_replies.EmbeddingReply))
    async def embeddings(body: EmbeddingBody, request: Request) -> Response:
        """The embedding of a text, or of several."""
        model = find_model(body.model, request)
        spec = pooler_for(model, "embed")
        dimensions = body.checked_dimensions(spec.width)
        outputs = await run(model, body.to_request(spec.context, dimensions), request)
        base64 = body.encoding_format == "base64"

        def write() -> bytes:
            return pooling_replies.embeddings(outputs, model.name, base64=base64)

        return _json(await to_thread_if_large(4 * spec.width * len(outputs), write))

    @app.post("/v1/classify", include_in_schema=False)
    @app.post("/classify", responses=_answers(pooling_replies.ClassifyReply))
    async def classify(body: ClassifyBody, request: Request) -> Response:
        """The class of a text, or of several."""
        model = find_model(body.model, request)
        spec = pooler_for(model, "classify")
        outputs = await run(model, body.to_request(spec.context), request)
        return _json(pooling_replies.classes(outputs, model.name, spec))

    @app.post("/score", include_in_schema=False)
    @app.post("/v1/score", responses=_answers(pooling_replies.ScoreReply))
    async def scores(body: ScoreBody, request: Request) -> Response:
        """How well pairs of texts match."""
        model = find_model(body.model, request)
        values, outputs = await score(model, body, request)
        return _json(pooling_replies.scores(values, outputs, model.name))

    @app.post("/rerank", include_in_schema=False)
    @app.post("/v2/rerank", include_in_schema=False)
    @app.post("/v1/rerank", responses=_answers(pooling_replies.RerankReply))
    async def rerank(body: RerankBody, request: Request) -> Response:
        """Documents in the order of their relevance to a query."""
        model = find_model(body.model, request)
        values, outputs = await score(model, body, request)
        with_documents = body.return_documents is not False
        reply = pooling_replies.ranking(
            values, body.documents, outputs, model.name, top_n=body.top_n, with_documents=with_documents
        )
        return _json(reply)


def pooler_for(model: ServedModel, wanted: Wanted) -> PoolerSpec:
    """The model's pooler; raises :class:`RequestError`: 400 if it is of another kind, 503 while it loads."""
    name, engine = model
    if not engine.ready.is_set():
        raise engine.unavailable()
    spec = engine.pooler
    if spec is None:
        hint = "serve it with --serve.task embed for embeddings" if wanted != "classify" else None
        raise _wrong_endpoint(name, "generates text", GENERATION, hint)
    if wanted == "classify" and spec.task == "embed":
        raise _wrong_endpoint(name, "has no class head", f"/v1/embeddings, {SCORES}")
    if wanted != "classify" and spec.task == "classify" and not (wanted == "score" and spec.scores_pairs):
        what = "class" if spec.scores_pairs else "classes"
        right = f"/classify, {SCORES}" if spec.scores_pairs else "/classify"
        raise _wrong_endpoint(name, f"is a classifier with {spec.width} {what}", right)
    return spec


def check_generates(model: ServedModel) -> None:
    """Raise :class:`RequestError` (400) if the model does not generate text."""
    if (spec := model.engine.pooler) is not None:
        embeds = spec.task == "embed"
        right = f"/v1/embeddings, {SCORES}" if embeds else f"/classify, {SCORES}" if spec.scores_pairs else "/classify"
        raise _wrong_endpoint(model.name, "is served for embeddings" if embeds else "is a classifier", right)


def _wrong_endpoint(model: str, what: str, right: str, operator_hint: str | None = None) -> RequestError:
    text = f"the model '{model}' {what}; use {right}"
    return RequestError(text, param="model", code="wrong_endpoint", operator_hint=operator_hint)


def _answers(reply: type) -> openapi.Responses:
    return {200: {"model": reply}, **openapi.refusals()}


async def _collect(outputs: AsyncGenerator[tuple[int, PoolingOutput]], timer: RequestTimer) -> list[PoolingOutput]:
    """All outputs, in the order of the texts."""
    found = dict[int, PoolingOutput]()
    async with aclosing(outputs):
        async for index, output in outputs:
            found[index] = output
    timer.observe_end()
    return [found[index] for index in range(len(found))]


def _json(content: bytes) -> Response:
    return Response(content, media_type="application/json")
