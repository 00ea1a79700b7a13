"""Verbs that let a model write: ``generate``, ``chat`` and ``serve``.

What is wrong with the words themselves is said before anything that takes seconds is imported.
"""

import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import Positional, arg

from colonnade.cli.common import GenerativeModel, LogConsole, ServingPlacementArgs, is_main_process, refuse_torchrun
from colonnade.config import Cache as CacheKind
from colonnade.config import ServeConfig, WeightGroup, Weights
from colonnade.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from colonnade.serve.sampling_params import SamplingParams


@dataclass(frozen=True)
class SamplingArgs:
    """How tokens are chosen."""

    max_tokens: int | None = None
    """Tokens to generate, at most; by default an answer may fill the context, and a continuation has 256."""
    temperature: float = 0.8
    """Divides the logits; 0 always takes the likeliest token."""
    top_k: int = 0
    """Keep the k likeliest tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of likeliest tokens whose probabilities sum to p."""
    min_p: float = 0.0
    """Keep tokens at least this many times as probable as the likeliest."""
    seed: int | None = None
    """The same seed gives the same text."""
    stop: tuple[str, ...] = ()
    """Strings that end the text."""

    def params(self) -> "SamplingParams":
        """The same for the engine, checked."""
        from colonnade.serve.sampling_params import SamplingParams

        return SamplingParams(**vars(self))


@dataclass(frozen=True)
class CacheArgs:
    """Room for the keys and values of one text, and for the weights."""

    weights: Weights = "stored"
    """As the dtype says, or quantised while they are read (int8, int4, float8)."""
    weight_group: WeightGroup = 64
    """Inputs that share a scale of int4."""
    cache: CacheKind = "stored"
    """Keys and values as the dtype says, or in 8 bits: float8, or of latents (DeepSeek's attention) int8 too."""
    page_tokens: int | None = None
    """Tokens in one page of the cache; None: 16, on a GPU 64."""
    pages: int | None = None
    """Pages in the pool; None takes cache_bytes."""
    cache_bytes: int = 1 << 28
    """Memory for the key/value cache of one rank, at most [bytes], when pages is not given."""
    memory_bytes: int | None = None
    """What weights, cache, graphs and activations of one rank may take together [bytes], beside what Python and torch
    take by themselves (some 400 MB; on a GPU its context); None: what is free on its device when it starts."""
    token_budget: int | None = None
    """Tokens of the text in one forward pass; None: 512, on a GPU 2048."""
    fixed_steps: bool | None = None
    """Record the step that adds a token as a graph and replay it; None does so on a GPU, where that can be."""

    @property
    def limits(self) -> ServeConfig:
        """The same for an engine that answers one request at a time."""
        return ServeConfig(max_requests=1, **vars(self))


def generate(
    model: Positional[GenerativeModel],
    prompt: Annotated[Positional[str], arg(metavar="PROMPT")],
    sampling: Annotated[SamplingArgs, arg(name="")] = SamplingArgs(),
    placing: Annotated[ServingPlacementArgs, arg(name="")] = ServingPlacementArgs(),
    serve: CacheArgs = CacheArgs(),
) -> None:
    """Continue a text, as it is generated.

    Args:
        model: What to ask.
        prompt: The beginning of the text; - reads it from the standard input, without its last newline.
        sampling: How tokens are chosen.
        placing: Where the model runs.
        serve: Room for the text's keys and values.
    """
    params, where = sampling.params(), placing.where(model, serve.limits)
    from colonnade import chat as talk

    talk.generate(where, _read_stdin() if prompt == "-" and is_main_process() else prompt, params)


def _read_stdin() -> str:
    try:
        return sys.stdin.buffer.read().decode().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise RequestError(f"the standard input is not UTF-8 text (byte {error.start}); convert it first") from None


def chat(
    model: Positional[GenerativeModel],
    system: str | None = None,
    sampling: Annotated[SamplingArgs, arg(name="")] = SamplingArgs(),
    placing: Annotated[ServingPlacementArgs, arg(name="")] = ServingPlacementArgs(),
    serve: CacheArgs = CacheArgs(),
) -> None:
    """Chat with an instruction-tuned model on the terminal.

    Args:
        model: Whom to chat with.
        system: The system message that opens the conversation.
        sampling: How tokens are chosen.
        placing: Where the model runs.
        serve: Room for the text's keys and values.
    """
    refuse_torchrun("chat")
    params, where = sampling.params(), placing.where(model, serve.limits)
    from colonnade import chat as talk

    talk.chat(where, system, params)


def serve(
    model: Positional[GenerativeModel],
    serve: ServeConfig = ServeConfig(),
    placing: Annotated[ServingPlacementArgs, arg(name="")] = ServingPlacementArgs(),
) -> None:
    """Serve a model over HTTP as OpenAI's API does: /v1/completions, /v1/chat/completions, /v1/models.

    Args:
        model: What to serve.
        serve: Address and limits.
        placing: Where the model runs.
    """
    refuse_torchrun("serve")
    where = placing.where(model, serve)
    from colonnade.chat import batching_note

    found = where.writer()
    try:
        from colonnade.serve.server import serve as run
    except ImportError as error:
        raise ConfigError(f"serving needs the package '{error.name}'; run: pip install 'colonnade[serve]'") from None

    announce = partial(LogConsole(stderr=True, highlight=False).print, soft_wrap=True, markup=False)
    if note := batching_note(found.config):
        announce(note)
    run(where.loading(found), where.plan, serve, name=Path(model).name, device=placing.device, announce=announce)
