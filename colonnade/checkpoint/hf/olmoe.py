"""OLMoE (Muennighoff 2024, arXiv 2409.02060): experts in every layer, queries and keys normalised over all heads."""

from typing import Any

from colonnade.checkpoint.hf.experts import GATE, balance_to_hf, moe_from_hf, per_expert, stacked
from colonnade.checkpoint.hf.keys import Keys
from colonnade.checkpoint.hf.llama import BUFFERS, common_from_hf, common_to_hf
from colonnade.checkpoint.hf.names import Family
from colonnade.checkpoint.hf.qwen3 import TABLE as QWEN3
from colonnade.checkpoint.stored import Stored, Table
from colonnade.config import ModelConfig

_MLP = "model.layers.{i}.mlp."
TABLE: Table = {**QWEN3, GATE: Stored(f"{_MLP}gate.weight"), **per_expert(f"{_MLP}experts")}
MODULES: Table = stacked(f"{_MLP}experts")
Z_WEIGHT = 0.001
"""The authors' (section 4.1.7); a file does not say it."""


def _from_hf(keys: Keys) -> ModelConfig:
    fields = common_from_hf(keys, context=4096, eps=1e-5)
    if fields["head_width"] not in (0, fields["width"] // fields["heads"]):
        raise keys.refuse("head_dim", "this family's norms are as wide as the model; remove the key")
    clip = None if keys.take("clip_qkv") is None else keys.number("clip_qkv", 0.0)
    bias = keys.flag("attention_bias", False)
    experts, balance_weight = keys.size("num_experts", 64), keys.number("router_aux_loss_coef", 0.01)
    normalise = keys.flag("norm_topk_prob", False)
    moe = moe_from_hf(keys, experts, fields["ffn_width"], normalise=normalise, z_weight=Z_WEIGHT)
    moe = moe.but(balance_weight=balance_weight)
    return ModelConfig(
        family="olmoe", **fields, qk_norm=True, qk_norm_over="all", qkv_clip=clip, qkv_bias=bias, out_bias=bias, moe=moe
    )


def _to_hf(config: ModelConfig) -> dict[str, Any]:
    moe = config.moe
    common = common_to_hf(config) | {"clip_qkv": config.qkv_clip, "attention_bias": config.qkv_bias}
    return common | ({} if moe is None else {
        "intermediate_size": moe.ffn_width,
        "num_experts": moe.experts,
        "num_experts_per_tok": moe.active,
        "norm_topk_prob": moe.normalises,
        **balance_to_hf(moe),
    })  # fmt: skip


FAMILY = Family("olmoe", "OlmoeForCausalLM", "model.", TABLE, _from_hf, _to_hf, BUFFERS, experts=True, modules=MODULES)
