"""Qwen2 and 2.5, dense (arXiv 2407.10671): Llama with query, key and value biases; upper layers may have a window.

Qwen3, dense (arXiv 2505.09388): Llama with an RMSNorm on each query and key head, and a head width of its own.

Qwen's mixtures of experts: the attention of the dense models, many small experts.

    qwen2_moe   Qwen1.5-MoE and Qwen2-57B: beside the experts one that every token goes to, behind a gate σ(w·x)
    qwen3_moe   Qwen3-30B-A3B and 235B-A22B (arXiv 2505.09388): query and key norms, no shared expert

``decoder_sparse_step`` s gives every s-th layer experts, counted from 1, but for those of ``mlp_only_layers``.
"""

from typing import Any

from colonnade.checkpoint.hf.experts import (
    GATE,
    balance_to_hf,
    held_layers,
    moe_from_hf,
    per_expert,
    shared,
    stacked,
)
from colonnade.checkpoint.hf.family import Family, Keys
from colonnade.checkpoint.hf.llama import BUFFERS, LLAMA_TABLE, common_from_hf, common_to_hf
from colonnade.checkpoint.hf.llama import LLAMA_TABLE as LLAMA
from colonnade.checkpoint.weight_mapping import Stored, Table
from colonnade.config import ModelConfig, MoeConfig

FULL, SLIDING = "full_attention", "sliding_attention"


def window_from_hf(keys: Keys, layers: int) -> dict[str, Any]:
    """The fields ``window`` and ``window_from_layer`` from Qwen's four keys about it.

    Only "full attention first, then a window" can be expressed. Without ``use_sliding_window`` the window's size and
    its first layer have no effect.
    """
    size = keys.size("sliding_window", 4096, null=None)
    used = keys.flag("use_sliding_window", False) and size is not None
    first = min(keys.size("max_window_layers", 28, least=0), layers) if used else layers
    kinds = keys.take("layer_types")
    if kinds is not None:
        found = kinds.index(SLIDING) if isinstance(kinds, list) and SLIDING in kinds else layers
        if kinds != [FULL] * found + [SLIDING] * (layers - found):
            raise keys.refuse("layer_types", f"'{FULL}' layers first, then '{SLIDING}' ones, {layers} in all, expected")
        if found < layers and not used:
            raise keys.refuse("layer_types", "a window is named but 'use_sliding_window' is false; make them agree")
        if "max_window_layers" in keys.raw and found != first:
            raise keys.refuse(
                "layer_types", f"'max_window_layers' gives layers from {first} on a window; make them agree"
            )
        first = found
    keys.take("max_window_layers")
    return {"window": size, "window_from_layer": first} if first < layers else {}


def window_to_hf(config: ModelConfig) -> dict[str, Any]:
    """Qwen's four keys about the window."""
    first = config.window_from_layer if config.window else config.layers
    return {
        "use_sliding_window": config.window is not None,
        "sliding_window": config.window,
        "max_window_layers": first,
        "layer_types": [FULL if config.window_of(i) is None else SLIDING for i in range(config.layers)],
    }


def _qwen2_from_hf(keys: Keys) -> ModelConfig:
    fields = common_from_hf(keys, context=32768, kv_heads=32)
    return ModelConfig(family="qwen2", **fields, qkv_bias=True, **window_from_hf(keys, fields["layers"]))


def _qwen2_to_hf(config: ModelConfig) -> dict[str, Any]:
    return common_to_hf(config) | window_to_hf(config)


QWEN2 = Family("qwen2", "Qwen2ForCausalLM", "model.", LLAMA_TABLE, _qwen2_from_hf, _qwen2_to_hf, BUFFERS)


QWEN3_TABLE: Table = {
    **LLAMA,
    "blocks.{i}.attention.q_norm.weight": Stored("model.layers.{i}.self_attn.q_norm.weight"),
    "blocks.{i}.attention.k_norm.weight": Stored("model.layers.{i}.self_attn.k_norm.weight"),
}


def _qwen3_from_hf(keys: Keys) -> ModelConfig:
    head_width = keys.size("head_dim", 128)
    fields = common_from_hf(keys, context=32768, kv_heads=32) | {"head_width": head_width}
    bias = keys.flag("attention_bias", False)
    window = window_from_hf(keys, fields["layers"])
    return ModelConfig(family="qwen3", **fields, qk_norm=True, qkv_bias=bias, out_bias=bias, **window)


def _qwen3_to_hf(config: ModelConfig) -> dict[str, Any]:
    return common_to_hf(config) | window_to_hf(config) | {"attention_bias": config.qkv_bias}


QWEN3 = Family("qwen3", "Qwen3ForCausalLM", "model.", QWEN3_TABLE, _qwen3_from_hf, _qwen3_to_hf, BUFFERS)


_QWEN_MOE_MLP = "model.layers.{i}.mlp."
QWEN_MOE_TABLE: Table = {
    **QWEN3_TABLE,
    GATE: Stored(f"{_QWEN_MOE_MLP}gate.weight"),
    **per_expert(f"{_QWEN_MOE_MLP}experts"),
    **shared(f"{_QWEN_MOE_MLP}shared_expert"),
    "blocks.{i}.ffn.shared_gate.weight": Stored(f"{_QWEN_MOE_MLP}shared_expert_gate.weight"),
}
QWEN_MOE_MODULES: Table = stacked(f"{_QWEN_MOE_MLP}experts")


def _moe_from_hf(keys: Keys, layers: int, experts: int, **fields: Any) -> MoeConfig:
    dense = keys.take("mlp_only_layers", [], null=[])
    if not isinstance(dense, list) or not all(isinstance(i, int) for i in dense):
        raise keys.refuse("mlp_only_layers", "a list of layer numbers was expected")
    # transformers 5 writes Qwen3's number of experts under the name that Mixtral has for it.
    name, other = "num_experts", "num_local_experts"
    if name not in keys.raw:
        name, other = other, name
    number = keys.size(name, experts)
    keys.must_agree(other, name, number)
    return moe_from_hf(
        keys,
        number,
        keys.size("moe_intermediate_size", fields.pop("width")),
        normalise=keys.flag("norm_topk_prob", False),
        **held_layers(keys.size("decoder_sparse_step", 1), dense, layers),
        **fields,
    )


def _moe_to_hf(config: ModelConfig) -> dict[str, Any]:
    moe = config.moe
    if moe is None:
        return {}
    with_experts = [i for i in range(config.layers) if moe.has_experts(i)]
    step = moe.every if moe.first % moe.every == moe.every - 1 else 1
    return {
        "num_experts": moe.experts,
        "num_experts_per_tok": moe.active,
        "moe_intermediate_size": moe.ffn_width,
        "norm_topk_prob": moe.normalises_weights,
        **balance_to_hf(moe),
        "decoder_sparse_step": step,
        "mlp_only_layers": [i for i in range(step - 1, config.layers, step) if i not in with_experts],
    }


def _qwen2_moe_from_hf(keys: Keys) -> ModelConfig:
    fields = common_from_hf(keys, context=32768, kv_heads=16)
    keys.must_be("use_sliding_window", False, "only full attention is implemented for this family")
    for name in ("sliding_window", "max_window_layers"):
        keys.take(name)  # without effect then
    if keys.take("layer_types") not in (None, ["full_attention"] * fields["layers"]):
        raise keys.refuse("layer_types", "only full attention is implemented for this family")
    moe = _moe_from_hf(
        keys, fields["layers"], 60, width=1408, shared_width=keys.size("shared_expert_intermediate_size", 5632),
        shared_gate=True,
    )  # fmt: skip
    return ModelConfig(family="qwen2_moe", **fields, qkv_bias=keys.flag("qkv_bias", True), moe=moe)


def _qwen2_moe_to_hf(config: ModelConfig) -> dict[str, Any]:
    shared = {"shared_expert_intermediate_size": config.moe.shared_width} if config.moe else {}
    window = {"use_sliding_window": False, "sliding_window": None}
    return common_to_hf(config) | _moe_to_hf(config) | shared | window | {"qkv_bias": config.qkv_bias}


def _qwen3_moe_from_hf(keys: Keys) -> ModelConfig:
    fields = common_from_hf(keys, context=32768, kv_heads=4)
    size = keys.size("sliding_window", 4096, null=None)
    window = {"window": size} if keys.flag("use_sliding_window", False) else {}
    keys.take("max_window_layers")  # has no effect: a window is in all layers
    bias = keys.flag("attention_bias", False)
    moe = _moe_from_hf(keys, fields["layers"], 128, width=768)
    return ModelConfig(family="qwen3_moe", **fields, **window, qk_norm=True, qkv_bias=bias, out_bias=bias, moe=moe)


def _qwen3_moe_to_hf(config: ModelConfig) -> dict[str, Any]:
    window = {"use_sliding_window": config.window is not None, "sliding_window": config.window}
    return common_to_hf(config) | _moe_to_hf(config) | window | {"attention_bias": config.qkv_bias}


def _family(kind: str, architecture: str, from_hf: Any, to_hf: Any) -> Family:
    return Family(
        kind, architecture, "model.", QWEN_MOE_TABLE, from_hf, to_hf, BUFFERS, experts=True, modules=QWEN_MOE_MODULES
    )


QWEN2_MOE = _family("qwen2_moe", "Qwen2MoeForCausalLM", _qwen2_moe_from_hf, _qwen2_moe_to_hf)
QWEN3_MOE = _family("qwen3_moe", "Qwen3MoeForCausalLM", _qwen3_moe_from_hf, _qwen3_moe_to_hf)
