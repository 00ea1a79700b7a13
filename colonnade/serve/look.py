"""The viewer inside an engine's process: recordings with the served weights, and the pages of the cache.

Viewer requests arrive like other messages and are handled between two steps, so that a recording never sees an
unfinished step and the page tables are a consistent snapshot.
"""

from base64 import b64decode, b64encode
from typing import Any

from colonnade.config import Plan
from colonnade.config.base import plural
from colonnade.errors import RequestError
from colonnade.look.app import Answer, LookApp, error_answer
from colonnade.look.recorder import Recording, record
from colonnade.serve.engine import Engine

MAX_ANSWER_BYTES = 1 << 24
"""Larger tiles would hold up the connection's other messages."""


class EngineLook:
    """Handles the viewer's queries about one engine."""

    def __init__(self, engine: Engine, name: str):
        """``name`` is that of the served model."""
        self._engine = engine
        axes = engine.model.axes
        ranks = axes.tp.size * axes.cp.size
        plan = f"tp={axes.tp.size} cp={axes.cp.size}" if ranks > 1 else ""
        self._app = LookApp(
            name, engine.model.config, engine.tokenizer, self._record, plan=plan, cache=lambda: cache_board(engine)
        )

    def _record(self, tokens: list[int], pieces: list[str]) -> Recording:
        axes = self._engine.model.axes
        if axes.tp.size * axes.cp.size > 1:
            raise RequestError(
                "a server with several ranks shows only its cache; record with colonnade look MODEL --plan.tp"
            )
        return record(self._engine.model, tokens, pieces, Plan())

    def reply(self, message: dict[str, Any]) -> dict[str, Any]:
        """The response to a message of :func:`question`."""
        answer = self._app.answer(message["method"], message["path"], message["query"], b64decode(message["body"]))
        if len(answer.body) > MAX_ANSWER_BYTES:
            answer = error_answer(
                f"a tile of more than {MAX_ANSWER_BYTES:,} bytes; ask for fewer rows, or reduce=2", 400
            )
        body = b64encode(answer.body).decode()
        return {"event": "answer", "ids": message["ids"], "answer": [answer.status, answer.content_type, body]}


def question(model: str, method: str, path: str, query: str, body: bytes) -> dict[str, Any]:
    """The fields of a message that asks the engine of ``model``."""
    return {"model": model, "method": method, "path": path, "query": query, "body": b64encode(body).decode()}


def answer_of(reply: dict[str, Any]) -> Answer:
    """The response in an engine's reply."""
    status, content_type, body = reply["answer"]
    return Answer(status, content_type, b64decode(body))


def cache_board(engine: Engine) -> dict[str, Any]:
    """The cache's pages, and the page table of each running request."""
    pool, axes = engine.scheduler.pool, engine.model.axes
    running = engine.scheduler.running
    requests = [{"id": i, "tokens": each.computed, "pages": list(each.pages)} for i, each in enumerate(running)]
    split = f" Page p is on context rank p mod {axes.cp.size}." if axes.cp.size > 1 else ""
    return {
        "title": "Pages of the cache", "note": f"{plural(len(running), 'request')} running at this moment.",
        "pages": pool.pages, "used": pool.used, "page_tokens": pool.page_tokens, "cached": pool.cached_pages(),
        "requests": requests,
        "merge": "A decode step reads the pages of a request in chunks, each with its own softmax, and merges the "
        f"partial results by their log-sum-exp (Flash-Decoding).{split}",
    }  # fmt: skip
