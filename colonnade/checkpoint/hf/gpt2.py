"""GPT-2 (Radford 2019): learned positions, LayerNorm, GELU, biases everywhere, tied embeddings.

Its matrices are "Conv1D", stored (in, out), and its queries, keys and values are one tensor, ``c_attn``. The original
file (``openai-community/gpt2``) lacks the prefix and stores each layer's causal mask as a tensor.
"""

from typing import Any

from colonnade.checkpoint.hf.family import ConfigKeys, Family, activation_from_hf, activation_to_hf
from colonnade.checkpoint.hf.llama import causal_to_hf
from colonnade.checkpoint.weight_mapping import FusedQKV, MappingTable, ParamMapping, weight_and_bias
from colonnade.config import ModelConfig

_LAYER = "transformer.h.{i}."
TABLE: MappingTable = {
    "embed.tokens.weight": ParamMapping("transformer.wte.weight"),
    "embed.positions.weight": ParamMapping("transformer.wpe.weight"),
    **weight_and_bias("blocks.{i}.norm1", f"{_LAYER}ln_1"),
    **weight_and_bias("blocks.{i}.attention.qkv", f"{_LAYER}attn.c_attn", mapping=FusedQKV, transposed=True),
    **weight_and_bias("blocks.{i}.attention.out", f"{_LAYER}attn.c_proj", transposed=True),
    **weight_and_bias("blocks.{i}.norm2", f"{_LAYER}ln_2"),
    **weight_and_bias("blocks.{i}.ffn.up", f"{_LAYER}mlp.c_fc", transposed=True),
    **weight_and_bias("blocks.{i}.ffn.down", f"{_LAYER}mlp.c_proj", transposed=True),
    **weight_and_bias("norm", "transformer.ln_f"),
    "unembed.weight": ParamMapping("lm_head.weight"),
}


def _from_hf(keys: ConfigKeys) -> ModelConfig:
    width = keys.size("n_embd")
    keys.must_be("scale_attn_weights", True, "scores without the factor 1/√H are not implemented")
    keys.must_be("scale_attn_by_inverse_layer_idx", False, "scores divided by the layer's number are not implemented")
    keys.must_be("add_cross_attention", False, "only decoder-only models are implemented")
    return ModelConfig(
        family="gpt2",
        vocab_size=keys.size("vocab_size"),
        layers=keys.size("n_layer"),
        width=width,
        heads=keys.size("n_head"),
        ffn_width=keys.size("n_inner", 4 * width, null=4 * width),
        context=keys.size("n_positions", 1024),
        norm_eps=keys.number("layer_norm_epsilon", 1e-5),
        activation=activation_from_hf(keys, "activation_function", "gelu_new"),
        tied=keys.flag("tie_word_embeddings", True),
        init_std=keys.number("initializer_range", 0.02),
        causal=keys.flag("is_causal", True),
        positions="learned",
        norm="layernorm",
        gated=False,
        qkv_bias=True,
        out_bias=True,
        ffn_bias=True,
    )


def _to_hf(config: ModelConfig) -> dict[str, Any]:
    return {
        "vocab_size": config.vocab_size,
        "n_layer": config.layers,
        "n_embd": config.width,
        "n_head": config.heads,
        "n_inner": config.ffn_width,
        "n_positions": config.context,
        "layer_norm_epsilon": config.norm_eps,
        "activation_function": activation_to_hf(config.activation),
        "tie_word_embeddings": config.tied,
        "initializer_range": config.init_std,
    } | causal_to_hf(config)


GPT2 = Family("gpt2", "GPT2LMHeadModel", "transformer.", TABLE, _from_hf, _to_hf, r".*\.attn\.(bias|masked_bias)")
