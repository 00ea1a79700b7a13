"""Llama (Touvron 2023, arXiv 2302.13971) and Mistral (Jiang 2023, arXiv 2310.06825), and the parts that their
successors share.

    llama      Llama 1 to 3, SmolLM2, and every model saved as "llama"
    mistral    Llama without biases and with a sliding window in every layer; a config.json without ``sliding_window``
               means 4096, as in transformers; later models write null and have none

Qwen, Mixtral, OLMoE and DeepSeek differ from Llama in a bias, a window, a norm or the experts; their files use the
tables and functions here.
"""

from collections.abc import Callable
from typing import Any

from colonnade.checkpoint.hf.family import (
    ConfigKeys,
    Family,
    activation_from_hf,
    activation_to_hf,
    sizes_from_hf,
    sizes_to_hf,
)
from colonnade.checkpoint.hf.rope import rope_from_hf, rope_to_hf
from colonnade.checkpoint.weight_mapping import MappingTable, ParamMapping, SplitQKV, weight_and_bias
from colonnade.config import ModelConfig

BUFFERS = r".*\.rotary_emb\.inv_freq"

_LAYER = "model.layers.{i}."
_QKV = [f"{_LAYER}self_attn.{part}_proj" for part in "qkv"]
LLAMA_TABLE: MappingTable = {
    "embed.tokens.weight": ParamMapping("model.embed_tokens.weight"),
    "blocks.{i}.norm1.weight": ParamMapping(f"{_LAYER}input_layernorm.weight"),
    **weight_and_bias("blocks.{i}.attention.qkv", *_QKV, mapping=SplitQKV),
    **weight_and_bias("blocks.{i}.attention.out", f"{_LAYER}self_attn.o_proj"),
    "blocks.{i}.norm2.weight": ParamMapping(f"{_LAYER}post_attention_layernorm.weight"),
    **weight_and_bias("blocks.{i}.ffn.gate", f"{_LAYER}mlp.gate_proj"),
    **weight_and_bias("blocks.{i}.ffn.up", f"{_LAYER}mlp.up_proj"),
    **weight_and_bias("blocks.{i}.ffn.down", f"{_LAYER}mlp.down_proj"),
    "norm.weight": ParamMapping("model.norm.weight"),
    "unembed.weight": ParamMapping("lm_head.weight"),
}


def common_from_hf(
    keys: ConfigKeys, *, context: int, kv_heads: int | None = None, eps: float = 1e-6, theta: float = 10000.0
) -> dict[str, Any]:
    """Reads the fields that all Llama-like families share.

    Sizes are required. The other keys have transformers' defaults; the arguments are those that differ between
    families: ``kv_heads`` None means as many as query heads, and ``theta`` is the RoPE base.
    """
    sizes = sizes_from_hf(keys)
    return (
        sizes
        | {
            "kv_heads": keys.size("num_key_value_heads", kv_heads or sizes["heads"], null=sizes["heads"]),
            "head_width": keys.size("head_dim", None) or 0,
            "norm_eps": keys.number("rms_norm_eps", eps),
            "activation": activation_from_hf(keys, "hidden_act", "silu"),
            "tied": keys.flag("tie_word_embeddings", False),
            "init_std": keys.number("initializer_range", 0.02),
            "causal": keys.flag("is_causal", True),
        }
        | rope_from_hf(keys, keys.size("max_position_embeddings", context), theta=theta)
    )


def common_to_hf(config: ModelConfig) -> dict[str, Any]:
    """The keys that all Llama-like families share."""
    fields = {
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_width,
        "max_position_embeddings": config.context,
        "rms_norm_eps": config.norm_eps,
        "hidden_act": activation_to_hf(config.activation),
        "tie_word_embeddings": config.tied,
        "initializer_range": config.init_std,
    }
    return sizes_to_hf(config) | fields | rope_to_hf(config) | causal_to_hf(config)


def causal_to_hf(config: ModelConfig) -> dict[str, Any]:
    """``is_causal``, for bidirectional attention only; it is the default of a decoder."""
    return {} if config.causal else {"is_causal": False}


def llama_like(
    name: str,
    architecture: str,
    table: MappingTable,
    from_hf: Callable[[ConfigKeys], ModelConfig],
    to_hf: Callable[[ModelConfig], dict[str, Any]],
    stacked_table: MappingTable | None = None,
) -> Family:
    """A family with Llama's prefix and buffers; ``stacked_table`` as in :class:`Family`."""
    return Family(name, architecture, "model.", table, from_hf, to_hf, BUFFERS, stacked_table=stacked_table or {})


def _llama_from_hf(keys: ConfigKeys) -> ModelConfig:
    bias = keys.flag("attention_bias", False)
    fields, ffn_bias = common_from_hf(keys, context=2048), keys.flag("mlp_bias", False)
    return ModelConfig(family="llama", **fields, qkv_bias=bias, out_bias=bias, ffn_bias=ffn_bias)


def _llama_to_hf(config: ModelConfig) -> dict[str, Any]:
    return common_to_hf(config) | {"attention_bias": config.qkv_bias, "mlp_bias": config.ffn_bias}


LLAMA = llama_like("llama", "LlamaForCausalLM", LLAMA_TABLE, _llama_from_hf, _llama_to_hf)


def _mistral_from_hf(keys: ConfigKeys) -> ModelConfig:
    window = keys.size("sliding_window", 4096, null=None)
    fields = common_from_hf(keys, context=131072, kv_heads=8)
    kind = "full_attention" if window is None else "sliding_attention"
    if keys.take("layer_types") not in (None, [kind] * fields["layers"]):
        raise keys.refuse("layer_types", f"'sliding_window' implies '{kind}' in every layer; make them agree")
    return ModelConfig(family="mistral", **fields, window=window)


def _mistral_to_hf(config: ModelConfig) -> dict[str, Any]:
    return common_to_hf(config) | {"sliding_window": config.window}


MISTRAL = llama_like("mistral", "MistralForCausalLM", LLAMA_TABLE, _mistral_from_hf, _mistral_to_hf)
