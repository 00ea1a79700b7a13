"""The base of every configuration: frozen, typed, and helpful when it refuses.

Pydantic validates; this file turns its report into one line with the nearest known name, because the commonest
mistake is a misspelt key and the commonest cure is to read the right one.
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
"""No setting is a larger whole number: tensors hold 64 bits."""
MAX_FLOAT = 1e15
"""No setting is a larger number: products of a few of them stay finite in float32."""
MAX_DIM = 1 << 31
"""No dimension of a tensor is larger."""


def did_you_mean(name: str, known: list[str]) -> str:
    """``"; did you mean 'layers'?"`` for the closest of ``known``, or the list itself when none is close."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean '{close[0]}'?" if close else f"; known: {', '.join(known)}"


def short_repr(value: object) -> str:
    """What somebody gave, in one line of 80 characters at most."""
    return " ".join(repr(value).split())[:80]


def check_choice(name: str, value: object, kind: object) -> None:
    """Raise :class:`ConfigError` for a ``value`` that is none of those of the Literal ``kind``."""
    known = get_args(kind)
    if not any(isinstance(value, type(one)) and value == one for one in known):
        *others, last = (repr(one) for one in known)
        raise ConfigError(f"{name} is {short_repr(value)}; it must be {', '.join(others)} or {last}")


def dtype_name(value: object) -> object:
    """``"bfloat16"`` for ``torch.bfloat16``; anything else as it is."""
    name = str(value)
    return name.removeprefix("torch.") if name.startswith("torch.") else value


FILE_SUFFIXES = (
    ".gguf", ".ggml", ".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".onnx", ".npz", ".h5", ".msgpack", ".tflite",
    ".json", ".jsonl", ".ndjson", ".txt", ".md", ".csv", ".parquet", ".arrow", ".toml", ".yaml", ".zip", ".tar", ".gz",
)  # fmt: skip
"""Endings of names that mean one file of some format."""


def file_suffix(path: PurePath) -> str:
    """The ending of a name that means one file, such as ".gguf", or "" for what may be a folder."""
    suffix = path.suffix.lower()
    return suffix if suffix in FILE_SUFFIXES else ""


def plural(number: int, what: str) -> str:
    """``"1 document"``, ``"2,717 documents"``."""
    return f"{number:,} {what}" + ("" if number == 1 else "es" if what.endswith("s") else "s")


def format_bytes(n: int) -> str:
    """``1.25 GiB``."""
    number, unit = float(n), "bytes"
    for larger in ("KiB", "MiB", "GiB"):
        if number < 1024:
            break
        number, unit = number / 1024, larger
    return f"{number:.4g} {unit}"


class Config(DerivingModel):
    """A frozen record. A change is a new object (:meth:`replace`); fields that follow from others: ``RULES``."""

    MAY_BE_INFINITE: ClassVar[tuple[str, ...]] = ()
    """Fields for which infinity means something."""
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True)

    def __init__(self, **values: Any):
        try:
            super().__init__(**values)
        except ValidationError as report:
            raise ConfigError(_summarise(type(self), report)) from None

    @model_validator(mode="after")
    def _within_bounds(self) -> Self:
        """Refuse numbers that no setting can mean, before anything computes with them."""
        for name in type(self).model_fields:
            value = getattr(self, name)
            for one in cast("tuple[object, ...]", value) if isinstance(value, tuple) else (value,):
                said = f"{type(self).__name__}.{name} is {short_repr(one)}: "
                if isinstance(one, int) and abs(one) > MAX_INT:
                    raise ConfigError(f"{said}no setting goes beyond {MAX_INT:,}; lower it")
                if isinstance(one, float) and not abs(one) <= MAX_FLOAT:
                    if name in self.MAY_BE_INFINITE and one == math.inf:
                        continue
                    raise ConfigError(f"{said}it must be a finite number of {MAX_FLOAT:g} or less")
        return self

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields changed, and with those that follow from them (``RULES``); validated as a new one.

        A section that is given whole (``moe=...``) is kept as it is.
        """
        values: dict[str, Any] = dict(self) | changes
        within: dict[str, dict[str, object]] = {}
        for path, value in derive(self, changes).items():
            section, _, field = path.rpartition(".")
            within.setdefault(section, {})[field] = value
        values |= within.pop("", {})
        values |= {section: values[section].replace(**fields) for section, fields in within.items()}
        return type(self)(**values)


def differences(was: Config, now: Config, leave: Collection[str] = (), prefix: str = "") -> list[str]:
    """``"train.lr: 0.0003 -> 0.0001"`` for each field that differs, but those to ``leave``; sections field by field."""
    found: list[str] = []
    for name in type(now).model_fields:
        old, new = getattr(was, name), getattr(now, name)
        if name in leave or old == new:
            continue
        if isinstance(old, Config) and isinstance(new, Config):
            found += differences(old, new, prefix=f"{prefix}{name}.")
        else:
            found.append(f"{prefix}{name}: {_format_value(old)} -> {_format_value(new)}")
    return found


def _format_value(value: object) -> str:
    """A field's value; of a section that the other config lacks, what is not as by default."""
    if not isinstance(value, Config):
        return "none" if value is None else str(value)
    fields = type(value).model_fields
    own = {name: getattr(value, name) for name in fields if getattr(value, name) != fields[name].default}
    return "(" + " ".join(f"{name}={_format_value(one)}" for name, one in own.items()) + ")"


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
