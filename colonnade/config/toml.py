"""Reads and writes configs as TOML files; each key is written with its description as a comment.

An error names file and line: ``run.toml:12: TrainConfig has no key 'learning_rate'; did you mean …``. Python's
``tomllib`` keeps no line numbers, so a second pass over the text finds them when there is an error to report. TOML has
no null: a key whose value is None is omitted.
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
"""A key's path: the names of its tables, then its own."""


def dumps(config: Config) -> str:
    """``config`` as TOML, each key with its description; :func:`parse` returns an equal config."""
    return tomlkit.dumps(_add_fields(tomlkit.document(), config)).strip() + "\n"


def write(config: Config, path: Path) -> None:
    """Write ``config`` to ``path``."""
    path.write_text(dumps(config), encoding="utf-8")


def read(cls: type[AnyConfig], path: Path, base: AnyConfig | None = None) -> AnyConfig:
    """The config in a TOML file; keys that it omits are derived from those it sets, or taken from ``base``.

    Raises :class:`ConfigError`, naming file and line, for a file that is not TOML or not a valid ``cls``.
    """
    return parse(cls, _text(path), str(path), base)


def parse(cls: type[AnyConfig], text: str, name: str = "TOML", base: AnyConfig | None = None) -> AnyConfig:
    """The config in a TOML text, as :func:`read` does; ``name`` is used in messages."""
    values = _loads(text, name)
    if base is not None:
        base = with_derived(base, flatten(values))
    return _parse_table(cls, values, (), _key_lines(text), name, base)


def read_settings(path: Path) -> dict[str, object]:
    """The settings of a TOML file, by dotted names, not validated."""
    return flatten(_loads(_text(path), str(path)))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as why:
        reason = why.strerror if isinstance(why, OSError) else f"not UTF-8 text (byte {why.start})"
        raise ConfigError(f"{path} cannot be read: {reason}; use a TOML file of settings") from None


def _loads(text: str, name: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as why:
        parts = re.fullmatch(r"(?P<what>.*) \(at (?:line (?P<line>\d+), column \d+|end of document)\)", str(why))
        line = (parts and parts["line"]) or len(text.splitlines())
        raise ConfigError(f"{name}:{line}: not TOML: {(parts['what'] if parts else str(why)).lower()}") from None


def _parse_table(
    cls: type[AnyConfig],
    table: Mapping[str, Any],
    at: Key,
    lines: Mapping[Key, int],
    name: str,
    base: AnyConfig | None,
) -> AnyConfig:
    """Nested tables first, so that an error is reported for the table that contains the key."""
    values: dict[str, Any] = {}
    for key, value in table.items():
        inner = nested_model(cls, key)
        if inner is not None and issubclass(inner, Config) and isinstance(value, dict):
            nested = cast("dict[str, Any]", value)
            values[key] = _parse_table(inner, nested, (*at, key), lines, name, getattr(base, key, None))
        else:
            values[key] = value
    try:
        return cls(**values) if base is None else base.replace(**values)
    except ConfigError as why:
        # The message names the key; the table may be spread over the file.
        named = [key for key in table if re.search(rf"\b{re.escape(key)}\b", str(why))]
        line = lines.get((*at, named[0])) if named else lines.get(at)
        raise ConfigError(f"{name}:{line or 1}: {why}") from None


def _key_lines(text: str) -> dict[Key, int]:
    """The line of each key and table, found by a simple scan; used in messages only."""
    lines: dict[Key, int] = {}
    table: Key = ()
    for number, line in enumerate(text.splitlines(), 1):
        if header := re.match(r"\s*\[+([^\[\]]+)\]+", line):
            table = _split_key(header[1])
            lines.setdefault(table, number)
        elif assigned := re.match(r"\s*([\w\"'.\- ]+?)\s*=", line):
            lines.setdefault((*table, *_split_key(assigned[1])), number)
    return lines


def _split_key(dotted: str) -> Key:
    return tuple(part.strip().strip("\"'") for part in dotted.split("."))


Container = TypeVar("Container", tomlkit.TOMLDocument, Table)


def _add_fields(table: Container, config: Config) -> Container:
    """Add the fields of ``config``, plain keys first: keys after a nested table's header would belong to that table."""
    inner: dict[str, Config] = {}
    for name, field in type(config).model_fields.items():
        value = getattr(config, name)
        if isinstance(value, Config):
            inner[name] = value
        elif value is not None:
            item = tomlkit.item(str(value) if isinstance(value, PurePath) else value)
            table.add(name, item.comment(_one_line(field.description)) if field.description else item)
        elif field.default is not None:
            raise ConfigError(f"{type(config).__name__}.{name} is None, which TOML cannot represent; set a value")
    for name, value in inner.items():
        table.add(name, _add_fields(tomlkit.table(), value))
    return table


def _one_line(docstring: str) -> str:
    return " ".join(docstring.replace("``", "").split())
