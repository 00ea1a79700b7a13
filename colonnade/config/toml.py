"""Configs as TOML files, both ways; what each key means is written beside it as a comment.

Reading says where a mistake is: ``run.toml:12: TrainConfig has no key 'learning_rate'; did you mean …``. Python's own
``tomllib`` parses and keeps no line numbers, so keys are looked up in the text again when there is something to
complain about. TOML has no null: a key whose value is None is left out.
"""

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any, TypeVar, cast

import tomlkit
from tomlkit.items import Table

from colonnade.config.base import Config
from colonnade.config.derive import flatten, nested_model, with_derived
from colonnade.errors import ConfigError

AnyConfig = TypeVar("AnyConfig", bound=Config)
Key = tuple[str, ...]
"""A key with the tables around it."""


def dumps(config: Config) -> str:
    """``config`` as TOML, every key with its meaning; :func:`parse` gives an equal config back."""
    return tomlkit.dumps(_add_fields(tomlkit.document(), config)).strip() + "\n"


def write(config: Config, path: Path) -> None:
    """Write ``config`` to ``path``."""
    path.write_text(dumps(config), encoding="utf-8")


def read(cls: type[AnyConfig], path: Path, base: AnyConfig | None = None) -> AnyConfig:
    """The config in a TOML file; keys that the file leaves out follow from those it gives, or come from ``base``.

    Raises :class:`ConfigError`, naming file and line, for a file that is not TOML or does not describe a ``cls``.
    """
    return parse(cls, _text(path), str(path), base)


def parse(cls: type[AnyConfig], text: str, where: str = "TOML", base: AnyConfig | None = None) -> AnyConfig:
    """The same from a text; ``where`` names it in messages."""
    values = _loads(text, where)
    if base is not None:
        base = with_derived(base, flatten(values))
    return _parse_table(cls, values, (), _key_lines(text), where, base)


def read_settings(path: Path) -> dict[str, object]:
    """The settings that a TOML file gives, by dotted names."""
    return flatten(_loads(_text(path), str(path)))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as why:
        reason = why.strerror if isinstance(why, OSError) else f"not UTF-8 text (byte {why.start})"
        raise ConfigError(f"{path} cannot be read: {reason}; give a file of settings in TOML") from None


def _loads(text: str, where: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as why:
        said = re.fullmatch(r"(?P<what>.*) \(at (?:line (?P<line>\d+), column \d+|end of document)\)", str(why))
        line = (said and said["line"]) or len(text.splitlines())
        raise ConfigError(f"{where}:{line}: not TOML: {(said['what'] if said else str(why)).lower()}") from None


def _parse_table(
    cls: type[AnyConfig],
    table: Mapping[str, Any],
    at: Key,
    lines: Mapping[Key, int],
    where: str,
    base: AnyConfig | None,
) -> AnyConfig:
    """Inner tables first, so that a complaint belongs to the table at hand."""
    values: dict[str, Any] = {}
    for key, value in table.items():
        inner = nested_model(cls, key)
        if inner is not None and issubclass(inner, Config) and isinstance(value, dict):
            within = cast("dict[str, Any]", value)
            values[key] = _parse_table(inner, within, (*at, key), lines, where, getattr(base, key, None))
        else:
            values[key] = value
    try:
        return cls(**values) if base is None else base.replace(**values)
    except ConfigError as why:
        # The message names the key; the table may be spread over the file.
        guilty = [key for key in table if re.search(rf"\b{re.escape(key)}\b", str(why))]
        line = lines.get((*at, guilty[0])) if guilty else lines.get(at)
        raise ConfigError(f"{where}:{line or 1}: {why}") from None


def _key_lines(text: str) -> dict[Key, int]:
    """The line of each key and table; good enough to point at, whatever else the file holds."""
    found: dict[Key, int] = {}
    table: Key = ()
    for number, line in enumerate(text.splitlines(), 1):
        if header := re.match(r"\s*\[+([^\[\]]+)\]+", line):
            table = _split_key(header[1])
            found.setdefault(table, number)
        elif assigned := re.match(r"\s*([\w\"'.\- ]+?)\s*=", line):
            found.setdefault((*table, *_split_key(assigned[1])), number)
    return found


def _split_key(dotted: str) -> Key:
    return tuple(part.strip().strip("\"'") for part in dotted.split("."))


Container = TypeVar("Container", tomlkit.TOMLDocument, Table)


def _add_fields(table: Container, config: Config) -> Container:
    """Plain keys first: in TOML everything after a table's header belongs to that table."""
    inner: dict[str, Config] = {}
    for name, field in type(config).model_fields.items():
        value = getattr(config, name)
        if isinstance(value, Config):
            inner[name] = value
        elif value is not None:
            item = tomlkit.item(str(value) if isinstance(value, PurePath) else value)
            table.add(name, item.comment(_one_line(field.description)) if field.description else item)
        elif field.default is not None:
            raise ConfigError(f"{type(config).__name__}.{name} is None, which TOML cannot say; set a value")
    for name, value in inner.items():
        table.add(name, _add_fields(tomlkit.table(), value))
    return table


def _one_line(docstring: str) -> str:
    return " ".join(docstring.replace("``", "").split())
