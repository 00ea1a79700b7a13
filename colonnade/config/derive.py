"""Fields that follow from other fields unless they are given.

A config class lists its rules in ``RULES``: a field, the fields it follows, and a function of the config before and
after a change. ``Config.but``, files laid over a preset and flags laid over both all go through :func:`derive`, so that
a new width means the same new head width, hidden width and expert width everywhere. Names are dotted paths within the
config (``moe.ffn_width``).
"""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar, cast, get_args

from pydantic import BaseModel

AnyModel = TypeVar("AnyModel", bound=BaseModel)


KEEP = object()
"""Returned by a rule that does not hold in the config at hand."""


@dataclass(frozen=True)
class Rule:
    """``field`` is computed anew when one of the fields in ``follows`` changes and ``field`` is not given."""

    field: str
    follows: tuple[str, ...]
    value: Callable[[Any, Any], object] = lambda was, now: KEEP
    """The new value from the config before and (not validated) after the change; :data:`KEEP` leaves the field."""
    shown: str = ""
    """For a field whose None means "follow": the property that holds the number."""


EVEN = 16
"""Widths that are multiples of this stay so: tensor cores and float8 take them whole."""
LARGEST = 1 << 32
"""No size is larger."""


class HasRules(BaseModel):
    """A model whose fields may follow from one another."""

    RULES: ClassVar[tuple[Rule, ...]] = ()
    """In the order in which they apply: a later rule sees what an earlier one derived."""


AnyRules = TypeVar("AnyRules", bound=HasRules)


def derive(was: HasRules, given: Mapping[str, object]) -> dict[str, object]:
    """The fields that follow from the changes ``given`` to ``was``, by dotted name, with their new values."""
    found = _derive_sections(was, given)
    now = replaced(was, {**found, **given})
    for rule in type(was).RULES:
        changed = any(_get(was, source) != _get(now, source) for source in rule.follows)
        numbers = all(_is_sound(_get(now, source)) for source in rule.follows)
        if changed and numbers and not _is_given(rule.field, given):
            value = rule.value(was, now)
            if value is not KEEP and value != _get(was, rule.field):
                found[rule.field] = value
                now = replaced(now, {rule.field: value})
    return found | _derive_sections(was, {**found, **given})


def _derive_sections(was: HasRules, given: Mapping[str, object]) -> dict[str, object]:
    found: dict[str, object] = {}
    for name, section in _sections(was).items():
        inner = derive(section, _within(given, name))
        found |= {f"{name}.{field}": value for field, value in inner.items()}
    return found


def follow(was: AnyRules, given: Mapping[str, object]) -> AnyRules:
    """``was`` with the changes ``given`` and all that follows from them, not validated."""
    return replaced(was, {**given, **derive(was, given)})


def followed(was: HasRules, now: HasRules, given: Collection[str], prefix: str = "") -> list[str]:
    """``"model.ffn_width 2112"`` for each field of ``now`` that is not among ``given`` and followed another one."""
    found: list[str] = []
    for name, section in _sections(now).items():
        before = getattr(was, name)
        if isinstance(before, HasRules):
            found += followed(before, section, given, f"{prefix}{name}.")
    for rule in type(now).RULES:
        old, new = (_get(config, rule.shown or rule.field) for config in (was, now))
        if new and old != new and any(_get(was, source) != _get(now, source) for source in rule.follows):
            if f"{prefix}{rule.field}" not in given:
                found.append(
                    f"{prefix}{rule.field} {new:g}" if isinstance(new, float) else f"{prefix}{rule.field} {new}"
                )
    return found


def replaced(config: AnyModel, changes: Mapping[str, object]) -> AnyModel:
    """A copy of ``config`` with the fields named by dotted paths changed, not validated."""
    values = {name: value for name, value in changes.items() if "." not in name}
    for name in {path.partition(".")[0] for path in changes if "." in path}:
        section = values.get(name, getattr(config, name, None))
        kind = section_of(type(config), name)
        if section is None and kind is not None:
            section = kind.model_construct(None)
        if isinstance(section, BaseModel):
            values[name] = replaced(section, _within(changes, name))
    return type(config).model_construct(None, **(dict(config) | values))


def flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, object]:
    """Nested tables as one, by dotted names."""
    found: dict[str, object] = {}
    for name, value in table.items():
        if isinstance(value, dict):
            found |= flat(cast("dict[str, Any]", value), f"{prefix}{name}.")
        else:
            found[prefix + name] = value
    return found


def section_of(kind: type[BaseModel], name: str) -> type[BaseModel] | None:
    """The config class that a field of ``kind`` holds, perhaps optionally; None for any other field."""
    if name not in kind.model_fields:
        return None
    annotation = kind.model_fields[name].annotation
    kinds = [one for one in (annotation, *get_args(annotation)) if isinstance(one, type)]
    return next((one for one in kinds if issubclass(one, BaseModel)), None)


def _sections(config: BaseModel) -> dict[str, HasRules]:
    values = {name: getattr(config, name) for name in type(config).model_fields}
    return {name: value for name, value in values.items() if isinstance(value, HasRules)}


def _within(changes: Mapping[str, object], section: str) -> dict[str, object]:
    """The changes inside one section, by their names there."""
    return {path[len(section) + 1 :]: value for path, value in changes.items() if path.startswith(f"{section}.")}


def _is_given(field: str, given: Mapping[str, object]) -> bool:
    """Whether ``field``, or a section that holds it, is among the changes."""
    return any(field == name or field.startswith(f"{name}.") for name in given)


def _get(config: object, path: str) -> object:
    """The value at a dotted path; None where a section on the way is absent."""
    for name in path.split("."):
        config = getattr(config, name, None)
    return config


def in_proportion(size: int, was: int, now: int) -> int:
    """``size`` · ``now`` / ``was``, rounded up to a multiple of what :data:`EVEN` and ``size`` have in common."""
    step = math.gcd(size, EVEN)
    return -(-size * now // (was * step)) * step


def _is_sound(value: object) -> bool:
    """False for a value that validation will refuse: nothing can follow from it."""
    return value is None or isinstance(value, BaseModel) or (isinstance(value, int | float) and 0 < value < LARGEST)
