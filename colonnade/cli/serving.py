"""The verbs that generate text: ``generate``, ``chat`` and ``serve``.

The flags are validated before slow imports.
"""

import os
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import Positional, arg

from colonnade.cli.common import (
    GenerativeModel,
    LogConsole,
    Models,
    ServingPlacementArgs,
    is_main_process,
    refuse_torchrun,
)
from colonnade.config import CacheFormat as CacheKind
from colonnade.config import ServeConfig, WeightFormat, WeightGroup
from colonnade.errors import ConfigError, RequestError
from colonnade.serve.child_process import discard_waiting

if TYPE_CHECKING:
    from colonnade.model_spec import ModelSpec
    from colonnade.serve.sampling_params import SamplingParams


@dataclass(frozen=True)
class SamplingArgs:
    """How tokens are sampled."""

    max_tokens: int | None = None
    """Maximum number of tokens to generate; by default 256 for generate, and up to the end of the context for chat."""
    temperature: float = 0.8
    """Divides the logits; 0 always takes the most probable token."""
    top_k: int = 0
    """Keep the k most probable tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of most probable tokens whose probabilities sum to at least p."""
    min_p: float = 0.0
    """Keep tokens with at least this fraction of the highest probability."""
    seed: int | None = None
    """The same seed gives the same text."""
    stop: tuple[str, ...] = ()
    """Strings that end the text."""

    def params(self) -> "SamplingParams":
        """Validate them."""
        from colonnade.serve.sampling_params import SamplingParams

        return SamplingParams(**vars(self))


@dataclass(frozen=True)
class GenerateArgs(SamplingArgs):
    """Sampling, and the options of encoder–decoders."""

    beams: int = 1
    """Number of beams; beam search finds a probable text instead of sampling one (encoder–decoders; temperature 0)."""
    length_penalty: float = 1.0
    """A text's log-probability is divided by its number of tokens to this power before beams are compared."""
    source_lang: str | None = None
    """The language of the prompt, for a translation model (eng_Latn)."""
    target_lang: str | None = None
    """The language to translate into."""


@dataclass(frozen=True)
class CacheArgs:
    """The engine's memory, for one request at a time."""

    weights: WeightFormat = "stored"
    """Weights in the dtype (stored), or quantised while they are read (int8, int4, float8)."""
    weight_group: WeightGroup = 64
    """Inputs that share a scale (int4)."""
    cache: CacheKind = "stored"
    """Keys and values in the dtype (stored), or in 8 bits: float8, or int8 for latent attention (DeepSeek)."""
    page_tokens: int | None = None
    """Tokens in one page of the cache; None: 16, on a GPU 64."""
    pages: int | None = None
    """Pages of the cache; None: as many as fit into cache_bytes."""
    cache_bytes: int | None = None
    """Maximum memory for the key/value cache of one rank, unless pages is given [bytes]; None: 90% of the free memory
    on a GPU and a quarter on a CPU. At most one whole context is allocated."""
    memory_bytes: int | None = None
    """Memory limit for the weights, cache, graphs and activations of one rank together [bytes], without Python and
    torch (about 400 MB, plus the context on a GPU); None: the free memory of its device at the start."""
    token_budget: int | None = None
    """Tokens of the prompt in one forward pass; None: 512, on a GPU 2048."""
    graph_capture: bool | None = None
    """Run decode steps as CUDA graphs, or recorded on a CPU; None: for models and layouts that allow it."""

    @property
    def config(self) -> ServeConfig:
        """These settings as a ServeConfig."""
        return ServeConfig(max_requests=1, **vars(self))

    def for_beams(self, beams: int) -> ServeConfig:
        """These settings for a beam search."""
        return self.config.replace(max_requests=max(1, beams))


def generate(
    model: Positional[GenerativeModel],
    prompt: Annotated[Positional[str], arg(metavar="PROMPT")],
    sampling: Annotated[GenerateArgs, arg(name="")] = GenerateArgs(),
    placement: Annotated[ServingPlacementArgs, arg(name="")] = ServingPlacementArgs(),
    serve: CacheArgs = CacheArgs(),
    int8: bool = False,
    trust: bool = False,
) -> None:
    """Continue a text; prints it as it is generated.

    Args:
        model: The model that generates.
        prompt: The beginning of the text; - reads it from standard input, without the last newline.
        sampling: How tokens are sampled.
        placement: Where the model runs.
        serve: The engine's memory.
        int8: Weights and their inputs in 8 bits (--serve.weights int8_dynamic), on a CPU.
        trust: Run the native code of a package that colonnade export wrote.
    """
    params = sampling.params()
    if _runs_package(model, trust, ours=placement == ServingPlacementArgs() and serve == CacheArgs() and not int8):
        from colonnade.package_chat import generate_from_package

        generate_from_package(Path(model), _read_stdin() if prompt == "-" else prompt, params, trust=trust)
        return
    spec = placement.spec(model, _with_int8(serve.for_beams(sampling.beams), int8))
    from colonnade.chat import generate

    generate(spec, _read_stdin() if prompt == "-" and is_main_process() else prompt, params)


def _runs_package(model: str, trust: bool, *, ours: bool) -> bool:
    """Whether ``model`` is an exported package; ``ours``: no flag sets an option that a package cannot change."""
    package = os.path.isfile(f"{model}/package.json")  # noqa: PTH113 - False if it may not be read; without torch
    if trust and not package:
        raise ConfigError(
            f"--trust is for packages that colonnade export wrote, and there is no {model}/package.json; check "
            "the path, or remove --trust"
        )
    if package and not ours:
        raise ConfigError(
            f"{model} is an exported package, which runs as it was exported; remove --plan, --device, --dtype, "
            "--experts, --serve and --int8, or use the model that it was made from"
        )
    return package


def _with_int8(config: ServeConfig, int8: bool) -> ServeConfig:
    if int8 and config.weights not in ("stored", "int8_dynamic"):
        raise ConfigError(
            f"--int8 is --serve.weights int8_dynamic, and --serve.weights is {config.weights}; use only one of them"
        )
    return config.replace(weights="int8_dynamic") if int8 else config


def _read_stdin() -> str:
    try:
        return sys.stdin.buffer.read().decode().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise RequestError(f"the standard input is not UTF-8 text (byte {error.start}); convert it first") from None


def chat(
    model: Positional[GenerativeModel],
    system: str | None = None,
    sampling: Annotated[SamplingArgs, arg(name="")] = SamplingArgs(),
    placement: Annotated[ServingPlacementArgs, arg(name="")] = ServingPlacementArgs(),
    serve: CacheArgs = CacheArgs(),
    int8: bool = False,
    trust: bool = False,
) -> None:
    """Chat with an instruction-tuned model on the terminal.

    Args:
        model: The model to chat with.
        system: The system message at the start of the conversation.
        sampling: How tokens are sampled.
        placement: Where the model runs.
        serve: The engine's memory.
        int8: Weights and their inputs in 8 bits (--serve.weights int8_dynamic), on a CPU.
        trust: Run the native code of a package that colonnade export wrote.
    """
    refuse_torchrun("chat")
    params = sampling.params()
    if _runs_package(model, trust, ours=placement == ServingPlacementArgs() and serve == CacheArgs() and not int8):
        from colonnade.package_chat import chat_with_package

        chat_with_package(Path(model), system, params, trust=trust)
        return
    spec = placement.spec(model, _with_int8(serve.config, int8))
    from colonnade.chat import chat

    chat(spec, system, params)


def _with_environment_keys(config: ServeConfig) -> ServeConfig:
    """``config`` with the keys of the environment, where it has none."""
    names = {
        "api_key": "COLONNADE_API_KEY", "admin_key": "COLONNADE_ADMIN_KEY", "upstream_key": "COLONNADE_UPSTREAM_KEY"
    }  # fmt: skip
    found = {field: os.environ[name] for field, name in names.items() if name in os.environ}
    return config.replace(**{field: key for field, key in found.items() if getattr(config, field) is None})


def _serve_transcriptions(spec: "ModelSpec", config: ServeConfig) -> None:
    """Serve a Whisper model."""
    try:
        from colonnade.serve.served_models import model_names
        from colonnade.speech.transcription_server import serve as run
    except ImportError as error:
        raise ConfigError(f"serving needs the package '{error.name}'; run: pip install 'colonnade[serve]'") from None
    discard_waiting()  # this process runs the model
    announce = partial(LogConsole(stderr=True, highlight=False).print, soft_wrap=True, markup=False)
    run(spec.load(), model_names([spec.model], config.model_name)[0], config, announce)


def serve(
    models: Models,
    serve: ServeConfig = ServeConfig(),
    placement: Annotated[ServingPlacementArgs, arg(name="")] = ServingPlacementArgs(),
    int8: bool = False,
) -> None:
    """Serve models over HTTP with OpenAI's API: /v1/chat/completions, /v1/completions, or /v1/embeddings.

    A Whisper model serves /v1/audio/transcriptions. Several models have one engine each; the "model" of a request, the
    last part of the model's path, selects one. Encoders serve /v1/embeddings, /v1/score and /v1/rerank, classifiers
    /classify; --serve.task embed serves the embeddings of a model that also generates text.

    Args:
        models: The models to serve; with --serve.upstreams only a name.
        serve: Address and limits.
        placement: Where the model runs.
        int8: Weights and their inputs in 8 bits (--serve.weights int8_dynamic), on a CPU.
    """
    refuse_torchrun("serve")
    serve = _with_int8(_with_environment_keys(serve), int8)
    if not models:
        raise ConfigError("there is no model to serve; name one or more, such as: colonnade serve smollm2")
    if serve.look and (serve.admin_key is None or serve.upstreams):
        raise ConfigError(
            "serve.look shows the model to whoever has the admin key, and needs an admin key and a local model; set "
            "COLONNADE_ADMIN_KEY, and remove --serve.upstreams"
        )
    specs = [placement.spec(model, serve) for model in models]
    if len(specs) == 1 and not serve.upstreams and specs[0].reads_audio():
        _serve_transcriptions(specs[0], serve)
        return
    try:
        from colonnade.serve.served_models import model_names
        from colonnade.serve.server import serve as run
    except ImportError as error:
        raise ConfigError(f"serving needs the package '{error.name}'; run: pip install 'colonnade[serve]'") from None
    loaders = [None if serve.upstreams else spec.open_loader for spec in specs]
    by_name = dict(zip(model_names(models, serve.model_name), loaders, strict=True))
    announce = partial(LogConsole(stderr=True, highlight=False).print, soft_wrap=True, markup=False)
    run(by_name, specs[0].plan, serve, device="cpu" if serve.upstreams else placement.device, announce=announce)
