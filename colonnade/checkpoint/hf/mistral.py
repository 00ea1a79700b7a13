"""Mistral (Jiang 2023, arXiv 2310.06825): Llama without biases and with a sliding window in every layer.

A config.json without ``sliding_window`` means 4096, as in transformers; later models write null and have none.
"""

from typing import Any

from colonnade.checkpoint.hf.keys import Keys
from colonnade.checkpoint.hf.llama import BUFFERS, TABLE, common_from_hf, common_to_hf
from colonnade.checkpoint.hf.names import Family
from colonnade.config import ModelConfig


def _from_hf(keys: Keys) -> ModelConfig:
    window = keys.size("sliding_window", 4096, null=None)
    fields = common_from_hf(keys, context=131072, kv_heads=8)
    kind = "full_attention" if window is None else "sliding_attention"
    if keys.take("layer_types") not in (None, [kind] * fields["layers"]):
        raise keys.refuse("layer_types", f"'{kind}' in every layer follows from 'sliding_window'")
    return ModelConfig(family="mistral", **fields, window=window)


def _to_hf(config: ModelConfig) -> dict[str, Any]:
    return common_to_hf(config) | {"sliding_window": config.window}


FAMILY = Family("mistral", "MistralForCausalLM", "model.", TABLE, _from_hf, _to_hf, BUFFERS)
