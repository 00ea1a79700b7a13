"""Settings of the serving engine and its HTTP server."""

import re
from collections.abc import Sequence
from typing import Literal, TypeGuard

from pydantic import Field, ValidationInfo, field_validator, model_validator

from colonnade.config.base import Config, short_repr
from colonnade.config.feature_checks import WeightFormat, WeightGroup
from colonnade.config.model import ModelConfig
from colonnade.errors import ConfigError

CacheFormat = Literal["stored", "int8", "float8"]
"""Storage format of the key/value cache: the model's type, or 8 bits."""

LogFormat = Literal["off", "text", "json"]
"""How requests are logged."""

MAX_REPLICAS = 1024

_ORIGIN = re.compile(r"\*|https?://[^/\s@]+")

_URL = re.compile(r"https?://[^/\s@?#]+/?")

ToolFormatName = Literal["hermes", "llama3", "mistral"]
"""Notation of tool calls: that of Qwen and Hermes, of Llama 3, of Mistral."""

Pooling = Literal["mean", "cls", "last"]
"""How hidden states are pooled into an embedding: the mean of all tokens, the first token, or the last token."""

ClassActivation = Literal["softmax", "sigmoid", "identity"]
"""The function that turns a classifier's logits into probabilities or scores."""


def _are_texts(values: object) -> TypeGuard[Sequence[str]]:
    return isinstance(values, list | tuple) and all(isinstance(each, str) for each in values)  # type: ignore[reportUnknownVariableType]


class ServeConfig(Config):
    """Memory, batching and HTTP settings of one serving engine."""

    task: Literal["auto", "generate", "embed"] = "auto"
    """What the server returns: text (generate), or embeddings, scores and rankings (embed). auto: text from a causal
    model, classes from an encoder with a class head, embeddings from any other encoder."""
    pooling: Pooling | None = None
    """Pooling of an embedding: the mean of all tokens' hidden states, the first token's, or the last token's; None: as
    in sentence-transformers' files next to the weights, otherwise the mean, for causal models the last."""
    page_tokens: int | None = Field(default=None, gt=0, le=1 << 20)
    """Tokens per page of the key/value cache; None: 16 on a CPU, 64 on a GPU."""
    weights: WeightFormat = "stored"
    """Storage format of the weight matrices: stored keeps the checkpoint's format (unquantised weights use the dtype),
    dense dequantises; the others quantise while the checkpoint is read: int8 and float8 with one scale per row, int4
    with one per group of inputs, int8_dynamic (on a CPU) as int8 with rounded inputs. Routers are not quantised, nor
    are embeddings, unless they are also the output projection (int8 under int4)."""
    weight_group: WeightGroup = 64
    """int4: consecutive inputs that share a scale; smaller groups are more accurate and take a little more memory."""
    cache: CacheFormat = "stored"
    """Storage format of keys and values: stored keeps the dtype; 8 bits hold twice as many tokens in the same memory.
    float8 works for all models (scaled only for latent attention), int8 for latent attention (DeepSeek), with two
    scales per token."""
    pages: int | None = Field(default=None, gt=0)
    """Pages of the key/value cache, over all context-parallel ranks; None: as many as fit into cache_bytes."""
    cache_bytes: int | None = Field(default=None, gt=0)
    """Memory for the key/value cache of one rank if pages is not set [bytes]; at most max_requests whole contexts are
    allocated. None: 90% on a GPU, or a quarter on a CPU, of the memory left after weights, activations and CUDA graphs,
    or all that memory_bytes leaves; several models on one device divide it equally."""
    memory_bytes: int | None = Field(default=None, gt=0)
    """Memory limit of one rank for weights, cache, CUDA graphs and activations together [bytes]; Python, torch and the
    CUDA context come on top (about 400 MB). None: the memory that is free on the device at the start."""
    prefix_cache: bool = True
    """Keep the pages of finished requests until their memory is needed; a request with the same beginning reuses
    them."""
    cascade_attention: bool = True
    """Read the keys of a prefix that several requests share only once per step (cascade attention), where Colonnade's
    kernels support it and it is faster."""
    max_requests: int = Field(default=64, gt=0, le=1 << 16)
    """Maximum number of requests in one forward pass."""
    token_budget: int | None = Field(default=None, gt=0, le=1 << 24)
    """Maximum number of tokens in one forward pass: decoding requests first, then chunks of prompts (chunked prefill);
    None: 512 on a CPU, 2048 on a GPU."""
    async_scheduling: bool | None = None
    """Launch the next forward pass before the tokens of the last one are known on the host (asynchronous scheduling);
    None: only on a GPU."""
    graph_capture: bool | None = None
    """Pad decoding steps to a few batch sizes; on a GPU each size is captured once as a CUDA graph and replayed, on a
    CPU recorded once and replayed in one call. None: for models and layouts with steps that can be captured or
    recorded."""
    batch_invariant: bool = False
    """Bitwise batch-invariant: a request's logits do not depend on the other requests. Slower; needs one rank; on a CPU
    models without C++ kernels compute one token at a time."""
    max_waiting: int = Field(default=1024, gt=0)
    """Maximum length of the queue of waiting requests; further ones are refused (429)."""
    replicas: int | Literal["auto"] = 1
    """Engines of each model on this machine, behind one address; on a CPU each has its own cores in one NUMA node,
    otherwise its own GPUs. auto: one per NUMA node, or as many as there are GPUs for."""
    fronts: int = Field(default=1, gt=0, le=256)
    """HTTP processes that share the port in front of the engines; one handles 20,000 to 30,000 streamed tokens/s."""
    upstreams: tuple[str, ...] = ()
    """Comma-separated URLs of servers to forward requests to, such as http://10.0.0.7:8000; no engine runs here, and
    MODEL is only a name."""
    shadow: str | None = None
    """URL of another server, such as http://10.0.0.7:8000, to which answered requests are repeated for comparison."""
    shadow_share: float = Field(default=1.0, ge=0, le=1)
    """Share of the requests sent to the shadow, 0 to 1."""
    shadow_log: str | None = None
    """File to which a JSON line is appended for each comparison with the shadow; colonnade shadow FILE summarises
    it."""
    upstream_key: str | None = Field(default=None, min_length=1, repr=False)
    """API key for upstreams and the shadow. Preferably set the environment variable COLONNADE_UPSTREAM_KEY."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = Field(default=8000, ge=0, le=65535)
    """TCP port; 0: any free port."""
    model_name: str | None = None
    """Model name in the HTTP API, comma-separated for several models; None: the last part of the model's path."""
    adapters: tuple[str, ...] = ()
    """Adapters as comma-separated NAME=PATH: a run trained with --lora.rank, or a PEFT folder. Requests select one by
    its name as their model; requests in the same step may use different ones."""
    draft: str | None = Field(default=None, min_length=1)
    """Speculative decoding, which does not change the text: ngram drafts the tokens that followed the last occurrence
    of the newest three (prompt look-up); a smaller MODEL with the same tokenizer drafts its own. None: off."""
    draft_tokens: int = Field(default=5, gt=0, le=64)
    """Maximum number of tokens to draft per request and step."""
    tool_format: ToolFormatName | None = None
    """How the model writes tool calls; None: as in its chat template."""
    max_body_bytes: int = Field(default=8 << 20, gt=0)
    """Maximum size of a request body; larger ones are refused (413) [bytes]."""
    keys: str | None = None
    """File of API keys with their limits, in TOML or JSON lines; SIGHUP reloads it. Requests then need a key,
    except to /health, /ready and /."""
    api_key: str | None = Field(default=None, min_length=1, repr=False)
    """One API key without limits. Preferably set the environment variable COLONNADE_API_KEY: other users of the machine
    can see the command line."""
    admin_key: str | None = Field(default=None, min_length=1, repr=False)
    """Key for POST /admin/drain, /admin/cache/reset and /admin/weights, which are disabled without it; also
    COLONNADE_ADMIN_KEY."""
    look: bool = False
    """Show the first model's matrices and its cache at /look/, protected by the admin key; a recording runs one forward
    pass between two steps."""
    drain_s: float = Field(default=25.0, ge=0, le=1e6)
    """Time for running requests to finish after the server is asked to stop [s]; the default leaves 5 of the 30 s that
    Kubernetes allows."""
    log: LogFormat = "text"
    """What to log to stderr for each request, never its text. text: a line with time, client, path and status; json: an
    object that also has id, key, tokens, times and finish reason; off: nothing."""
    trace: str | None = Field(default=None, pattern=r"^https?://[^\s]+$")
    """URL to which an OpenTelemetry collector accepts traces by OTLP over HTTP, such as
    http://127.0.0.1:4318/v1/traces; needs the extra trace."""
    metrics_prefix: str = Field(default="colonnade", pattern=r"^[a-zA-Z_][a-zA-Z0-9_]*$", max_length=64)
    """Prefix of the metrics' names; vllm for dashboards made for vLLM."""
    origins: tuple[str, ...] = ()
    """Origins whose pages may use the server from a browser (CORS), such as https://chat.example.com; * for all. On a
    loopback address without API keys, requests may name their hosts, in addition to IP addresses and localhost."""

    @field_validator("replicas", mode="before")
    @classmethod
    def _is_count(cls, replicas: object) -> object:
        if isinstance(replicas, int) and not isinstance(replicas, bool) and 0 < replicas <= MAX_REPLICAS:
            return replicas
        if replicas != "auto":
            raise ConfigError(f"serve.replicas is {short_repr(replicas)}; it must be 1 to {MAX_REPLICAS}, or auto")
        return replicas

    @field_validator("upstreams", "adapters", mode="before")
    @classmethod
    def _split_at_commas(cls, urls: object) -> object:
        return tuple(url for each in urls for url in each.split(",")) if _are_texts(urls) else urls

    @field_validator("shadow", "upstreams")
    @classmethod
    def _are_urls(cls, urls: str | tuple[str, ...] | None, info: ValidationInfo) -> str | tuple[str, ...] | None:
        for url in (urls,) if isinstance(urls, str) else urls or ():
            if not _URL.fullmatch(url):
                name = f"serve.{info.field_name}"
                raise ConfigError(f"{name} has {short_repr(url)}; it must be http://HOST[:PORT] or https://HOST[:PORT]")
        return urls

    @field_validator("origins")
    @classmethod
    def _are_origins(cls, origins: tuple[str, ...]) -> tuple[str, ...]:
        for origin in origins:
            if not _ORIGIN.fullmatch(origin):
                raise ConfigError(f"serve.origins has {short_repr(origin)}; an origin is SCHEME://HOST[:PORT], or *")
        return origins

    @property
    def adapter_paths(self) -> dict[str, str]:
        """The paths of :attr:`adapters` by name."""
        return dict(_name_and_path(each) for each in self.adapters)

    @model_validator(mode="after")
    def _check_adapters(self) -> "ServeConfig":
        names = [_name_and_path(each)[0] for each in self.adapters]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ConfigError(f"serve.adapters has two adapters called '{twice}'; use unique names")
        if self.adapters and self.batch_invariant:
            raise ConfigError(
                "serve.adapters and serve.batch_invariant are mutually exclusive: an adapter's products depend on "
                "other requests; serve a merged model"
            )
        if self.adapters and self.upstreams:
            raise ConfigError("serve.adapters must be set on the upstream servers; remove them here")
        return self

    @property
    def page(self) -> int:
        """``page_tokens`` of a resolved config (:mod:`colonnade.serve.resolve_config`)."""
        assert self.page_tokens is not None, "the config must be resolved"
        return self.page_tokens

    @property
    def budget(self) -> int:
        """``token_budget`` of a resolved config."""
        assert self.token_budget is not None, "the config must be resolved"
        return self.token_budget

    @property
    def draft_model(self) -> str | None:
        """The model that ``draft`` names; None for no speculative decoding, or prompt look-up."""
        return None if self.draft == "ngram" else self.draft

    def check(self, model: ModelConfig) -> None:
        """Raise :class:`ConfigError` if ``model`` cannot be served with these settings."""
        if self.cache == "int8" and model.latent is None:
            raise ConfigError(
                "an int8 cache needs latent attention, whose one vector per token has its own scales, and this model "
                f"has {model.kv_heads} key/value heads without scales; use --serve.cache float8"
            )


def _name_and_path(adapter: str) -> tuple[str, str]:
    name, equals, path = adapter.partition("=")
    if not (name and equals and path):
        raise ConfigError(f"serve.adapters has {short_repr(adapter)}; write NAME=PATH")
    return name, path
