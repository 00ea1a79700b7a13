"""The families that we read and write, and config.json both ways.

Writing is checked by reading back: what the family cannot say (a window in "llama", a query norm in "qwen2") comes back
changed, and the field that changed is named. So there is no list of exceptions to keep up to date.
"""

from collections.abc import Mapping
from typing import Any

from colonnade.checkpoint.hf import bert, gpt2, llama, mistral, qwen2, qwen3
from colonnade.checkpoint.hf.keys import Keys
from colonnade.checkpoint.hf.names import Family
from colonnade.config import ModelConfig
from colonnade.errors import CheckpointError, ConfigError

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (*(m.FAMILY for m in (gpt2, llama, mistral, qwen2, qwen3)), bert.BERT, bert.MEGATRON)
}


def config_from_hf(raw: Mapping[str, Any], where: str = "config.json") -> ModelConfig:
    """Our config from the contents of their config.json; ``where`` names the file in messages.

    Raises :class:`CheckpointError` for a family, a choice or a key that we cannot express.
    """
    kind = raw.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise CheckpointError(f"{where} describes a model of type {kind!r}; known types are {', '.join(FAMILIES)}")
    if raw.get("quantization_config"):
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
    raw = {"model_type": family.name, "architectures": [family.architecture], **family.to_hf(config)}
    back = config_from_hf(raw)
    for field in type(config).model_fields:
        if field == "window_from_layer" and config.window is None:
            continue
        before, after = getattr(config, field), getattr(back, field)
        if before != after:
            raise CheckpointError(
                f"'{config.family}' files cannot express {field} = {before!r} (it would read back as {after!r}); "
                f"set model.family to one of {', '.join(name for name in FAMILIES if name != config.family)}"
            )
    return raw
