"""Which weights of a model can be kept in fewer bits, and on how many tensor-parallel ranks."""

from typing import Literal

from colonnade.config.base import check_choice
from colonnade.config.model import ModelConfig
from colonnade.errors import ConfigError, PlanError

Weights = Literal["stored", "int8", "int4", "float8"]
"""How a model that is not trained keeps its matrices."""
WeightGroup = Literal[32, 64, 128]
"""Neighbouring inputs that share an int4 scale."""


def check_kind(weights: object, group: object) -> None:
    """Raise :class:`ConfigError` for ``weights``, or a ``group`` of them, that there are not."""
    check_choice("weights", weights, Weights)
    check_choice("weight_group", group, WeightGroup)


def check(model: ModelConfig, weights: Weights, group: int, tp: int, sh: int = 1) -> None:
    """Raise :class:`ConfigError` for a model whose ``weights`` cannot be so, :class:`PlanError` when it is the fault of
    ``tp`` (or ``sh``, of experts): a group of inputs that two ranks would share.
    """
    if weights == "stored":
        return
    if not model.causal:
        raise ConfigError(
            f"weights in {weights} are for models that generate, and this one attends in both directions (causal = "
            "False); load it stored"
        )
    if weights != "int4":
        return
    heads = model.heads * (model.latent.v_width if model.latent else model.head_width)
    moe, cut = model.moe, [("columns of heads", heads, "tp", tp)]
    if moe is None or moe.layers_among(model.layers) < model.layers:
        cut += [("ffn_width", model.ffn_width, "tp", tp)]
    if moe is not None:
        cut += [("moe.shared_width", moe.shared_width, "tp", tp), ("moe.ffn_width", moe.ffn_width, "sh", sh)]
    for what, inputs, axis, ranks in cut:
        share = -(-inputs // ranks)
        if ranks > 1 and share % group:
            fits = [g for g in (128, 64, 32) if share % g == 0]
            remedy = f"use --serve.weight_group {fits[0]}" if fits else f"use another {axis}, or --serve.weights int8"
            raise PlanError(
                f"int4 has one scale for {group} inputs, and {axis}={ranks} leaves a rank {share} of {what} {inputs}, "
                f"which cuts a group in two; {remedy}"
            )
