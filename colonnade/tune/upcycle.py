"""Sparse upcycling: replaces each dense FFN with experts that are copies of it (Komatsuzaki 2022, arXiv 2212.05055).

    down(act(gate(x)) ⊙ up(x))  =  Σ_j w_j · expert_{i_j}(x)        E equal experts, Σ_j w_j = 1

Whatever the new router chooses, the sum equals the dense FFN's output, because a token's weights are normalised. So the
new model starts exactly where the dense one ended, and training specialises its experts. The router's initial weights
are drawn from the seed and its name, like those of every new parameter.
"""

import torch

from colonnade.config import ModelConfig, MoeConfig
from colonnade.errors import ConfigError, PlanError
from colonnade.model import Transformer, initialise
from colonnade.model.weight_memory import WeightMemory
from colonnade.tune.prune_experts import check_transformer

FEED_FORWARD = (
    ("gate.weight", "gate"), ("up.weight", "up"), ("down.weight", "down"),
    ("gate.bias", "gate_bias"), ("up.bias", "up_bias"), ("down.bias", "down_bias"),
)  # fmt: skip
"""(parameter of a dense FFN, the matching stack of the experts)."""


def check_expert_counts(experts: int, active: int) -> None:
    """Raise :class:`ConfigError` for numbers of experts that upcycling does not support."""
    if active > experts:
        raise ConfigError(
            f"a token cannot go to {active} of {experts} experts; create {active} or more, or use fewer per token "
            "(--upcycle and --active of colonnade convert)"
        )
    if active < 2:
        raise ConfigError(
            "with one expert per token the expert's weight is a probability, not 1, so the outputs would change; use "
            "2 or more"
        )


def upcycled_config(config: ModelConfig, experts: int, active: int = 2, **moe: object) -> ModelConfig:
    """The config of the upcycled model; ``moe`` are further fields of MoeConfig (every, first, balance, …).

    Raises :class:`ConfigError` for a model that already has experts, and for weights that would not sum to 1.
    """
    if config.moe is not None:
        raise ConfigError(f"this model already has {config.moe.experts} experts; upcycling needs a dense model")
    check_expert_counts(experts, active)
    made = MoeConfig(experts=experts, active=active, ffn_width=config.ffn_width, **moe)  # type: ignore[arg-type]
    if not made.router.normalise or made.router.scale != 1 or made.shared_width or made.capacity not in (None, 0):
        raise ConfigError(
            "a token's weights must sum to 1, with no token dropped and no shared expert, or the outputs change; "
            "keep the defaults of router.normalise, router.scale, shared_width and capacity"
        )
    return config.replace(moe=made)


@torch.no_grad()
def upcycle(model: Transformer, experts: int, active: int = 2, *, seed: int = 0, **moe: object) -> Transformer:
    """A new model in which every expert is a copy of ``model``'s FFN; until it is trained it computes the same
    function.

    ``model`` is whole, on one process; the result, once saved, loads under any layout. Raises :class:`PlanError` for a
    sharded model, :class:`ConfigError` as :func:`upcycled_config`, :class:`CapacityError` if memory is too small for
    both models.
    """
    check_transformer(model)
    if (ranks := model.axes.experts.tokens.size) > 1:
        raise PlanError(
            f"upcycling needs the whole model in one process, but it is sharded over {ranks}; load it without a plan"
        )
    config = upcycled_config(model.config, experts, active, **moe)
    sample = next(model.parameters())
    WeightMemory(config, sample.dtype, sample.device).check(f"the model with {experts} experts")
    # Like every parameter, the router is drawn in float32 on the CPU.
    new = initialise(Transformer(config, device=sample.device, dtype=sample.dtype), seed)
    tensors = dict(model.named_parameters())
    for name, parameter in new.named_parameters():
        if name in tensors:
            parameter.copy_(tensors[name])
    for layer in range(config.layers):
        if config.experts_of(layer) is None:
            continue
        for ffn_name, expert_name in FEED_FORWARD:
            dense = tensors.get(f"blocks.{layer}.ffn.{ffn_name}")
            if dense is not None:
                stack = new.get_parameter(f"blocks.{layer}.ffn.experts.{expert_name}")
                stack.copy_(dense.t() if expert_name == "down" else dense)
    return new
