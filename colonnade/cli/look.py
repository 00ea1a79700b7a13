"""The verb ``look``: shows a model's matrices in a browser."""

import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import Positional, arg

from colonnade.cli.common import Model, PlacementArgs, console, refuse_torchrun
from colonnade.config import ServeConfig
from colonnade.errors import ConfigError

if TYPE_CHECKING:
    from colonnade.model_spec import ModelSpec

MAX_PORT = 65535


def look(
    model: Positional[Model],
    port: int = 8770,
    placement: Annotated[PlacementArgs, arg(name="")] = PlacementArgs(),
) -> None:
    """Show a model's matrix products in space in a browser: heads, layers, experts, decoding, adapters.

    The page records one forward pass over a text that you type, and computes every product from the model's tensors.
    It is served on this machine only (127.0.0.1), until Ctrl-C.

    Args:
        model: The model to look into.
        port: The port of the page; 0 picks a free one.
        placement: Where the model runs.
    """
    refuse_torchrun("look")
    if not 0 <= port <= MAX_PORT:
        raise ConfigError(f"--port {port} is not from 0 to {MAX_PORT}")
    console.print(f"loading {model} ...", soft_wrap=True, markup=False)
    from colonnade.parallel.launch import launch

    spec = placement.spec(model, ServeConfig())
    spec.open()  # errors come before any process starts
    launch(_look, (spec, port), spec.plan)


def _look(spec: "ModelSpec", port: int) -> None:
    from colonnade.checkpoint.adapters import read_adapter
    from colonnade.look.app import LookApp
    from colonnade.look.group import HEARTBEAT_S, Leader, follow
    from colonnade.look.history import read_history
    from colonnade.look.server import running

    with spec.load() as loaded:
        model, plan = loaded.transformer, spec.plan
        if loaded.context.rank:
            follow(model, plan)
            return
        leader, never = Leader(model, plan), threading.Event()
        sharded = f"tp={plan.tp}" if plan.tp > 1 else ""
        opened = spec.open()
        app = LookApp(
            Path(spec.model).name, loaded.config, loaded.tokenizer, leader.record, plan=sharded,
            adapter=read_adapter(opened.path, loaded.config) if opened.adapters else None,
            history=read_history(opened.path, loaded.config),
        )  # fmt: skip
        try:
            with running(app, port) as url:
                console.print(f"{spec.model}: {url} (Ctrl-C ends)", soft_wrap=True, markup=False)
                while not never.wait(HEARTBEAT_S):
                    leader.heartbeat()
        except KeyboardInterrupt:
            console.print("closed")
        finally:
            leader.stop()
