"""Qwen2 and 2.5, dense (arXiv 2407.10671): Llama with query, key and value biases; upper layers may have a window."""

from typing import Any

from colonnade.checkpoint.hf.keys import Keys
from colonnade.checkpoint.hf.llama import BUFFERS, TABLE, common_from_hf, common_to_hf
from colonnade.checkpoint.hf.names import Family
from colonnade.config import ModelConfig

FULL, SLIDING = "full_attention", "sliding_attention"


def window_from_hf(keys: Keys, layers: int) -> dict[str, Any]:
    """The fields ``window`` and ``window_from_layer`` from Qwen's four keys about it.

    ``layer_types`` wins over ``max_window_layers``; only "full attention first, then a window" can be expressed.
    """
    used, size = keys.flag("use_sliding_window", False), keys.size("sliding_window", 4096)
    if keys.raw.get("sliding_window", 4096) is None:
        used = False
    first = keys.take("max_window_layers", 28)
    kinds = keys.take("layer_types")
    if kinds is not None:
        first = kinds.index(SLIDING) if isinstance(kinds, list) and SLIDING in kinds else layers
        if kinds != [FULL] * first + [SLIDING] * (layers - first):
            raise keys.refuse("layer_types", f"'{FULL}' layers first, then '{SLIDING}' ones, {layers} in all, expected")
        if first < layers and not used:
            raise keys.refuse("layer_types", "a window is named but 'use_sliding_window' is false; make them agree")
    if not used or first >= layers:
        return {}
    return {"window": size, "window_from_layer": first}


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
    fields = common_from_hf(keys)
    return ModelConfig(family="qwen2", **fields, qkv_bias=True, **window_from_hf(keys, fields["layers"]))


def _to_hf(config: ModelConfig) -> dict[str, Any]:
    return common_to_hf(config) | window_to_hf(config)


FAMILY = Family("qwen2", "Qwen2ForCausalLM", "model.", TABLE, _from_hf, _to_hf, BUFFERS)
