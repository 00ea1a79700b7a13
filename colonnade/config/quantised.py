"""Which weights of a model can be kept in fewer bits, and on how many tensor-parallel ranks."""

from typing import Literal

from colonnade.config.model import ModelConfig
from colonnade.errors import ConfigError, PlanError

Weights = Literal["stored", "int8", "int4", "float8"]
"""How a model that is not trained keeps its matrices."""
WeightGroup = Literal[32, 64, 128]
"""Neighbouring inputs that share an int4 scale."""


def check(model: ModelConfig, weights: Weights, group: int, tp: int) -> None:
    """Raise :class:`ConfigError` for a model whose ``weights`` cannot be so, :class:`PlanError` when it is the fault of
    ``tp``: a group of inputs that two ranks would share.
    """
    if weights == "stored":
        return
    if not model.causal:
        raise ConfigError(f"weights in {weights} are for models that generate, and this is an encoder; load it stored")
    if model.moe is not None:
        raise ConfigError(
            f"weights in {weights} are for dense models, and experts stay as they are stored; leave --serve.weights "
            "out, and see --experts.resident for experts that do not fit"
        )
    if weights != "int4" or tp == 1:
        return
    heads = model.heads * (model.latent.v_width if model.latent else model.head_width)
    for what, inputs in (("columns of heads", heads), ("ffn_width", model.ffn_width)):
        share = -(-inputs // tp)
        if share % group:
            fits = [g for g in (128, 64, 32) if share % g == 0]
            remedy = f"use --serve.weight_group {fits[0]}" if fits else "use another tp, or --serve.weights int8"
            raise PlanError(
                f"int4 has one scale for {group} inputs, and tp={tp} leaves a rank {share} of {what} {inputs}, which "
                f"cuts a group in two; {remedy}"
            )
