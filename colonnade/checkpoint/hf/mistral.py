"""Mistral (Jiang 2023, arXiv 2310.06825): Llama without biases and with a sliding window in every layer.

A config.json without ``sliding_window`` means 4096, as in transformers; later models write null and have none.
"""

from typing import Any

from colonnade.checkpoint.hf.keys import Keys
from colonnade.checkpoint.hf.llama import BUFFERS, TABLE, common_from_hf, common_to_hf
from colonnade.checkpoint.hf.names import Family
from colonnade.config import ModelConfig


def _from_hf(keys: Keys) -> ModelConfig:
    window = keys.size("sliding_window", 4096) if keys.raw.get("sliding_window", 4096) is not None else None
    keys.take("sliding_window")
    fields = common_from_hf(keys)
    kind = "full_attention" if window is None else "sliding_attention"
    keys.must_be("layer_types", [kind] * fields["layers"], f"'{kind}' in every layer follows from 'sliding_window'")
    return ModelConfig(family="mistral", **fields, window=window)


def _to_hf(config: ModelConfig) -> dict[str, Any]:
    return common_to_hf(config) | {"sliding_window": config.window}


FAMILY = Family("mistral", "MistralForCausalLM", "model.", TABLE, _from_hf, _to_hf, BUFFERS)
