"""Families of published models of which some are dense and some have experts."""

from typing import Any

from colonnade.config.model import ModelConfig


def gpt2(layers: int, width: int, heads: int, **fields: Any) -> ModelConfig:
    """Learned positions, LayerNorm, GELU, biases, tied embeddings, F = 4 D (Radford 2019)."""
    common: dict[str, Any] = {
        "family": "gpt2",
        "vocab_size": 50257,
        "context": 1024,
        "positions": "learned",
        "norm": "layernorm",
        "activation": "gelu_tanh",
        "gated": False,
        "qkv_bias": True,
        "out_bias": True,
        "ffn_bias": True,
        "tied": True,
    }
    return ModelConfig(layers=layers, width=width, heads=heads, ffn_width=4 * width, **(common | fields))


def qwen3(layers: int, width: int, heads: int, ffn_width: int, **fields: Any) -> ModelConfig:
    """Normalised queries and keys, 8 heads of these or as many as ``fields`` say (Qwen3, arXiv 2505.09388)."""
    common: dict[str, Any] = {
        "family": "qwen3",
        "vocab_size": 151936,
        "kv_heads": 8,
        "head_width": 128,
        "context": 40960,
        "rope_theta": 1e6,
        "norm_eps": 1e-6,
        "qk_norm": True,
    }
    return ModelConfig(layers=layers, width=width, heads=heads, ffn_width=ffn_width, **(common | fields))
