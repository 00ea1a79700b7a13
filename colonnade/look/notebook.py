"""Links and frames for notebooks: the viewer's state from Python objects.

from colonnade.look import notebook

server = notebook.serve(model)                    # a loaded model, or nothing for plain matrices
server.head("Some text", layer=5, head=4)         # the last value of a cell shows as a frame
server.expression("C = A @ B", A=(24, 32), B=(32, 24), anim="rows")
"""

import base64
import html
import json
import threading
import zlib
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol, Self

from colonnade.checkpoint.adapters import read_adapter
from colonnade.checkpoint.load_model import open_model
from colonnade.config import ModelConfig
from colonnade.data.tokenizer import Tokenizer
from colonnade.errors import ConfigError
from colonnade.look.app import LookApp
from colonnade.look.expression import leaves, parse
from colonnade.look.history import read_history
from colonnade.look.recorder import record
from colonnade.look.server import HOST, make_server
from colonnade.look.values import shapes
from colonnade.model import Transformer

COMPRESS_FROM = 600
"""Size of a state above which its link is compressed [bytes], as in viewer/src/state.ts."""


def encode_state(state: Mapping[str, Any]) -> str:
    """The part of a link after "#"; the page checks every value."""
    data = json.dumps(state, separators=(",", ":")).encode()
    kind = "j"
    if len(data) >= COMPRESS_FROM:
        deflate = zlib.compressobj(9, wbits=-15)
        kind, data = "z", deflate.compress(data) + deflate.flush()
    return kind + base64.urlsafe_b64encode(data).decode().rstrip("=")


class LoadedModel(Protocol):
    """The attributes of the result of :func:`colonnade.load` that the viewer needs."""

    source: str
    transformer: Transformer

    @property
    def config(self) -> ModelConfig:
        """The transformer's configuration."""
        ...

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer."""
        ...


class Frame:
    """A view; as the last value of a notebook cell it displays the page."""

    def __init__(self, url: str, height: int = 600):
        self.url, self.height = url, height

    def _repr_html_(self) -> str:
        url = html.escape(self.url, quote=True)
        size = f'width="100%" height="{self.height}" style="border:0"'
        return f'<iframe src="{url}" {size} title="Inside the matrix"></iframe>'

    def __repr__(self) -> str:
        return self.url


class NotebookServer:
    """The viewer's server in a thread of this process; it ends with :meth:`close`, or with the process."""

    def __init__(self, app: LookApp | None, port: int = 0):
        self._server = make_server(app, port, framed=True)
        self._has_model = app is not None
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self.url = f"http://{HOST}:{self._server.server_address[1]}/"

    def view(self, state: Mapping[str, Any], height: int = 600) -> Frame:
        """Any state of the viewer."""
        return Frame(f"{self.url}#{encode_state(state)}", height)

    def expression(
        self, expr: str, *, height: int = 600, state: Mapping[str, Any] | None = None, **matrices: Any
    ) -> Frame:
        """An expression; each matrix is its (rows, cols), or a table with ``rows``, ``cols``, ``init`` and others.

        Other settings of the viewer are in ``state``: ``{"anim": "rows", "nodes": {"C": {"epilogue": "relu"}}}``.
        """
        trees = parse(expr)
        names = {leaf.name for tree in trees for leaf in leaves(tree)}
        if unknown := sorted(set(matrices) - names):
            raise ConfigError(f"the expression has no matrix '{unknown[0]}'; it has {', '.join(sorted(names))}")
        specs = {
            name: dict(value) if isinstance(value, Mapping) else {"rows": value[0], "cols": value[1]}
            for name, value in matrices.items()
        }
        shapes(trees, specs)
        return self.view({"expr": expr, "leaves": specs, **(state or {})}, height)

    def page(
        self, page: str, text: str = "", *, layer: int = 0, head: int = 0, rank: int = 8, height: int = 600
    ) -> Frame:
        """A page of the model: head, heads, layer, experts, decode, lora or routing."""
        if not self._has_model:
            raise ConfigError("this server has no model; start it with notebook.serve(model)")
        model = {"page": page, "text": text, "layer": layer, "head": head, "rank": rank}
        return self.view({"model": model}, height)

    def head(self, text: str = "", layer: int = 0, head: int = 0, **options: Any) -> Frame:
        """An attention head over ``text``."""
        return self.page("head", text, layer=layer, head=head, **options)

    def close(self) -> None:
        """Stop the server."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def serve(model: LoadedModel | None = None, port: int = 0, *, adapter: str | Path | None = None) -> NotebookServer:
    """Start a server for ``model`` (of :func:`colonnade.load`), or for matrices without one.

    ``adapter`` is the adapter with which the model was loaded; it is found automatically if the model was loaded by the
    adapter's name.
    """
    return NotebookServer(None if model is None else make_app(model, adapter), port)


def make_app(model: LoadedModel, adapter: str | Path | None = None) -> LookApp:
    """The viewer's interface to ``model``, with its adapter and the routing of its training run."""
    opened = open_model(model.source) if Path(model.source).exists() else None
    if adapter is None and opened is not None and opened.adapters:
        adapter = opened.path
    return LookApp(
        model.source, model.config, model.tokenizer, partial(record, model.transformer),
        adapter=None if adapter is None else read_adapter(adapter, model.config),
        history={} if opened is None else read_history(opened.path, model.config),
    )  # fmt: skip
