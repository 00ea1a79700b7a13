"""Settings of fine-tuning on conversations, preferences and rewards."""

from collections.abc import Collection
from typing import Annotated, Literal

from pydantic import Field, model_validator

from colonnade.config.base import MAX_DIM, Config
from colonnade.config.serve import Pooling
from colonnade.errors import ConfigError


class TuneConfig(Config):
    """Settings of the methods of finetune; optimisation is set by TrainConfig."""

    epochs: float = Field(default=1.0, gt=0, le=1e6)
    """Passes over the data, if train.steps is not set."""
    truncate: bool = False
    """Cut conversations that are longer than --sequence, instead of refusing them."""
    beta: float = Field(default=0.1, ge=0)
    """dpo: the weight of the log-probability ratios; ipo's tau."""
    loss: Literal["dpo", "ipo"] = "dpo"
    """dpo: the sigmoid loss of Rafailov 2023 (arXiv 2305.18290). ipo: the squared loss of Azar 2023 (arXiv 2310.12036),
    with mean log-probabilities."""
    flipped: float = Field(default=0.0, ge=0, lt=0.5)
    """dpo: the assumed share of pairs with a reversed preference (conservative DPO, Mitchell 2023)."""

    reward: str = ""
    """grpo: the function that scores a completion, as FILE.py:FUNCTION or MODULE:FUNCTION; it is called with the
    prompt, the completion and the row, and returns a number. reasoning_gym:TASK is the verifier of a task of that
    package."""
    reward_s: float = Field(default=10.0, gt=0, le=1e6)
    """grpo: time limit of one call [s]; a sample that exceeds it is skipped."""
    reward_workers: int = Field(default=2, ge=1, le=1024)
    """grpo: processes that call the function."""
    group: int = Field(default=8, ge=2, le=1 << 16)
    """grpo: completions per prompt; train.batch counts completions."""
    temperature: float | None = Field(default=None, gt=0, le=100)
    """grpo: sampling temperature, also of the probabilities in the loss; None: 1. embed: divides the cosines; None:
    0.05."""
    kl: float = Field(default=0.0, ge=0)
    """grpo: weight of the divergence from the model that the run starts from; without adapters each rank keeps a copy
    of it."""
    max_tokens: int = Field(default=256, ge=1, le=MAX_DIM)
    """grpo: maximum length of a completion [tokens]."""
    exact: bool = False
    """grpo: sample with the batch-invariant engine, and compute the trainer's values with the same kernels: the ratio
    of probabilities before an update is 1, bit for bit. Dense models, one process."""
    requests: int = Field(default=64, ge=1, le=1 << 16)
    """grpo: completions sampled concurrently on one data rank; the cache has room for that many of length
    --sequence."""
    clip_low: float = Field(default=0.2, ge=0, lt=1)
    """grpo: how far the ratio of new to old probability may fall below 1."""
    clip_high: float = Field(default=0.28, ge=0, le=1e6)
    """grpo: how far it may rise above 1."""
    divisor: Literal["tokens", "answers", "constant"] = "tokens"
    """grpo: divisor of the loss: tokens, the number of all tokens (DAPO); answers, the number of completions after a
    mean over each (GRPO); constant, completions times max_tokens (Dr. GRPO)."""
    normalise: bool = False
    """grpo: divide a group's advantages by the standard deviation of its rewards."""

    pooling: Pooling | None = None
    """embed: how hidden states are pooled; None: the mean of all tokens, for causal models the last token."""
    widths: tuple[Annotated[int, Field(ge=1, le=MAX_DIM)], ...] = ()
    """embed: the loss is the mean over embeddings truncated to these widths (Matryoshka); empty: the whole width."""

    @model_validator(mode="after")
    def _validate(self) -> "TuneConfig":
        if self.beta == 0:
            raise ConfigError("tune.beta is 0, with which the model would learn nothing from pairs; 0.1 is usual")
        if self.loss == "ipo" and self.flipped:
            raise ConfigError(f"tune.flipped {self.flipped:g} belongs to tune.loss dpo; remove it for ipo")
        return self


TUNE_METHODS = ("sft", "dpo", "grpo", "embed")
METHODS_OF_SETTING: dict[str, tuple[str, ...]] = {
    "truncate": ("sft", "dpo", "embed"),
    "temperature": ("grpo", "embed"),
    **dict.fromkeys(("beta", "loss", "flipped"), ("dpo",)),
    **dict.fromkeys(
        ("reward", "reward_s", "reward_workers", "group", "kl", "max_tokens", "exact", "requests", "clip_low",
         "clip_high", "divisor", "normalise"), ("grpo",)
    ),
    **dict.fromkeys(("pooling", "widths"), ("embed",)),
}  # fmt: skip
"""The methods that use a setting; all use those that are not listed."""


def check_method_settings(method: str, names: Collection[str]) -> None:
    """Raise :class:`ConfigError` if one of the settings ``names`` has no effect with ``method``."""
    foreign = [
        f"tune.{name} (a setting of {', '.join(methods[:-1])}{' and ' if methods[1:] else ''}{methods[-1]})"
        for name, methods in METHODS_OF_SETTING.items()
        if method in TUNE_METHODS and name in names and method not in methods
    ]
    if foreign:
        raise ConfigError(
            f"method {method} does not use {', '.join(foreign)}; remove {'it' if len(foreign) == 1 else 'them'}, or "
            "choose another --method"
        )
