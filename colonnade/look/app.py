"""The viewer's HTTP API, independent of a server: maps a request to a response.

GET  /v1/look/model                                    the model, and which pages it has
POST /v1/look/record   {"text": …}                     one forward pass; its name and the text's tokens
GET  /v1/look/scene?page=&run=&layer=&head=&rank=      what to draw
GET  /v1/look/tensor?run=&layer=&head=&name=&rows=&cols=&reduce=&parts=      a tile (colonnade.look.tiles)
"""

import json
from collections import OrderedDict
from collections.abc import Callable, Mapping
from importlib import resources
from types import MappingProxyType
from typing import Any, NamedTuple
from urllib.parse import parse_qs

from colonnade.checkpoint.peft import Adapter
from colonnade.config import ModelConfig
from colonnade.data.tokenizer import Tokenizer
from colonnade.errors import ColonnadeError, RequestError
from colonnade.look.pages import make_page, pages_of
from colonnade.look.recorder import MAX_TOKENS, Recording, check_tokens, run_name
from colonnade.look.routing_board import History
from colonnade.look.tensors import Names
from colonnade.look.tiles import MAX_TILE, encode_tile, reduce_tile, span

MAX_TEXT = 20_000
"""Maximum length of a text [characters]."""
MAX_BODY = 4 * MAX_TEXT
MAX_RECORDINGS = 4
"""Number of recordings that are kept; the text of an older one is recorded again."""
DEFAULT_TEXT = (
    "A colonnade is a row of columns that carries a roof. Each column bears its share of the weight, and none of them "
    "could bear the whole. The builders cut every stone before they raised it, because a stone that does not fit in "
    "the air is harder to mend than one that does not fit on the ground. When the last column stood, they laid the "
    "beam across all of them at once, and the roof held. Travellers came from far away to walk in its shade, and the "
    "children of the builders told them how it had been made."
)
"""The default text: long enough to show the behaviour of heads; truncated to the model's context."""
PREFIX = "/v1/look/"


class Answer(NamedTuple):
    """An HTTP response."""

    status: int
    content_type: str
    body: bytes


def json_answer(value: Any, status: int = 200) -> Answer:
    """``value`` as JSON."""
    return Answer(status, "application/json", json.dumps(value).encode())


def error_answer(message: str, status: int) -> Answer:
    """An error in the same format as the server's other errors."""
    return json_answer({"error": {"message": message, "type": "invalid_request_error"}}, status)


class LookApp:
    """Responses for one model; ``record`` runs a forward pass over token ids and their pieces of text.

    Not thread-safe.
    """

    def __init__(
        self,
        name: str,
        config: ModelConfig,
        tokenizer: Tokenizer,
        record: Callable[[list[int], list[str]], Recording],
        *,
        plan: str = "",
        cache: Callable[[], dict[str, Any]] | None = None,
        adapter: Adapter | None = None,
        history: History = MappingProxyType({}),
    ):
        """``cache`` describes the pages of a running engine's cache.

        ``adapter`` is merged into the model; ``history`` is the routing of the run that trained it.
        """
        self._name, self._config, self._tokenizer = name, config, tokenizer
        self._record, self._plan, self._cache = record, plan, cache
        self._adapter, self._history = adapter, history
        self._kept: OrderedDict[str, Recording] = OrderedDict()
        limit = max(2, min(MAX_TOKENS, config.context) - 8)
        self._text = tokenizer.decode(list(tokenizer.encode(DEFAULT_TEXT))[:limit])

    def answer(self, method: str, path: str, query: str = "", body: bytes = b"") -> Answer:
        """Answer a request for ``path`` below :data:`PREFIX`; errors are returned as responses."""
        try:
            if (method, path) == ("GET", "model"):
                return json_answer(self._model())
            if (method, path) == ("POST", "record"):
                return json_answer(self._recorded(_text_of(body)))
            if (method, path) == ("GET", "scene"):
                return json_answer(self._scene(Query(query)))
            if (method, path) == ("GET", "tensor"):
                return Answer(200, "application/octet-stream", self._tensor(Query(query)))
        except RequestError as error:
            return error_answer(str(error), 404 if error.code == "unknown_run" else 400)
        except ColonnadeError as error:
            return error_answer(str(error), 400)
        return error_answer(f"there is no {method} {PREFIX}{path[:40]}", 404)

    def _model(self) -> dict[str, Any]:
        config = self._config
        return {
            "model": self._name, "family": config.family, "layers": config.layers, "heads": config.heads,
            "experts": config.moe.experts if config.moe else 0, "text": self._text, "plan": self._plan,
            "pages": pages_of(config) + (["cache"] if self._cache else []), "adapter": self._adapter is not None,
        }  # fmt: skip

    def _recorded(self, text: str) -> dict[str, Any]:
        tokens = self._tokenizer.encode(text or self._text)
        check_tokens(self._config, tokens)
        run = run_name(tokens)
        if run not in self._kept:
            pieces = [self._tokenizer.decode([token]) for token in tokens]
            self._kept[run] = self._record(list(tokens), pieces)
            self._kept[run].adapter = self._adapter
            while len(self._kept) > MAX_RECORDINGS:
                self._kept.popitem(last=False)
        self._kept.move_to_end(run)
        return {"run": run, "tokens": self._kept[run].tokens, "pieces": self._kept[run].pieces}

    def _run(self, query: "Query") -> Recording:
        run = query.text("run")
        if run not in self._kept:
            raise RequestError(
                f"there is no recording '{run[:40]}'; record its text again", param="run", code="unknown_run"
            )
        return self._kept[run]

    def _scene(self, query: "Query") -> dict[str, Any]:
        page = query.text("page")
        if page == "cache":
            if self._cache is None:
                raise RequestError(
                    "the cache page needs a running server: colonnade serve MODEL --serve.look", param="page"
                )
            return self._cache()
        layer, head, rank = query.number("layer", 0), query.number("head", 0), query.number("rank", 8)
        return make_page(self._run(query), page, layer, head, rank, self._history)

    def _tensor(self, query: "Query") -> bytes:
        recording, name = self._run(query), query.text("name")
        x = Names(recording, query.number("layer", 0), query.number("head", -1)).get(name)
        reduce, parts = query.number("reduce", 1), query.number("parts", 1)
        if not 1 <= reduce <= 1024:
            raise RequestError(f"reduce={reduce} is not from 1 to 1024", param="reduce")
        if parts not in (1, 2):
            raise RequestError(f"parts={parts} is neither 1 nor 2", param="parts")
        rows, cols = span(query.get("rows"), x.shape[0], "rows"), span(query.get("cols"), x.shape[1], "cols")
        tile = x[rows, cols]
        if tile.size // reduce**2 > MAX_TILE:
            raise RequestError(
                f"{tile.size:,} elements are more than {MAX_TILE:,}; ask for fewer rows, or reduce=2 or more"
            )
        where = {"rows": [rows.start, rows.stop], "cols": [cols.start, cols.stop], "of": list(x.shape)}
        return encode_tile(reduce_tile(tile, reduce), parts, name=name, reduce=reduce, dtype="float16", **where)


class Query:
    """A query string with checked values."""

    def __init__(self, query: str):
        try:
            parsed = parse_qs(query, keep_blank_values=True, max_num_fields=32, strict_parsing=bool(query))
        except ValueError:
            raise RequestError("the query is malformed; use name=value pairs, at most 32") from None
        self._values: Mapping[str, list[str]] = parsed

    def get(self, name: str) -> str | None:
        """The value of ``name``; raises :class:`RequestError` for a repeated one."""
        values = self._values.get(name, [])
        if len(values) > 1:
            raise RequestError(f"'{name}' is given {len(values)} times; pass it once", param=name)
        return values[0] if values else None

    def text(self, name: str) -> str:
        """The value of ``name``, which must be given."""
        if (value := self.get(name)) is None:
            raise RequestError(f"'{name}' is missing", param=name)
        return value

    def number(self, name: str, default: int) -> int:
        """A whole number."""
        value = self.get(name)
        if value is None:
            return default
        digits = value.removeprefix("-")
        if not (digits.isascii() and digits.isdigit() and len(digits) < 10):
            raise RequestError(f"{name}={value[:40]!r} is not a whole number", param=name)
        return int(value)


def _text_of(body: bytes) -> str:
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        raise RequestError('the body is not JSON; send {"text": "…"}') from None
    text = value.get("text") if isinstance(value, dict) else None
    if not isinstance(text, str) or len(text) > MAX_TEXT:
        raise RequestError(f'the body needs a "text" of at most {MAX_TEXT:,} characters', param="text")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise RequestError("the text has half of a surrogate pair; send valid Unicode", param="text") from None
    return text


FILES = {"": ("index.html", "text/html; charset=utf-8"), "viewer.js": ("viewer.js", "text/javascript; charset=utf-8"),
         "viewer.css": ("viewer.css", "text/css; charset=utf-8")}  # fmt: skip

HEADERS = {
    # Styles that scripts set through CSSOM need no permission; nothing is loaded from elsewhere.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors {ancestors}; "
    "require-trusted-types-for 'script'; trusted-types 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


def page_headers(*, framed: bool = False) -> dict[str, str]:
    """The page's security headers; ``framed`` allows frames in pages on this machine (notebooks)."""
    local = "'self' http://localhost:* http://127.0.0.1:*" if framed else "'none'"
    return {name: value.format(ancestors=local) for name, value in HEADERS.items()}


def static_file(path: str) -> Answer | None:
    """A file of the built page; None if there is none."""
    if path not in FILES:
        return None
    name, content_type = FILES[path]
    return Answer(200, content_type, (resources.files("colonnade.look") / "static" / name).read_bytes())
