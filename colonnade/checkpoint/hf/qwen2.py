"""Qwen2 and 2.5, dense (arXiv 2407.10671): Llama with query, key and value biases; upper layers may have a window."""

from typing import Any

from colonnade.checkpoint.hf.keys import Keys
from colonnade.checkpoint.hf.llama import BUFFERS, TABLE, common_from_hf, common_to_hf
from colonnade.checkpoint.hf.names import Family
from colonnade.config import ModelConfig

FULL, SLIDING = "full_attention", "sliding_attention"


def window_from_hf(keys: Keys, layers: int) -> dict[str, Any]:
    """The fields ``window`` and ``window_from_layer`` from Qwen's four keys about it.

    Only "full attention first, then a window" can be expressed. Without ``use_sliding_window`` the window's size and
    its first layer have no effect.
    """
    size = keys.size("sliding_window", 4096, null=None)
    used = keys.flag("use_sliding_window", False) and size is not None
    first = min(keys.size("max_window_layers", 28, least=0), layers) if used else layers
    kinds = keys.take("layer_types")
    if kinds is not None:
        found = kinds.index(SLIDING) if isinstance(kinds, list) and SLIDING in kinds else layers
        if kinds != [FULL] * found + [SLIDING] * (layers - found):
            raise keys.refuse("layer_types", f"'{FULL}' layers first, then '{SLIDING}' ones, {layers} in all, expected")
        if found < layers and not used:
            raise keys.refuse("layer_types", "a window is named but 'use_sliding_window' is false; make them agree")
        if "max_window_layers" in keys.raw and found != first:
            raise keys.refuse(
                "layer_types", f"'max_window_layers' gives layers from {first} on a window; make them agree"
            )
        first = found
    keys.take("max_window_layers")
    return {"window": size, "window_from_layer": first} if first < layers else {}


def window_to_hf(config: ModelConfig) -> dict[str, Any]:
    """Qwen's four keys about the window."""
    first = config.window_from_layer if config.window else config.layers
    return {
        "use_sliding_window": config.window is not None,
        "sliding_window": config.window,
        "max_window_layers": first,
        "layer_types": [FULL if config.window_of(i) is None else SLIDING for i in range(config.layers)],
    }


def _from_hf(keys: Keys) -> ModelConfig:
    fields = common_from_hf(keys, context=32768, kv_heads=32)
    return ModelConfig(family="qwen2", **fields, qkv_bias=True, **window_from_hf(keys, fields["layers"]))


def _to_hf(config: ModelConfig) -> dict[str, Any]:
    return common_to_hf(config) | window_to_hf(config)


FAMILY = Family("qwen2", "Qwen2ForCausalLM", "model.", TABLE, _from_hf, _to_hf, BUFFERS)
