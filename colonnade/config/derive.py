"""Fields with values that follow from other fields when these change.

A config class lists them in ``DERIVED_FIELDS``: the field, its source fields, and a function of the config before and
after the change. ``Config.replace``, TOML files read on top of a preset and command-line flags all call :func:`derive`,
so a new width gives the same head width, hidden width and expert width in each of them. A field that the caller sets
explicitly is never derived. Names are dotted paths within the config (``moe.ffn_width``).

The rules of :class:`~colonnade.config.model.ModelConfig` keep the model's ratios: query heads per key/value head,
feed-forward width per model width, expert width per feed-forward width.
"""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast, get_args

from pydantic import BaseModel

if TYPE_CHECKING:
    from colonnade.config.model import ModelConfig

AnyModel = TypeVar("AnyModel", bound=BaseModel)

UNCHANGED = object()
"""Returned by a rule to leave its field unchanged."""
WIDTH_MULTIPLE = 16
"""A width that is a multiple of this stays one: tensor cores and float8 need it."""
MAX_SOURCE = 1 << 32
"""Nothing is derived from a larger number; validation refuses it."""


@dataclass(frozen=True)
class DerivedField:
    """``field`` is recomputed when one of ``sources`` changes and ``field`` itself is not set."""

    field: str
    sources: tuple[str, ...]
    compute: Callable[[Any, Any], object] = lambda was, now: UNCHANGED
    """The new value, from the config before and (not yet validated) after the change, or :data:`UNCHANGED`."""
    resolved_by: str = ""
    """For a field whose None means "derive it": the property that returns the number."""


class DerivingModel(BaseModel):
    """A pydantic model with some fields derived from others."""

    DERIVED_FIELDS: ClassVar[tuple[DerivedField, ...]] = ()
    """In the order in which they are computed: a later rule sees what an earlier one derived."""


AnyDerivingModel = TypeVar("AnyDerivingModel", bound=DerivingModel)


def derive(was: DerivingModel, changes: Mapping[str, object]) -> dict[str, object]:
    """The fields that must change together with ``changes``, by dotted name, with their new values."""
    derived = _derive_sections(was, changes)
    now = replace_paths(was, {**derived, **changes})
    for rule in type(was).DERIVED_FIELDS:
        changed = any(_get(was, source) != _get(now, source) for source in rule.sources)
        valid = all(_is_valid_source(_get(now, source)) for source in rule.sources)
        if changed and valid and not _is_set(rule.field, changes):
            value = rule.compute(was, now)
            if value is not UNCHANGED and value != _get(was, rule.field):
                derived[rule.field] = value
                now = replace_paths(now, {rule.field: value})
    return derived | _derive_sections(was, {**derived, **changes})


def _derive_sections(was: DerivingModel, changes: Mapping[str, object]) -> dict[str, object]:
    derived: dict[str, object] = {}
    for name, section in _sections(was).items():
        inner = derive(section, _section_changes(changes, name))
        derived |= {f"{name}.{field}": value for field, value in inner.items()}
    return derived


def with_derived(was: AnyDerivingModel, changes: Mapping[str, object]) -> AnyDerivingModel:
    """``was`` with ``changes`` and the fields derived from them, not validated."""
    return replace_paths(was, {**changes, **derive(was, changes)})


def describe_derived(was: DerivingModel, now: DerivingModel, explicit: Collection[str], prefix: str = "") -> list[str]:
    """``"model.ffn_width 2112"`` for each derived field of ``now`` that changed and is not among ``explicit``."""
    lines: list[str] = []
    for name, section in _sections(now).items():
        before = getattr(was, name)
        if isinstance(before, DerivingModel):
            lines += describe_derived(before, section, explicit, f"{prefix}{name}.")
    for rule in type(now).DERIVED_FIELDS:
        old, new = (_get(config, rule.resolved_by or rule.field) for config in (was, now))
        changed = any(_get(was, source) != _get(now, source) for source in rule.sources)
        if new and old != new and changed and f"{prefix}{rule.field}" not in explicit:
            lines.append(f"{prefix}{rule.field} {new:g}" if isinstance(new, float) else f"{prefix}{rule.field} {new}")
    return lines


def replace_paths(config: AnyModel, changes: Mapping[str, object]) -> AnyModel:
    """A copy of ``config`` with the fields at these dotted paths replaced, not validated."""
    values = {name: value for name, value in changes.items() if "." not in name}
    for name in {path.partition(".")[0] for path in changes if "." in path}:
        section = values.get(name, getattr(config, name, None))
        kind = nested_model(type(config), name)
        if section is None and kind is not None:
            section = kind.model_construct(None)
        if isinstance(section, BaseModel):
            values[name] = replace_paths(section, _section_changes(changes, name))
    return type(config).model_construct(None, **(dict(iter(config)) | values))  # pyrefly: ignore[missing-attribute]


def flatten(table: Mapping[str, Any], prefix: str = "") -> dict[str, object]:
    """Nested tables as one dict with dotted names."""
    flat: dict[str, object] = {}
    for name, value in table.items():
        if isinstance(value, dict):
            flat |= flatten(cast("dict[str, Any]", value), f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat


def nested_model(kind: type[BaseModel], name: str) -> type[BaseModel] | None:
    """The config class of a field of ``kind``, optional or not; None for a field of a different type."""
    if name not in kind.model_fields:
        return None
    annotation = kind.model_fields[name].annotation
    types = [one for one in (annotation, *get_args(annotation)) if isinstance(one, type)]
    return next((one for one in types if issubclass(one, BaseModel)), None)


def _sections(config: BaseModel) -> dict[str, DerivingModel]:
    values = {name: getattr(config, name) for name in type(config).model_fields}
    return {name: value for name, value in values.items() if isinstance(value, DerivingModel)}


def _section_changes(changes: Mapping[str, object], section: str) -> dict[str, object]:
    """The changes inside one section, with the section's name removed."""
    return {path[len(section) + 1 :]: value for path, value in changes.items() if path.startswith(f"{section}.")}


def _is_set(field: str, changes: Mapping[str, object]) -> bool:
    """Whether ``changes`` set ``field`` or a section that contains it."""
    return any(field == name or field.startswith(f"{name}.") for name in changes)


def _get(config: object, path: str) -> object:
    """The value at a dotted path; None if a section on the path is absent."""
    for name in path.split("."):
        config = getattr(config, name, None)
    return config


def _is_valid_source(value: object) -> bool:
    """False for a value that validation will refuse."""
    return value is None or isinstance(value, BaseModel) or (isinstance(value, int | float) and 0 < value < MAX_SOURCE)


def scale_width(width: int, was: int, now: int) -> int:
    """``width`` · ``now`` / ``was``, rounded up to a multiple of gcd(``width``, :data:`WIDTH_MULTIPLE`)."""
    step = math.gcd(width, WIDTH_MULTIPLE)
    return -(-width * now // (was * step)) * step


def divisors(n: int) -> list[int]:
    """The divisors of ``n``, ascending."""
    low = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return low + [n // d for d in reversed(low) if d * d != n]


MOE_FAMILIES: dict[str, str] = {"llama": "mixtral", "mistral": "mixtral", "qwen3": "qwen3_moe"}
"""The Hugging Face family of a dense family's model once it has experts; other families keep their name."""


def _family(was: "ModelConfig", now: "ModelConfig") -> object:
    if now.moe is not None:
        return MOE_FAMILIES.get(now.family, UNCHANGED) if was.moe is None else UNCHANGED
    dense = [one for one, family in MOE_FAMILIES.items() if family == now.family]
    return next((one for one in dense if (one == "mistral") == (now.window is not None)), UNCHANGED)


def _kv_heads(was: "ModelConfig", now: "ModelConfig") -> object:
    """As many query heads per key/value head as before; a few more if that does not divide."""
    limit = max(1, now.heads // was.group)
    return max(d for d in divisors(now.heads) if d <= limit)


def _head_width(was: "ModelConfig", _: "ModelConfig") -> object:
    """0, which means width / heads, if that held before; Qwen3 and DeepSeek set the width of heads separately."""
    return 0 if was.head_width * was.heads == was.width else UNCHANGED


def _ffn_width(was: "ModelConfig", now: "ModelConfig") -> object:
    return scale_width(was.ffn_width, was.width, now.width)


def _expert_width(was: "ModelConfig", now: "ModelConfig") -> object:
    """Scaled with ffn_width if the two are equal or no layer is dense, otherwise with width."""
    if was.moe is None or now.moe is None:
        return UNCHANGED if now.moe is None else now.ffn_width
    beside_dense = was.expert_layers < was.layers and was.moe.ffn_width != was.ffn_width
    source = "width" if beside_dense else "ffn_width"
    return scale_width(was.moe.ffn_width, getattr(was, source), getattr(now, source))


def _first_expert_layer(was: "ModelConfig", now: "ModelConfig") -> object:
    """At least one layer still has experts."""
    return UNCHANGED if was.moe is None or now.moe is None else min(was.moe.first_k_dense_replace, now.layers - 1)


MODEL_DERIVED_FIELDS = (
    DerivedField("family", ("moe",), _family),
    DerivedField("kv_heads", ("heads",), _kv_heads),
    DerivedField("head_width", ("width", "heads"), _head_width),
    DerivedField("ffn_width", ("width",), _ffn_width),
    DerivedField("moe.first_k_dense_replace", ("layers",), _first_expert_layer),
    DerivedField("moe.ffn_width", ("moe", "width", "ffn_width"), _expert_width),
)
