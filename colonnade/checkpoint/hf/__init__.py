"""Hugging Face folders, read and written under any layout: the table of families, and conversion of config.json.

Each family is a module with its table of parameter names. Writing is checked by reading back: a field that the family
cannot represent (a window in "llama", a query norm in "qwen2") comes back changed, and the error names it. So no list
of exceptions has to be maintained.
"""

from collections.abc import Mapping
from typing import Any

from colonnade.checkpoint.hf import bert, deepseek, gpt2, llama, mixtral, nllb, qwen, switch, t5, whisper
from colonnade.checkpoint.hf.experts import expert_fields
from colonnade.checkpoint.hf.family import ConfigKeys, Family
from colonnade.config import ModelConfig
from colonnade.errors import CheckpointError, ConfigError

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        gpt2.GPT2,
        llama.LLAMA,
        llama.MISTRAL,
        qwen.QWEN2,
        qwen.QWEN3,
        mixtral.MIXTRAL,
        mixtral.OLMOE,
        qwen.QWEN2_MOE,
        qwen.QWEN3_MOE,
        deepseek.V2,
        deepseek.V3,
        bert.BERT,
        bert.MEGATRON,
        t5.T5,
        switch.SWITCH,
        nllb.NLLB_MOE,
        whisper.WHISPER,
    )
}


def config_from_hf(raw: Mapping[str, Any], file: str = "config.json") -> ModelConfig:
    """Converts the contents of a config.json to our config; ``file`` is its name for messages.

    Raises :class:`CheckpointError` for a family, a choice or a key that we do not support.
    """
    kind = raw.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise CheckpointError(f"{file} describes a model of type {kind!r}; supported types are {', '.join(FAMILIES)}")
    if raw.get("quantization_config") is not None:
        raise CheckpointError(
            f"{file} describes quantised weights (quantization_config), which cannot be read; "
            "use the original checkpoint, or a GGUF file of the same model"
        )
    keys = ConfigKeys(raw, file)
    try:
        config = FAMILIES[kind].from_hf(keys)
    except ConfigError as error:
        raise CheckpointError(f"{file}: {error}") from None
    keys.refuse_unknown()
    return config


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    """Converts our config to the contents of a config.json.

    Raises :class:`CheckpointError` when the config's family cannot represent one of its fields.
    """
    family = FAMILIES[config.family]
    if family.moe != (config.moe is not None):
        what = "no experts" if family.moe else "experts"
        able = ", ".join(name for name, other in FAMILIES.items() if other.moe != family.moe)
        raise CheckpointError(
            f"'{family.name}' files cannot represent a model with {what}; write --format colonnade, or train it with "
            f"--model.family one of {able}"
        )
    raw = {"model_type": family.name, "architectures": [family.architecture], **family.to_hf(config)}
    before, after = _comparable_fields(config), _comparable_fields(config_from_hf(raw))
    for field in [name for name in before if name in after]:
        if before[field] != after[field]:
            raise CheckpointError(
                f"'{config.family}' files cannot represent {field} = {before[field]!r} (it would be read back as "
                f"{after[field]!r}); write --format colonnade, or train it with another --model.family that can"
            )
    return raw


def _comparable_fields(config: ModelConfig) -> dict[str, Any]:
    """The fields that a file must represent."""
    layers_with_experts = sum(config.experts_of(i) is not None for i in range(config.total_layers))
    unused = {"moe"}  # compared field by field
    unused |= {"window_from_layer"} if config.window is None else set()
    unused |= {"ffn_width"} if layers_with_experts == config.total_layers else set()
    unused |= {"qk_norm_over"} if not config.qk_norm else set()
    unused |= {"tied"} if FAMILIES[config.family].tied_by_values else set()
    fields = {name: getattr(config, name) for name in type(config).model_fields if name not in unused}
    return fields | expert_fields(config)
