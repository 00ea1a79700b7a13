"""What an engine is told: memory for the cache, and how much to do at once."""

from typing import Literal

from pydantic import Field

from colonnade.config.base import Config
from colonnade.config.feature_checks import WeightFormat, WeightGroup
from colonnade.config.model import ModelConfig
from colonnade.errors import ConfigError

CacheFormat = Literal["stored", "int8", "float8"]
"""How what is kept of a token is kept: in the model's type, or in 8 bits."""


class ServeConfig(Config):
    """Limits of one serving engine."""

    page_tokens: int | None = Field(default=None, gt=0, le=1 << 20)
    """Tokens in one page of the key/value cache; None: 16, on a GPU 64."""
    weights: WeightFormat = "stored"
    """How the matrices of a model are kept in memory: as the dtype says, or in fewer bits, quantised while they are
    read: int8 and float8 with a scale a row, int4 with one a group of inputs. Embeddings and routers stay
    as they are."""
    weight_group: WeightGroup = 64
    """Inputs that share a scale of int4; fewer are more exact, and a little larger."""
    cache: CacheFormat = "stored"
    """How keys and values lie in the cache: as the dtype says, or in 8 bits, for twice as many tokens in the same
    memory: float8, or, of latents (DeepSeek's attention), int8 too; latents have two scales a token, others none."""
    pages: int | None = Field(default=None, gt=0)
    """Pages in the pool, those of all context ranks; None takes cache_bytes."""
    cache_bytes: int = Field(default=1 << 28, gt=0)
    """Memory for the key/value cache of one rank [bytes], when pages is not given."""
    memory_bytes: int | None = Field(default=None, gt=0)
    """What weights, cache, graphs and activations of one rank may take together [bytes], beside what Python and torch
    take by themselves (some 400 MB; on a GPU its context); None: what is free on its device when it starts."""
    prefix_cache: bool = True
    """Keep the pages of what was answered until the room is needed: who begins alike starts from there."""
    shared_reading: bool = True
    """Read keys that several requests share once for all of them, where our kernels run and it is faster."""
    max_requests: int = Field(default=64, gt=0, le=1 << 16)
    """Requests in one forward pass."""
    token_budget: int | None = Field(default=None, gt=0, le=1 << 24)
    """Tokens in one forward pass: decodes first, then chunks of prompts; None: 512, on a GPU 2048."""
    run_ahead: bool | None = None
    """Hand the next forward pass to the device before the last one's tokens are known; None does so on a GPU."""
    fixed_steps: bool | None = None
    """Pad steps that only decode to a few sizes; on a GPU each is recorded once as a graph and then replayed.
    None does so on a GPU, for models and layouts whose steps can be recorded."""
    batch_invariant: bool = False
    """Compute so that a request's tokens are the same, to the last bit of their logits, whoever else is served.
    Slower; on one rank; on a CPU one token at a time."""
    max_waiting: int = Field(default=1024, gt=0)
    """Requests that may wait; one more is refused (429)."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = Field(default=8000, ge=0, le=65535)
    """TCP port; 0 takes a free one."""
    model_name: str | None = None
    """The name clients use; by default the last part of the model's path."""
    max_body_bytes: int = Field(default=8 << 20, gt=0)
    """The largest request body; a larger one is refused (413) [bytes]."""
    drain_s: float = Field(default=5.0, ge=0, le=1e6)
    """Time that running requests have to finish once the server is asked to stop [s]."""
    log: bool = True
    """A line on stderr for each request: when, who, which path, which status; never what was said."""

    @property
    def page(self) -> int:
        """``page_tokens``, where it is decided (:mod:`colonnade.serve.resolve_config`)."""
        assert self.page_tokens is not None, "settled"
        return self.page_tokens

    @property
    def budget(self) -> int:
        """``token_budget``, likewise."""
        assert self.token_budget is not None, "settled"
        return self.token_budget

    def check(self, model: ModelConfig) -> None:
        """Raise :class:`ConfigError` where ``model`` cannot be served so."""
        if self.cache == "int8" and model.latent is None:
            raise ConfigError(
                "a cache in int8 is for latent attention, whose one vector a token has scales of its own, and this "
                f"model has {model.kv_heads} key/value heads without; use --serve.cache float8"
            )
