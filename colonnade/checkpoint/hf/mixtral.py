"""Mixtral (Jiang 2024, arXiv 2401.04088): Mistral with experts in every layer, their two weights divided by their sum.

Files of the Hub call the layer ``block_sparse_moe`` and an expert's matrices w1 (gate), w3 (up) and w2 (down).
"""

from typing import Any

from colonnade.checkpoint.hf.experts import GATE, balance_to_hf, moe_from_hf, per_expert, stacked
from colonnade.checkpoint.hf.keys import Keys
from colonnade.checkpoint.hf.llama import BUFFERS, common_from_hf, common_to_hf
from colonnade.checkpoint.hf.llama import TABLE as LLAMA
from colonnade.checkpoint.hf.names import Family
from colonnade.checkpoint.stored import Stored, Table
from colonnade.config import ModelConfig

_LAYER = "model.layers.{i}."
TABLE: Table = {
    **LLAMA,
    GATE: Stored(f"{_LAYER}block_sparse_moe.gate.weight"),
    **per_expert(f"{_LAYER}block_sparse_moe.experts", ("w1", "w3", "w2")),
}
MODULES: Table = {GATE: Stored(f"{_LAYER}mlp.gate.weight"), **stacked(f"{_LAYER}mlp.experts")}


def _from_hf(keys: Keys) -> ModelConfig:
    fields = common_from_hf(keys, context=131072, kv_heads=8, eps=1e-5, theta=1e6)
    window = keys.size("sliding_window", None)
    moe = moe_from_hf(keys, keys.size("num_local_experts", 8), fields["ffn_width"], normalise=True)
    return ModelConfig(family="mixtral", **fields, window=window, moe=moe)


def _to_hf(config: ModelConfig) -> dict[str, Any]:
    moe = config.moe
    return common_to_hf(config) | {"sliding_window": config.window} | ({} if moe is None else {
        "intermediate_size": moe.ffn_width,
        "num_local_experts": moe.experts,
        "num_experts_per_tok": moe.active,
        **balance_to_hf(moe),
        "router_jitter_noise": moe.router.jitter,
    })  # fmt: skip


FAMILY = Family(
    "mixtral", "MixtralForCausalLM", "model.", TABLE, _from_hf, _to_hf, BUFFERS, experts=True, modules=MODULES
)
