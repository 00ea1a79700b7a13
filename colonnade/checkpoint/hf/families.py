"""The families that we read and write, and config.json both ways.

Writing is checked by reading back: what the family cannot say (a window in "llama", a query norm in "qwen2") comes back
changed, and the field that changed is named. So there is no list of exceptions to keep up to date.
"""

from collections.abc import Mapping
from typing import Any

from colonnade.checkpoint.hf import bert, deepseek, gpt2, llama, mixtral, qwen
from colonnade.checkpoint.hf import llama as mistral
from colonnade.checkpoint.hf import mixtral as olmoe
from colonnade.checkpoint.hf.experts import expressible
from colonnade.checkpoint.hf.family import Family, Keys
from colonnade.config import ModelConfig
from colonnade.errors import CheckpointError, ConfigError

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        gpt2.FAMILY,
        llama.LLAMA,
        mistral.MISTRAL,
        qwen.QWEN2,
        qwen.QWEN3,
        mixtral.MIXTRAL,
        olmoe.OLMOE,
        qwen.QWEN2_MOE,
        qwen.QWEN3_MOE,
        deepseek.V2,
        deepseek.V3,
        bert.BERT,
        bert.MEGATRON,
    )
}


def config_from_hf(raw: Mapping[str, Any], where: str = "config.json") -> ModelConfig:
    """Our config from the contents of their config.json; ``where`` names the file in messages.

    Raises :class:`CheckpointError` for a family, a choice or a key that we cannot express.
    """
    kind = raw.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise CheckpointError(f"{where} describes a model of type {kind!r}; known types are {', '.join(FAMILIES)}")
    if raw.get("quantization_config") is not None:
        raise CheckpointError(
            f"{where} describes quantised weights (quantization_config), which cannot be read; "
            "use the original checkpoint, or a GGUF file of the same model"
        )
    keys = Keys(raw, where)
    try:
        config = FAMILIES[kind].from_hf(keys)
    except ConfigError as error:
        raise CheckpointError(f"{where}: {error}") from None
    keys.finish()
    return config


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    """The contents of a config.json that describes ``config``.

    Raises :class:`CheckpointError` when the config's family cannot express one of its fields.
    """
    family = FAMILIES[config.family]
    if family.experts != (config.moe is not None):
        what = "no experts" if family.experts else "experts"
        able = ", ".join(name for name, other in FAMILIES.items() if other.experts != family.experts)
        raise CheckpointError(
            f"'{family.name}' files cannot express a model with {what}; write --format colonnade, or train it with "
            f"--model.family one of {able}"
        )
    raw = {"model_type": family.name, "architectures": [family.architecture], **family.to_hf(config)}
    back = config_from_hf(raw)
    before, after = _said(config), _said(back)
    for field in [name for name in before if name in after]:
        if before[field] != after[field]:
            raise CheckpointError(
                f"'{config.family}' files cannot express {field} = {before[field]!r} (it would read back as "
                f"{after[field]!r}); write --format colonnade, or train it with another --model.family that can"
            )
    return raw


def _said(config: ModelConfig) -> dict[str, Any]:
    """The fields that a file must be able to say."""
    layers_with_experts = sum(config.experts_of(i) is not None for i in range(config.layers))
    silent = {"moe"}  # said field by field
    silent |= {"window_from_layer"} if config.window is None else set()
    silent |= {"ffn_width"} if layers_with_experts == config.layers else set()
    silent |= {"qk_norm_over"} if not config.qk_norm else set()
    fields = {name: getattr(config, name) for name in type(config).model_fields if name not in silent}
    return fields | expressible(config)
