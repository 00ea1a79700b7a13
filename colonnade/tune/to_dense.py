"""A dense model from a mixture of experts: a layer's best experts are concatenated into one feed-forward network.

    F(x) = Σ_(e in the A best) ḡ_e f_e(x)              ḡ_e: the mean router weight of the expert's tokens
    up = [up_e …], gate = [gate_e …], down = [ḡ_e down_e …]                hidden width A · F_e

Attention, embeddings and norms are the teacher's, and shared experts are appended as they are. A model of one expert
computes the same; others need training, preferably by distillation from the mixture (:mod:`colonnade.train.distill`).
Layers that are narrower than the widest are padded with hidden units of zero.
"""

import torch
from torch import Tensor

from colonnade.config import ModelConfig
from colonnade.errors import ConfigError, PlanError
from colonnade.model import Transformer
from colonnade.model.weight_memory import WeightMemory
from colonnade.tune.expert_scores import ExpertScores
from colonnade.tune.prune_experts import check_dense, check_transformer

DENSE_FAMILY = {"mixtral": "llama", "qwen2_moe": "qwen2", "qwen3_moe": "qwen3"}
"""The families of dense models with the same layers."""


def dense_config(config: ModelConfig, keep: int) -> ModelConfig:
    """The config of the dense model of ``keep`` experts; raises :class:`ConfigError` if there is none."""
    moe = config.moe
    if moe is None:
        raise ConfigError("this model has no experts to concatenate")
    if moe.merged:
        raise ConfigError(f"the {moe.experts} experts are already merged into {moe.merged}; convert the original model")
    if not 1 <= keep <= moe.experts:
        raise ConfigError(f"{keep} of {moe.experts} experts cannot be concatenated; use 1 to {moe.experts}")
    if moe.shared_gate:
        raise ConfigError(
            "the gate of shared experts depends on the token, which a dense layer cannot represent; prune instead"
        )
    width = keep * moe.ffn_width + moe.shared_width
    if moe.count_expert_layers(config.layers) < config.layers:
        width = max(width, config.ffn_width)
    return config.replace(family=DENSE_FAMILY.get(config.family, config.family), moe=None, ffn_width=width)


@torch.no_grad()
def to_dense(model: Transformer, scores: ExpertScores, keep: int | None = None) -> Transformer:
    """A dense model of the ``keep`` experts (None: as many as a token uses) with the best REAP score of each layer.

    ``model`` is whole, on one process. Raises :class:`ConfigError` as :func:`dense_config`, :class:`PlanError` for a
    sharded model.
    """
    check_transformer(model)
    if (ranks := model.axes.experts.tokens.size) > 1:
        raise PlanError(
            f"this needs the whole model in one process, but it is sharded over {ranks}; load it without a plan"
        )
    check_dense(model)
    moe = model.config.moe
    keep = keep or (1 if moe is None else moe.active)
    config = dense_config(model.config, keep)
    sample = next(model.parameters())
    WeightMemory(config, sample.dtype, sample.device).check("the dense model")
    new = Transformer(config, device=sample.device, dtype=sample.dtype)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, tensor in (*new.named_parameters(), *new.named_buffers()):
        layer, part = _feed_forward(name)
        if layer is None or model.config.experts_of(layer) is None:
            _fill(tensor, tensors[name])
            continue
        best_e = scores.reap_LE[layer].topk(keep).indices.sort().values
        gate_e = scores.gate_LE[layer][best_e].to(tensor.dtype)
        _fill(tensor, _side_by_side(tensors, layer, part, best_e, gate_e))
    return new


def _feed_forward(name: str) -> tuple[int | None, str]:
    """(layer, part) of a feed-forward parameter; (None, "") of others."""
    parts = name.split(".")
    return (int(parts[1]), ".".join(parts[3:])) if parts[0] == "blocks" and parts[2] == "ffn" else (None, "")


def _side_by_side(tensors: dict[str, Tensor], layer: int, part: str, best_e: Tensor, gate_e: Tensor) -> Tensor:
    of, (matrix, kind) = f"blocks.{layer}.ffn.", part.split(".")
    stack = tensors[f"{of}experts.{matrix if kind == 'weight' else f'{matrix}_bias'}"][best_e]
    shared = tensors.get(f"{of}shared.{part}")
    if part == "down.bias":
        total = (gate_e[:, None] * stack).sum(0)
        return total if shared is None else total + shared
    if part == "down.weight":
        rows = (gate_e[:, None, None] * stack).flatten(0, 1)  # hidden units first
        return rows.T if shared is None else torch.cat((rows.T, shared), 1)
    whole = stack.flatten(0, 1)
    return whole if shared is None else torch.cat((whole, shared))


def _fill(tensor: Tensor, value: Tensor) -> None:
    """Copy ``value`` to the beginning of ``tensor`` and zero the rest."""
    tensor.zero_()[tuple(slice(n) for n in value.shape)].copy_(value)
