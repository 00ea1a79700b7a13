"""The JSON of responses with embeddings, classes, scores and rankings.

A list of many vectors is written vector by vector: pydantic takes 13 µs for 384 numbers, ``json.dumps`` 150.
"""

import math
import time
import uuid
from collections.abc import Mapping, Sequence
from operator import mul
from typing import Any, Literal, NotRequired

from pydantic_core import to_json

from colonnade.serve.api.replies import Reply, ReplyBase
from colonnade.serve.pooler_spec import PoolerSpec
from colonnade.serve.pooling_request import PoolingOutput


class PoolingUsage(Reply):
    """Tokens of all texts of a request."""

    prompt_tokens: int
    total_tokens: int


class Embedding(Reply):
    """The vector of one text."""

    index: int
    object: Literal["embedding"]
    embedding: list[float] | str
    """Numbers, or base64 of little-endian float32."""


class EmbeddingReply(Reply):
    """POST /v1/embeddings."""

    object: Literal["list"]
    model: str
    usage: PoolingUsage
    data: list[Embedding]


class ClassResult(Reply):
    """The class of one text."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassifyReply(ReplyBase):
    """POST /classify."""

    object: Literal["list"]
    usage: PoolingUsage
    data: list[ClassResult]


class Score(Reply):
    """The score of one pair."""

    index: int
    object: Literal["score"]
    score: float


class ScoreReply(ReplyBase):
    """POST /v1/score."""

    object: Literal["list"]
    usage: PoolingUsage
    data: list[Score]


class Document(Reply):
    """A document of the request."""

    text: str


class Rank(Reply):
    """A document's number in the request, and its score."""

    index: int
    relevance_score: float
    document: NotRequired[Document]


class RerankReply(Reply):
    """POST /v1/rerank: the best documents first."""

    id: str
    model: str
    usage: PoolingUsage
    results: list[Rank]


def usage_of(outputs: Sequence[PoolingOutput]) -> PoolingUsage:
    """The tokens of ``outputs``."""
    total = sum(output.prompt_tokens for output in outputs)
    return {"prompt_tokens": total, "total_tokens": total}


def embeddings(outputs: Sequence[PoolingOutput], model: str, *, base64: bool) -> bytes:
    """The JSON of an :class:`EmbeddingReply`."""

    def one(index: int, output: PoolingOutput) -> Embedding:
        return {
            "index": index, "object": "embedding", "embedding": output.vector if base64 else output.numbers(),
        }  # fmt: skip

    head = {"object": "list", "model": model, "usage": usage_of(outputs)}
    return _with_list(head, "data", [to_json(one(i, output)) for i, output in enumerate(outputs)])


def classes(outputs: Sequence[PoolingOutput], model: str, spec: PoolerSpec) -> bytes:
    """The JSON of a :class:`ClassifyReply`."""

    def one(index: int, output: PoolingOutput) -> ClassResult:
        probs = output.numbers()
        label = spec.labels[max(range(len(probs)), key=probs.__getitem__)]
        return {"index": index, "label": label, "probs": probs, "num_classes": len(probs)}

    head = {**_base("classify", model), "object": "list", "usage": usage_of(outputs)}
    return _with_list(head, "data", [to_json(one(i, output)) for i, output in enumerate(outputs)])


def scores(values: Sequence[float], outputs: Sequence[PoolingOutput], model: str) -> bytes:
    """The JSON of a :class:`ScoreReply`."""
    data: list[Score] = [{"index": i, "object": "score", "score": value} for i, value in enumerate(values)]
    reply: ScoreReply = {**_base("score", model), "object": "list", "usage": usage_of(outputs), "data": data}
    return to_json(reply)


def ranking(
    values: Sequence[float], documents: Sequence[str], outputs: Sequence[PoolingOutput], model: str,
    *, top_n: int | None, with_documents: bool,
) -> bytes:  # fmt: skip
    """The JSON of a :class:`RerankReply`: the ``top_n`` documents of the highest scores, equal ones in order."""
    results: list[Rank] = []
    for index in sorted(range(len(values)), key=lambda i: -values[i])[:top_n]:
        rank: Rank = {"index": index, "relevance_score": values[index]}
        if with_documents:
            rank["document"] = {"text": documents[index]}
        results.append(rank)
    base = _base("rerank", model)
    reply: RerankReply = {"id": base["id"], "model": model, "usage": usage_of(outputs), "results": results}
    return to_json(reply)


def cosines(first: Sequence[PoolingOutput], second: Sequence[PoolingOutput]) -> list[float]:
    """The cosine of each pair of embeddings; ``first`` may be one for all. 0 if a vector is zero."""
    a = [(x, _norm(x)) for x in (output.numbers() for output in first)]
    result = []
    for i, output in enumerate(second):
        x, y = a[i if len(a) > 1 else 0], output.numbers()
        length = x[1] * _norm(y)
        result.append(sum(map(mul, x[0], y)) / length if length else 0.0)
    return result


def _norm(x: Sequence[float]) -> float:
    return math.sqrt(sum(map(mul, x, x)))


def _base(kind: str, model: str) -> ReplyBase:
    return {"id": f"{kind}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}


def _with_list(head: Mapping[str, Any], name: str, items: Sequence[bytes]) -> bytes:
    """The JSON of ``head`` and a last field with ``items``, which are JSON already."""
    return b'%s,"%s":[%s]}' % (to_json(head)[:-1], name.encode(), b",".join(items))
