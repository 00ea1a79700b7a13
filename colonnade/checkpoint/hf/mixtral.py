"""Mixtral (Jiang 2024, arXiv 2401.04088) and OLMoE (Muennighoff 2024, arXiv 2409.02060): experts in every layer.

    mixtral    Mistral with 8 experts, 2 of them active, whose weights are divided by their sum
    olmoe      64 small experts, 8 of them active; queries and keys are normalised over all heads together

Mixtral's files on the Hub call the layer ``block_sparse_moe`` and an expert's matrices w1 (gate), w3 (up), w2 (down).
"""

from typing import Any

from colonnade.checkpoint.hf.experts import ROUTER_WEIGHT, balance_to_hf, moe_from_hf, per_expert_table, stacked_table
from colonnade.checkpoint.hf.family import ConfigKeys
from colonnade.checkpoint.hf.llama import LLAMA_TABLE, common_from_hf, common_to_hf, llama_like
from colonnade.checkpoint.hf.qwen import QWEN3_TABLE
from colonnade.checkpoint.weight_mapping import MappingTable, ParamMapping
from colonnade.config import ModelConfig

_MLP, _SPARSE_MLP = "model.layers.{i}.mlp.", "model.layers.{i}.block_sparse_moe."
MIXTRAL_TABLE: MappingTable = {
    **LLAMA_TABLE,
    ROUTER_WEIGHT: ParamMapping(f"{_SPARSE_MLP}gate.weight"),
    **per_expert_table(f"{_SPARSE_MLP}experts", ("w1", "w3", "w2")),
}
MIXTRAL_STACKED: MappingTable = {
    ROUTER_WEIGHT: ParamMapping(f"{_MLP}gate.weight"),
    **stacked_table(f"{_MLP}experts"),
}
OLMOE_TABLE: MappingTable = {
    **QWEN3_TABLE,
    ROUTER_WEIGHT: ParamMapping(f"{_MLP}gate.weight"),
    **per_expert_table(f"{_MLP}experts"),
}
OLMOE_Z_WEIGHT = 0.001
"""The authors' (section 4.1.7); it is not in config.json."""


def _mixtral_from_hf(keys: ConfigKeys) -> ModelConfig:
    fields = common_from_hf(keys, context=131072, kv_heads=8, eps=1e-5, theta=1e6)
    window = keys.size("sliding_window", None)
    moe = moe_from_hf(keys, keys.size("num_local_experts", 8), fields["ffn_width"], normalise=True)
    return ModelConfig(family="mixtral", **fields, window=window, moe=moe)


def _mixtral_to_hf(config: ModelConfig) -> dict[str, Any]:
    moe = config.moe
    return common_to_hf(config) | {"sliding_window": config.window} | ({} if moe is None else {
        "intermediate_size": moe.ffn_width,
        "num_local_experts": moe.experts,
        "num_experts_per_tok": moe.active,
        **balance_to_hf(moe),
        "router_jitter_noise": moe.router.jitter,
    })  # fmt: skip


MIXTRAL = llama_like("mixtral", "MixtralForCausalLM", MIXTRAL_TABLE, _mixtral_from_hf, _mixtral_to_hf, MIXTRAL_STACKED)


def _olmoe_from_hf(keys: ConfigKeys) -> ModelConfig:
    fields = common_from_hf(keys, context=4096, eps=1e-5)
    if fields["head_width"] not in (0, fields["width"] // fields["heads"]):
        raise keys.refuse("head_dim", "this family's norms are as wide as the model; remove the key")
    clip = None if keys.take("clip_qkv") is None else keys.number("clip_qkv", 0.0)
    bias = keys.flag("attention_bias", False)
    experts, balance_weight = keys.size("num_experts", 64), keys.number("router_aux_loss_coef", 0.01)
    normalise = keys.flag("norm_topk_prob", False)
    moe = moe_from_hf(keys, experts, fields["ffn_width"], normalise=normalise, z_weight=OLMOE_Z_WEIGHT)
    moe = moe.replace(balance_weight=balance_weight)
    return ModelConfig(
        family="olmoe", **fields, qk_norm=True, qk_norm_over="all", qkv_clip=clip, qkv_bias=bias, out_bias=bias, moe=moe
    )


def _olmoe_to_hf(config: ModelConfig) -> dict[str, Any]:
    moe = config.moe
    common = common_to_hf(config) | {"clip_qkv": config.qkv_clip, "attention_bias": config.qkv_bias}
    return common | ({} if moe is None else {
        "intermediate_size": moe.ffn_width,
        "num_experts": moe.experts,
        "num_experts_per_tok": moe.active,
        "norm_topk_prob": moe.normalises_weights,
        **balance_to_hf(moe),
    })  # fmt: skip


OLMOE = llama_like(
    "olmoe", "OlmoeForCausalLM", OLMOE_TABLE, _olmoe_from_hf, _olmoe_to_hf, stacked_table(f"{_MLP}experts")
)
