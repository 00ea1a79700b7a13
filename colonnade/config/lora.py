"""Settings of low-rank adapters (LoRA)."""

from typing import Literal, cast, get_args

from pydantic import Field, field_validator, model_validator

from colonnade.config.base import Config
from colonnade.errors import ConfigError

LoraTarget = Literal["q", "k", "v", "out", "gate", "up", "down"]
LORA_TARGETS = cast("tuple[LoraTarget, ...]", get_args(LoraTarget))
MAX_RANK = 1 << 16


class LoraConfig(Config):
    """Low-rank adapters: y = W x + s · B A x with W frozen (Hu 2021, arXiv 2106.09685)."""

    rank: int = Field(default=16, ge=1, le=MAX_RANK)
    """r: rows of A and columns of B."""
    alpha: float = Field(default=32.0, gt=0)
    """The adapters' output is multiplied by alpha / rank."""
    rslora: bool = False
    """Multiply by alpha / √rank instead (Kalajdzievski 2023, arXiv 2312.03732)."""
    targets: tuple[LoraTarget, ...] = LORA_TARGETS
    """The matrices with an adapter: q, k, v and out of attention; gate, up and down of the feed-forward network, or of
    each expert. Those that a model lacks are skipped."""

    base: Literal["stored", "int8", "int4"] = "stored"
    """Training: the format of the frozen matrices; int8 and int4 are read but not trained, so they need no more memory
    than in serving."""

    @field_validator("targets", mode="before")
    @classmethod
    def _one_target(cls, value: object) -> object:
        """Accept one target as a string, and a list."""
        if isinstance(value, list):
            return tuple(cast("list[object]", value))
        return (value,) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _validate(self) -> "LoraConfig":
        if not self.targets or len(set(self.targets)) < len(self.targets):
            raise ConfigError(
                f"lora.targets is {' '.join(self.targets) or 'empty'}; name at least one of these matrices, each once: "
                f"{', '.join(LORA_TARGETS)}"
            )
        return self

    @property
    def scale(self) -> float:
        """s: the factor of B A x."""
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)
