"""Settings of fine-tuning on conversations, preferences and rewards."""

from typing import Literal

from pydantic import Field, model_validator

from colonnade.config.base import Config
from colonnade.errors import ConfigError


class TuneConfig(Config):
    """What a method of finetune computes; optimisation is set by TrainConfig."""

    epochs: float = Field(default=1.0, gt=0, le=1e6)
    """Passes over the data, if train.steps is not set."""
    truncate: bool = False
    """Cut conversations that are longer than data.sequence tokens, instead of refusing them."""
    beta: float = Field(default=0.1, ge=0)
    """dpo: the weight of the log-probability ratios; ipo's tau."""
    loss: Literal["dpo", "ipo"] = "dpo"
    """dpo: the sigmoid loss of Rafailov 2023 (arXiv 2305.18290). ipo: the squared loss of Azar 2023 (arXiv 2310.12036),
    with mean log-probabilities."""
    flipped: float = Field(default=0.0, ge=0, lt=0.5)
    """dpo: the assumed share of pairs whose preference is the wrong way round (conservative DPO, Mitchell 2023)."""

    @model_validator(mode="after")
    def _validate(self) -> "TuneConfig":
        if self.beta == 0:
            raise ConfigError("tune.beta is 0, with which nothing would be learnt from pairs; 0.1 is usual")
        if self.loss == "ipo" and self.flipped:
            raise ConfigError(f"tune.flipped {self.flipped:g} belongs to tune.loss dpo; leave it out with ipo")
        return self
