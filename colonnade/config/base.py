"""The base class of all configurations: frozen, typed, validated by pydantic; and helpers for messages.

A validation error becomes one line. It names the nearest known key, because the most common mistake is a misspelt key.
"""

import difflib
import math
from collections.abc import Collection
from pathlib import PurePath
from typing import Any, ClassVar, Self, cast, get_args

from pydantic import ConfigDict, ValidationError, model_validator

from colonnade.config.derive import DerivingModel, derive
from colonnade.errors import ConfigError

MAX_INT = (1 << 63) - 1
"""The largest integer setting: tensors hold 64 bits."""
MAX_FLOAT = 1e15
"""The largest float setting: products of a few of them stay finite in float32."""
MAX_DIM = 1 << 31
"""The largest dimension of a tensor."""


def did_you_mean(name: str, known: list[str]) -> str:
    """``"; did you mean 'layers'?"`` for the closest of ``known``, or the list itself when none is close."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean '{close[0]}'?" if close else f"; known: {', '.join(known)}"


def short_repr(value: object) -> str:
    """``repr(value)`` in one line of at most 80 characters."""
    return " ".join(repr(value).split())[:80]


def check_choice(name: str, value: object, kind: object) -> None:
    """Raise :class:`ConfigError` unless ``value`` is one of the Literal type ``kind``."""
    known = get_args(kind)
    if not any(isinstance(value, type(one)) and value == one for one in known):
        *others, last = (repr(one) for one in known)
        raise ConfigError(f"{name} is {short_repr(value)}; it must be {', '.join(others)} or {last}")


def dtype_name(value: object) -> object:
    """``"bfloat16"`` for ``torch.bfloat16``; any other value unchanged."""
    name = str(value)
    return name.removeprefix("torch.") if name.startswith("torch.") else value


FILE_SUFFIXES = (
    ".gguf", ".ggml", ".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".onnx", ".npz", ".h5", ".msgpack", ".tflite",
    ".json", ".jsonl", ".ndjson", ".txt", ".md", ".csv", ".parquet", ".arrow", ".toml", ".yaml", ".zip", ".tar", ".gz",
)  # fmt: skip
"""Suffixes of known file formats."""


def file_suffix(path: PurePath) -> str:
    """The suffix if it is that of a known file format, such as ".gguf"; "" for a path that may be a folder."""
    suffix = path.suffix.lower()
    return suffix if suffix in FILE_SUFFIXES else ""


def plural(number: int, noun: str) -> str:
    """``"1 document"``, ``"2,717 documents"``."""
    return f"{number:,} {noun}" + ("" if number == 1 else "es" if noun.endswith("s") else "s")


def format_bytes(n: int) -> str:
    """``"1.25 GiB"``."""
    number, unit = float(n), "bytes"
    for larger in ("KiB", "MiB", "GiB"):
        if number < 1024:
            break
        number, unit = number / 1024, larger
    return f"{number:.4g} {unit}"


class Config(DerivingModel):
    """A frozen record; :meth:`replace` makes a changed copy."""

    MAY_BE_INFINITE: ClassVar[tuple[str, ...]] = ()
    """Fields that accept infinity."""
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True)

    def __init__(self, **values: Any):
        try:
            super().__init__(**values)
        except ValidationError as report:
            raise ConfigError(_summarise(type(self), report)) from None

    @model_validator(mode="after")
    def _within_bounds(self) -> Self:
        """Refuse absurd numbers before anything computes with them."""
        for name in type(self).model_fields:
            value = getattr(self, name)
            for one in cast("tuple[object, ...]", value) if isinstance(value, tuple) else (value,):
                problem = f"{type(self).__name__}.{name} is {short_repr(one)}: "
                if isinstance(one, int) and abs(one) > MAX_INT:
                    raise ConfigError(f"{problem}no setting may exceed {MAX_INT:,}; lower it")
                if isinstance(one, float) and not abs(one) <= MAX_FLOAT:
                    if name in self.MAY_BE_INFINITE and one == math.inf:
                        continue
                    raise ConfigError(f"{problem}it must be a finite number of {MAX_FLOAT:g} or less")
        return self

    def replace(self, **changes: Any) -> Self:
        """A validated copy with these fields replaced and dependent fields derived (:mod:`colonnade.config.derive`).

        A section that is passed whole (``moe=...``) is used unchanged.
        """
        values: dict[str, Any] = dict(iter(self)) | changes  # dict(self) would call a field named keys
        sections: dict[str, dict[str, object]] = {}
        for path, value in derive(self, changes).items():
            section, _, field = path.rpartition(".")
            sections.setdefault(section, {})[field] = value
        values |= sections.pop("", {})
        values |= {section: values[section].replace(**fields) for section, fields in sections.items()}
        return type(self)(**values)


def differences(was: Config, now: Config, ignore: Collection[str] = (), prefix: str = "") -> list[str]:
    """``"train.lr: 0.0003 -> 0.0001"`` for each field that differs and is not in ``ignore``."""
    lines: list[str] = []
    for name in type(now).model_fields:
        old, new = getattr(was, name), getattr(now, name)
        if name in ignore or old == new:
            continue
        if isinstance(old, Config) and isinstance(new, Config):
            lines += differences(old, new, prefix=f"{prefix}{name}.")
        else:
            lines.append(f"{prefix}{name}: {_format_value(old)} -> {_format_value(new)}")
    return lines


def _format_value(value: object) -> str:
    """A field's value; of a section, only the fields that differ from their defaults."""
    if not isinstance(value, Config):
        return "none" if value is None or value == "" else str(value)
    fields = type(value).model_fields
    set_fields = {name: getattr(value, name) for name in fields if getattr(value, name) != fields[name].default}
    return "(" + " ".join(f"{name}={_format_value(one)}" for name, one in set_fields.items()) + ")"


def _summarise(cls: type[Config], report: ValidationError) -> str:
    parts: list[str] = []
    for error in report.errors():
        where = ".".join(str(step) for step in error["loc"])
        if error["type"] == "extra_forbidden":
            parts.append(f"{cls.__name__} has no key '{where}'" + did_you_mean(where, list(cls.model_fields)))
        elif error["type"] == "missing":
            parts.append(f"{cls.__name__} needs '{where}'")
        elif error["type"] == "value_error":
            parts.append(str(error.get("ctx", {})["error"]))
        else:
            got = repr(error["input"])
            parts.append(f"{cls.__name__}.{where} is {got[:80]}: {error['msg'].lower()}")
    return "; ".join(parts)
