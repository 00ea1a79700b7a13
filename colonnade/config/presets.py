"""Published models by name, read from ``presets/*.toml`` next to this file.

    preset("smollm2-135m")

Each table of these files has the fields of one :class:`ModelConfig`, as in the ``config.json`` of the checkpoint on the
Hugging Face Hub that the comment names. ``base`` names another table, of any file, whose fields are inherited; nested
tables are merged key by key. A table whose name starts with "_" is only a base. The parameter counts are compared with
the published ones in ``tests/unit/test_config_presets.py``.
"""

import functools
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from colonnade.config.base import did_you_mean
from colonnade.config.model import ModelConfig
from colonnade.errors import ConfigError

FILES = (
    "tour", "gpt2", "bert", "smollm2", "llama", "mistral", "qwen", "gpt2_moe", "mixtral", "qwen_moe", "olmoe",
    "deepseek", "t5", "nllb", "whisper",
)  # fmt: skip
"""One file per family, in the order in which ``colonnade presets`` lists them."""


class _Presets(Mapping[str, ModelConfig]):
    """The files are read on first use, so that importing this module stays fast."""

    def __getitem__(self, name: str) -> ModelConfig:
        if name.startswith("_"):
            raise KeyError(name)
        return ModelConfig(**_inherit(name))

    def __iter__(self) -> Iterator[str]:
        return (name for name in _tables() if not name.startswith("_"))

    def __len__(self) -> int:
        return sum(1 for _ in self)


PRESETS: Mapping[str, ModelConfig] = _Presets()
"""Each model's config by its name; a config is built when it is looked up."""


def preset(name: str) -> ModelConfig:
    """The config of a published model; raises :class:`ConfigError` with the nearest name for an unknown one."""
    if name not in PRESETS:
        raise ConfigError(f"there is no preset '{name}'" + did_you_mean(name, list(PRESETS)))
    return PRESETS[name]


@functools.cache
def _tables() -> dict[str, dict[str, Any]]:
    folder = Path(__file__).with_suffix("")
    tables: dict[str, dict[str, Any]] = {}
    for file in FILES:
        tables |= tomllib.loads((folder / f"{file}.toml").read_text("utf-8"))
    return tables


def _inherit(name: str) -> dict[str, Any]:
    """The fields of a table and of its bases."""
    table = dict(_tables()[name])
    base = table.pop("base", None)
    return table if base is None else _merge(_inherit(base), table)


def _merge(base: dict[str, Any], table: dict[str, Any]) -> dict[str, Any]:
    nested = {key for key, value in table.items() if isinstance(value, dict) and key in base}
    return {**base, **table, **{key: _merge(base[key], table[key]) for key in nested}}
