"""Qwen3, dense (arXiv 2505.09388): Llama with an RMSNorm on each query and key head, and a head width of its own."""

from typing import Any

from colonnade.checkpoint.hf.keys import Keys
from colonnade.checkpoint.hf.llama import BUFFERS, common_from_hf, common_to_hf
from colonnade.checkpoint.hf.llama import TABLE as LLAMA
from colonnade.checkpoint.hf.names import Family
from colonnade.checkpoint.hf.qwen2 import window_from_hf, window_to_hf
from colonnade.checkpoint.stored import Stored, Table
from colonnade.config import ModelConfig

TABLE: Table = {
    **LLAMA,
    "blocks.{i}.attention.q_norm.weight": Stored("model.layers.{i}.self_attn.q_norm.weight"),
    "blocks.{i}.attention.k_norm.weight": Stored("model.layers.{i}.self_attn.k_norm.weight"),
}


def _from_hf(keys: Keys) -> ModelConfig:
    head_width = keys.size("head_dim", 128)
    fields = common_from_hf(keys, context=32768, kv_heads=32) | {"head_width": head_width}
    bias = keys.flag("attention_bias", False)
    window = window_from_hf(keys, fields["layers"])
    return ModelConfig(family="qwen3", **fields, qk_norm=True, qkv_bias=bias, out_bias=bias, **window)


def _to_hf(config: ModelConfig) -> dict[str, Any]:
    return common_to_hf(config) | window_to_hf(config) | {"attention_bias": config.qkv_bias}


FAMILY = Family("qwen3", "Qwen3ForCausalLM", "model.", TABLE, _from_hf, _to_hf, BUFFERS)
