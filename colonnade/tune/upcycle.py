"""A dense model made into one with experts, each of them a copy (Komatsuzaki 2022, arXiv 2212.05055).

    down(act(gate(x)) ⊙ up(x))  =  Σ_j w_j · expert_{i_j}(x)        E equal experts, Σ_j w_j = 1

Whatever the new router says, the sum is what the dense part gave, because a token's weights are divided by their sum;
so the new model begins exactly where the dense one ended, and its experts drift apart in training, each by the tokens
that come to it. A router draws its first weights by name and seed, as every new parameter does.
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
"""Parameters of a dense part to those of a stack of experts."""


def check_numbers(experts: int, active: int) -> None:
    """Raise :class:`ConfigError` for numbers that no model can be upcycled to."""
    if active > experts:
        raise ConfigError(
            f"a token cannot go to {active} of {experts} experts; make {active} or more, or have it go to fewer "
            "(--upcycle and --active of colonnade convert)"
        )
    if active < 2:
        raise ConfigError(
            "with one expert a token its weight is a probability, not 1, and the outputs change; use 2 or more"
        )


def upcycled(config: ModelConfig, experts: int, active: int = 2, **moe: object) -> ModelConfig:
    """The config of the upcycled model; ``moe`` are further fields of MoeConfig (every, first, balance, …).

    Raises :class:`ConfigError` for a model that has experts already, and for weights that would not sum to 1.
    """
    if config.moe is not None:
        raise ConfigError(f"this model has {config.moe.experts} experts already; upcycling begins with a dense one")
    check_numbers(experts, active)
    made = MoeConfig(experts=experts, active=active, ffn_width=config.ffn_width, **moe)  # type: ignore[arg-type]
    if not made.router.normalise or made.router.scale != 1 or made.shared_width or made.capacity not in (None, 0):
        raise ConfigError(
            "a token's weights must sum to 1 and all its experts take it, with none shared, or the outputs change; "
            "leave router.normalise, router.scale, shared_width and capacity as they are by default"
        )
    return config.but(moe=made)


@torch.no_grad()
def upcycle(model: Transformer, experts: int, active: int = 2, *, seed: int = 0, **moe: object) -> Transformer:
    """A new model whose every expert is ``model``'s feed-forward part, and which computes the same until it is trained.

    ``model`` is whole, on one process; the result, saved, loads under any layout. Raises :class:`PlanError` for a share
    of a model, :class:`ConfigError` as :func:`upcycled`, :class:`CapacityError` when the new model does not fit too.
    """
    check_transformer(model)
    if (ranks := model.axes.experts.tokens.size) > 1:
        raise PlanError(f"upcycling takes a whole model on one process, and this is laid over {ranks}; load it alone")
    config = upcycled(model.config, experts, active, **moe)
    some = next(model.parameters())
    WeightMemory(config, some.dtype, some.device).check(f"the model with {experts} experts")
    # The router is drawn in float32, as everything is, on the processor.
    new = initialise(Transformer(config, device=some.device, dtype=some.dtype), seed)
    held = dict(model.named_parameters())
    for name, parameter in new.named_parameters():
        if name in held:
            parameter.copy_(held[name])
    for layer in range(config.layers):
        if config.experts_of(layer) is None:
            continue
        for theirs, ours in FEED_FORWARD:
            dense = held.get(f"blocks.{layer}.ffn.{theirs}")
            if dense is not None:
                stack = new.get_parameter(f"blocks.{layer}.ffn.experts.{ours}")
                stack.copy_(dense.t() if ours == "down" else dense)
    return new
