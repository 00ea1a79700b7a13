"""Mixtral (Jiang 2024, arXiv 2401.04088): Mistral with experts in every layer, their two weights divided by their sum.

Files of the Hub call the layer ``block_sparse_moe`` and an expert's matrices w1 (gate), w3 (up) and w2 (down).

OLMoE (Muennighoff 2024, arXiv 2409.02060): experts in every layer, queries and keys normalised over all heads.
"""

from typing import Any

from colonnade.checkpoint.hf.experts import GATE, balance_to_hf, moe_from_hf, per_expert, stacked
from colonnade.checkpoint.hf.family import Family, Keys
from colonnade.checkpoint.hf.llama import BUFFERS, common_from_hf, common_to_hf
from colonnade.checkpoint.hf.llama import LLAMA_TABLE as LLAMA
from colonnade.checkpoint.hf.qwen import QWEN3_TABLE as QWEN3
from colonnade.checkpoint.weight_mapping import Stored, Table
from colonnade.config import ModelConfig

_MIXTRAL_LAYER = "model.layers.{i}."
MIXTRAL_TABLE: Table = {
    **LLAMA,
    GATE: Stored(f"{_MIXTRAL_LAYER}block_sparse_moe.gate.weight"),
    **per_expert(f"{_MIXTRAL_LAYER}block_sparse_moe.experts", ("w1", "w3", "w2")),
}
MIXTRAL_MODULES: Table = {GATE: Stored(f"{_MIXTRAL_LAYER}mlp.gate.weight"), **stacked(f"{_MIXTRAL_LAYER}mlp.experts")}


def _mixtral_from_hf(keys: Keys) -> ModelConfig:
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


MIXTRAL = Family(
    "mixtral",
    "MixtralForCausalLM",
    "model.",
    MIXTRAL_TABLE,
    _mixtral_from_hf,
    _mixtral_to_hf,
    BUFFERS,
    experts=True,
    modules=MIXTRAL_MODULES,
)


_OLMOE_MLP = "model.layers.{i}.mlp."
OLMOE_TABLE: Table = {**QWEN3, GATE: Stored(f"{_OLMOE_MLP}gate.weight"), **per_expert(f"{_OLMOE_MLP}experts")}
OLMOE_MODULES: Table = stacked(f"{_OLMOE_MLP}experts")
Z_WEIGHT = 0.001
"""The authors' (section 4.1.7); a file does not say it."""


def _olmoe_from_hf(keys: Keys) -> ModelConfig:
    fields = common_from_hf(keys, context=4096, eps=1e-5)
    if fields["head_width"] not in (0, fields["width"] // fields["heads"]):
        raise keys.refuse("head_dim", "this family's norms are as wide as the model; remove the key")
    clip = None if keys.take("clip_qkv") is None else keys.number("clip_qkv", 0.0)
    bias = keys.flag("attention_bias", False)
    experts, balance_weight = keys.size("num_experts", 64), keys.number("router_aux_loss_coef", 0.01)
    normalise = keys.flag("norm_topk_prob", False)
    moe = moe_from_hf(keys, experts, fields["ffn_width"], normalise=normalise, z_weight=Z_WEIGHT)
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


OLMOE = Family(
    "olmoe",
    "OlmoeForCausalLM",
    "model.",
    OLMOE_TABLE,
    _olmoe_from_hf,
    _olmoe_to_hf,
    BUFFERS,
    experts=True,
    modules=OLMOE_MODULES,
)
