"""The Llama line (Touvron 2023, arXiv 2302.13971): Llama 1 to 3, SmolLM2, and every model saved as "llama".

Mistral, Qwen2 and Qwen3 differ in a bias, a window or a norm; their files build on the functions here.

Mistral (Jiang 2023, arXiv 2310.06825): Llama without biases and with a sliding window in every layer.

A config.json without ``sliding_window`` means 4096, as in transformers; later models write null and have none.
"""

from typing import Any

from colonnade.checkpoint.hf.family import Family, Keys, activation_from_hf, activation_to_hf
from colonnade.checkpoint.hf.rope import rope_from_hf, rope_to_hf
from colonnade.checkpoint.weight_mapping import SplitQKV, Stored, Table
from colonnade.config import ModelConfig

BUFFERS = r".*\.rotary_emb\.inv_freq"

_LAYER = "model.layers.{i}."
_QKV = [f"{_LAYER}self_attn.{part}_proj" for part in "qkv"]
LLAMA_TABLE: Table = {
    "embed.tokens.weight": Stored("model.embed_tokens.weight"),
    "blocks.{i}.norm1.weight": Stored(f"{_LAYER}input_layernorm.weight"),
    "blocks.{i}.attention.qkv.weight": SplitQKV(*(f"{name}.weight" for name in _QKV)),
    "blocks.{i}.attention.qkv.bias": SplitQKV(*(f"{name}.bias" for name in _QKV)),
    "blocks.{i}.attention.out.weight": Stored(f"{_LAYER}self_attn.o_proj.weight"),
    "blocks.{i}.attention.out.bias": Stored(f"{_LAYER}self_attn.o_proj.bias"),
    "blocks.{i}.norm2.weight": Stored(f"{_LAYER}post_attention_layernorm.weight"),
    "blocks.{i}.ffn.gate.weight": Stored(f"{_LAYER}mlp.gate_proj.weight"),
    "blocks.{i}.ffn.gate.bias": Stored(f"{_LAYER}mlp.gate_proj.bias"),
    "blocks.{i}.ffn.up.weight": Stored(f"{_LAYER}mlp.up_proj.weight"),
    "blocks.{i}.ffn.up.bias": Stored(f"{_LAYER}mlp.up_proj.bias"),
    "blocks.{i}.ffn.down.weight": Stored(f"{_LAYER}mlp.down_proj.weight"),
    "blocks.{i}.ffn.down.bias": Stored(f"{_LAYER}mlp.down_proj.bias"),
    "norm.weight": Stored("model.norm.weight"),
    "unembed.weight": Stored("lm_head.weight"),
}


def common_from_hf(
    keys: Keys, *, context: int, kv_heads: int | None = None, eps: float = 1e-6, theta: float = 10000.0
) -> dict[str, Any]:
    """The fields that the whole line has in common.

    Sizes are required. The rest has transformers' defaults, of which those of the arguments differ between families:
    ``kv_heads`` None means as many as query heads, and ``theta`` is the rotary base.
    """
    heads = keys.size("num_attention_heads")
    return {
        "vocab_size": keys.size("vocab_size"),
        "layers": keys.size("num_hidden_layers"),
        "width": keys.size("hidden_size"),
        "heads": heads,
        "kv_heads": keys.size("num_key_value_heads", kv_heads or heads, null=heads),
        "head_width": keys.size("head_dim", None) or 0,
        "ffn_width": keys.size("intermediate_size"),
        "norm_eps": keys.number("rms_norm_eps", eps),
        "activation": activation_from_hf(keys, "hidden_act", "silu"),
        "tied": keys.flag("tie_word_embeddings", False),
        "init_std": keys.number("initializer_range", 0.02),
        "causal": keys.flag("is_causal", True),
    } | rope_from_hf(keys, keys.size("max_position_embeddings", context), theta=theta)


def common_to_hf(config: ModelConfig) -> dict[str, Any]:
    """The keys that the whole line has in common."""
    return (
        {
            "vocab_size": config.vocab_size,
            "num_hidden_layers": config.layers,
            "hidden_size": config.width,
            "num_attention_heads": config.heads,
            "num_key_value_heads": config.kv_heads,
            "head_dim": config.head_width,
            "intermediate_size": config.ffn_width,
            "max_position_embeddings": config.context,
            "rms_norm_eps": config.norm_eps,
            "hidden_act": activation_to_hf(config.activation),
            "tie_word_embeddings": config.tied,
            "initializer_range": config.init_std,
        }
        | rope_to_hf(config)
        | causal_to_hf(config)
    )


def causal_to_hf(config: ModelConfig) -> dict[str, Any]:
    """``is_causal`` where attention goes both ways; a causal decoder's file need not say so."""
    return {} if config.causal else {"is_causal": False}


def _llama_from_hf(keys: Keys) -> ModelConfig:
    bias = keys.flag("attention_bias", False)
    return ModelConfig(
        family="llama",
        **common_from_hf(keys, context=2048),
        qkv_bias=bias,
        out_bias=bias,
        ffn_bias=keys.flag("mlp_bias", False),
    )


def _llama_to_hf(config: ModelConfig) -> dict[str, Any]:
    return common_to_hf(config) | {"attention_bias": config.qkv_bias, "mlp_bias": config.ffn_bias}


LLAMA = Family("llama", "LlamaForCausalLM", "model.", LLAMA_TABLE, _llama_from_hf, _llama_to_hf, BUFFERS)


def _mistral_from_hf(keys: Keys) -> ModelConfig:
    window = keys.size("sliding_window", 4096, null=None)
    fields = common_from_hf(keys, context=131072, kv_heads=8)
    kind = "full_attention" if window is None else "sliding_attention"
    if keys.take("layer_types") not in (None, [kind] * fields["layers"]):
        raise keys.refuse("layer_types", f"'{kind}' in every layer follows from 'sliding_window'")
    return ModelConfig(family="mistral", **fields, window=window)


def _mistral_to_hf(config: ModelConfig) -> dict[str, Any]:
    return common_to_hf(config) | {"sliding_window": config.window}


MISTRAL = Family("mistral", "MistralForCausalLM", "model.", LLAMA_TABLE, _mistral_from_hf, _mistral_to_hf, BUFFERS)
