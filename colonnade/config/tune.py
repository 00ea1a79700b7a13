"""Settings of fine-tuning on conversations, preferences and rewards."""

from collections.abc import Collection
from typing import Annotated, Literal

from pydantic import Field, model_validator

from colonnade.config.base import MAX_DIM, Config
from colonnade.config.serve import Pooling
from colonnade.errors import ConfigError


class TuneConfig(Config):
    """What a method of finetune computes; optimisation is set by TrainConfig."""

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
    """dpo: the assumed share of pairs whose preference is the wrong way round (conservative DPO, Mitchell 2023)."""

    reward: str = ""
    """grpo: the function that scores an answer, as FILE.py:FUNCTION or MODULE:FUNCTION; it is called with the prompt,
    the answer and the row, and returns a number. reasoning_gym:TASK is the verifier of a task of that package."""
    reward_s: float = Field(default=10.0, gt=0, le=1e6)
    """grpo: longest time of one call [s]; after it the sample is left out."""
    reward_workers: int = Field(default=2, ge=1, le=1024)
    """grpo: processes that call it."""
    group: int = Field(default=8, ge=2, le=1 << 16)
    """grpo: answers to each prompt; train.batch counts answers."""
    temperature: float | None = Field(default=None, gt=0, le=100)
    """grpo: of the answers, and of the probabilities in the loss; None: 1. embed: divides the cosines; None: 0.05."""
    kl: float = Field(default=0.0, ge=0)
    """grpo: weight of the divergence from the model that the run starts from; without adapters each rank keeps a copy
    of that."""
    max_tokens: int = Field(default=256, ge=1, le=MAX_DIM)
    """grpo: longest answer [tokens]."""
    exact: bool = False
    """grpo: sample with the batch-invariant engine, and compute the trainer's values with the same kernels: the ratio
    of probabilities before an update is 1, bit for bit. Dense models, one process."""
    requests: int = Field(default=64, ge=1, le=1 << 16)
    """grpo: answers that are sampled at a time on one data rank; the cache has room for that many of length
    --sequence."""
    clip_low: float = Field(default=0.2, ge=0, lt=1)
    """grpo: how far the ratio of new to old probability may fall below 1."""
    clip_high: float = Field(default=0.28, ge=0, le=1e6)
    """grpo: how far it may rise above 1."""
    divisor: Literal["tokens", "answers", "constant"] = "tokens"
    """grpo: what the loss is divided by: all tokens (DAPO), answers after the mean over each (GRPO), or answers times
    max_tokens (Dr. GRPO)."""
    normalise: bool = False
    """grpo: divide a group's advantages by the standard deviation of its rewards."""

    pooling: Pooling | None = None
    """embed: what an embedding is made of; None: the mean of all tokens, for causal models the last token."""
    widths: tuple[Annotated[int, Field(ge=1, le=MAX_DIM)], ...] = ()
    """embed: the loss is the mean over embeddings cut to these widths (Matryoshka); empty: the whole width."""

    @model_validator(mode="after")
    def _validate(self) -> "TuneConfig":
        if self.beta == 0:
            raise ConfigError("tune.beta is 0, with which nothing would be learnt from pairs; 0.1 is usual")
        if self.loss == "ipo" and self.flipped:
            raise ConfigError(f"tune.flipped {self.flipped:g} belongs to tune.loss dpo; leave it out with ipo")
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
            f"method {method} does not use {', '.join(foreign)}; leave {'it' if len(foreign) == 1 else 'them'} out, or "
            "choose another --method"
        )
