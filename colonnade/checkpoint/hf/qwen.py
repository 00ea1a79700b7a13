"""Qwen2 and 2.5 (arXiv 2407.10671) and Qwen3 (arXiv 2505.09388), dense and with experts.

    qwen2        Llama with query, key and value biases; the upper layers may have a sliding window
    qwen3        Llama with an RMSNorm on each query and key head, and a separate head width
    qwen2_moe    Qwen1.5-MoE and Qwen2-57B: small experts, and a shared expert for every token behind a gate σ(w·x)
    qwen3_moe    Qwen3-30B-A3B and 235B-A22B: small experts, query and key norms, no shared expert

``decoder_sparse_step`` s gives every s-th layer experts, counted from 1, except those of ``mlp_only_layers``.
"""

from typing import Any

from colonnade.checkpoint.hf.experts import (
    ROUTER_WEIGHT,
    balance_to_hf,
    expert_layers,
    moe_from_hf,
    per_expert_table,
    shared_experts_table,
    stacked_table,
)
from colonnade.checkpoint.hf.family import ConfigKeys
from colonnade.checkpoint.hf.llama import LLAMA_TABLE, common_from_hf, common_to_hf, llama_like
from colonnade.checkpoint.weight_mapping import MappingTable, ParamMapping
from colonnade.config import ModelConfig, MoeConfig

_MLP = "model.layers.{i}.mlp."
QWEN3_TABLE: MappingTable = {
    **LLAMA_TABLE,
    "blocks.{i}.attention.q_norm.weight": ParamMapping("model.layers.{i}.self_attn.q_norm.weight"),
    "blocks.{i}.attention.k_norm.weight": ParamMapping("model.layers.{i}.self_attn.k_norm.weight"),
}
QWEN_MOE_TABLE: MappingTable = {
    **QWEN3_TABLE,
    ROUTER_WEIGHT: ParamMapping(f"{_MLP}gate.weight"),
    **per_expert_table(f"{_MLP}experts"),
    **shared_experts_table(f"{_MLP}shared_expert"),
    "blocks.{i}.ffn.shared_gate.weight": ParamMapping(f"{_MLP}shared_expert_gate.weight"),
}
QWEN_MOE_STACKED = stacked_table(f"{_MLP}experts")

FULL, SLIDING = "full_attention", "sliding_attention"


def window_from_hf(keys: ConfigKeys, layers: int) -> dict[str, Any]:
    """Reads ``window`` and ``window_from_layer`` from Qwen's four keys.

    Only "full attention first, then a window" can be represented. Without ``use_sliding_window`` the window's size and
    first layer have no effect.
    """
    size = keys.size("sliding_window", 4096, null=None)
    used = keys.flag("use_sliding_window", False) and size is not None
    first = min(keys.size("max_window_layers", 28, minimum=0), layers) if used else layers
    kinds = keys.take("layer_types")
    if kinds is not None:
        listed = kinds.index(SLIDING) if isinstance(kinds, list) and SLIDING in kinds else layers
        if kinds != [FULL] * listed + [SLIDING] * (layers - listed):
            raise keys.refuse("layer_types", f"expected '{FULL}' layers first, then '{SLIDING}' ones, {layers} in all")
        if listed < layers and not used:
            raise keys.refuse("layer_types", "a window is listed but 'use_sliding_window' is false; make them agree")
        if "max_window_layers" in keys.raw and listed != first:
            raise keys.refuse("layer_types", f"'max_window_layers' starts the window at layer {first}; make them agree")
        first = listed
    keys.take("max_window_layers")
    return {"window": size, "window_from_layer": first} if first < layers else {}


def window_to_hf(config: ModelConfig) -> dict[str, Any]:
    """Writes Qwen's four keys for the window."""
    first = config.window_from_layer if config.window else config.layers
    return {
        "use_sliding_window": config.window is not None,
        "sliding_window": config.window,
        "max_window_layers": first,
        "layer_types": [FULL if config.window_of(i) is None else SLIDING for i in range(config.layers)],
    }


def _qwen2_from_hf(keys: ConfigKeys) -> ModelConfig:
    fields = common_from_hf(keys, context=32768, kv_heads=32)
    return ModelConfig(family="qwen2", **fields, qkv_bias=True, **window_from_hf(keys, fields["layers"]))


def _qwen2_to_hf(config: ModelConfig) -> dict[str, Any]:
    return common_to_hf(config) | window_to_hf(config)


def _qwen3_from_hf(keys: ConfigKeys) -> ModelConfig:
    head_width = keys.size("head_dim", 128)
    fields = common_from_hf(keys, context=32768, kv_heads=32) | {"head_width": head_width}
    bias = keys.flag("attention_bias", False)
    window = window_from_hf(keys, fields["layers"])
    return ModelConfig(family="qwen3", **fields, qk_norm=True, qkv_bias=bias, out_bias=bias, **window)


def _qwen3_to_hf(config: ModelConfig) -> dict[str, Any]:
    return common_to_hf(config) | window_to_hf(config) | {"attention_bias": config.qkv_bias}


def _moe_from_hf(keys: ConfigKeys, layers: int, experts: int, **fields: Any) -> MoeConfig:
    dense = keys.take("mlp_only_layers", [], null=[])
    if not isinstance(dense, list) or not all(isinstance(i, int) for i in dense):
        raise keys.refuse("mlp_only_layers", "a list of layer numbers was expected")
    # transformers 5 writes Qwen3's number of experts under Mixtral's name.
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
        **expert_layers(keys.size("decoder_sparse_step", 1), dense, layers),
        **fields,
    )


def _moe_to_hf(config: ModelConfig) -> dict[str, Any]:
    moe = config.moe
    if moe is None:
        return {}
    with_experts = [i for i in range(config.layers) if moe.has_experts(i)]
    step = moe.layer_freq if moe.first_k_dense_replace % moe.layer_freq == moe.layer_freq - 1 else 1
    return {
        "num_experts": moe.experts,
        "num_experts_per_tok": moe.active,
        "moe_intermediate_size": moe.ffn_width,
        "norm_topk_prob": moe.normalises_weights,
        **balance_to_hf(moe),
        "decoder_sparse_step": step,
        "mlp_only_layers": [i for i in range(step - 1, config.layers, step) if i not in with_experts],
    }


def _qwen2_moe_from_hf(keys: ConfigKeys) -> ModelConfig:
    fields = common_from_hf(keys, context=32768, kv_heads=16)
    keys.must_be("use_sliding_window", False, "only full attention is implemented for this family")
    for name in ("sliding_window", "max_window_layers"):
        keys.take(name)  # they have no effect then
    if keys.take("layer_types") not in (None, [FULL] * fields["layers"]):
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


def _qwen3_moe_from_hf(keys: ConfigKeys) -> ModelConfig:
    fields = common_from_hf(keys, context=32768, kv_heads=4)
    size = keys.size("sliding_window", 4096, null=None)
    window = {"window": size} if keys.flag("use_sliding_window", False) else {}
    keys.take("max_window_layers")  # no effect: the window applies to all layers
    bias = keys.flag("attention_bias", False)
    moe = _moe_from_hf(keys, fields["layers"], 128, width=768)
    return ModelConfig(family="qwen3_moe", **fields, **window, qk_norm=True, qkv_bias=bias, out_bias=bias, moe=moe)


def _qwen3_moe_to_hf(config: ModelConfig) -> dict[str, Any]:
    window = {"use_sliding_window": config.window is not None, "sliding_window": config.window}
    return common_to_hf(config) | _moe_to_hf(config) | window | {"attention_bias": config.qkv_bias}


QWEN2 = llama_like("qwen2", "Qwen2ForCausalLM", LLAMA_TABLE, _qwen2_from_hf, _qwen2_to_hf)
QWEN3 = llama_like("qwen3", "Qwen3ForCausalLM", QWEN3_TABLE, _qwen3_from_hf, _qwen3_to_hf)
QWEN2_MOE = llama_like(
    "qwen2_moe", "Qwen2MoeForCausalLM", QWEN_MOE_TABLE, _qwen2_moe_from_hf, _qwen2_moe_to_hf, QWEN_MOE_STACKED
)
QWEN3_MOE = llama_like(
    "qwen3_moe", "Qwen3MoeForCausalLM", QWEN_MOE_TABLE, _qwen3_moe_from_hf, _qwen3_moe_to_hf, QWEN_MOE_STACKED
)
