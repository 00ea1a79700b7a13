"""Fields that follow from other fields unless they are given.

A config class lists its rules in ``RULES``: a field, the fields it follows, and a function of the config before and
after a change. ``Config.replace``, files laid over a preset and flags laid over both all go through :func:`derive`, so that
a new width means the same new head width, hidden width and expert width everywhere. Names are dotted paths within the
config (``moe.ffn_width``).

How the sizes of a model follow from one another when one of them is changed.

A ratio of the model at hand is kept: heads a key/value head, hidden units a feature, an expert's width beside the
feed-forward part's. The rules are :class:`~colonnade.config.model.ModelConfig`'s ``RULES``.
"""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast, get_args

from pydantic import BaseModel

AnyModel = TypeVar("AnyModel", bound=BaseModel)


UNCHANGED = object()
"""Returned by a rule that does not hold in the config at hand."""


@dataclass(frozen=True)
class DerivedField:
    """``field`` is computed anew when one of the fields in ``follows`` changes and ``field`` is not given."""

    field: str
    follows: tuple[str, ...]
    value: Callable[[Any, Any], object] = lambda was, now: UNCHANGED
    """The new value from the config before and (not validated) after the change; :data:`UNCHANGED` leaves the field."""
    shown: str = ""
    """For a field whose None means "follow": the property that holds the number."""


WIDTH_MULTIPLE = 16
"""Widths that are multiples of this stay so: tensor cores and float8 take them whole."""
MAX_SOURCE = 1 << 32
"""No size is larger."""


class DerivingModel(BaseModel):
    """A model whose fields may follow from one another."""

    RULES: ClassVar[tuple[DerivedField, ...]] = ()
    """In the order in which they apply: a later rule sees what an earlier one derived."""


AnyDerivingModel = TypeVar("AnyDerivingModel", bound=DerivingModel)


def derive(was: DerivingModel, given: Mapping[str, object]) -> dict[str, object]:
    """The fields that follow from the changes ``given`` to ``was``, by dotted name, with their new values."""
    found = _derive_sections(was, given)
    now = replace_paths(was, {**found, **given})
    for rule in type(was).RULES:
        changed = any(_get(was, source) != _get(now, source) for source in rule.follows)
        numbers = all(_is_valid_source(_get(now, source)) for source in rule.follows)
        if changed and numbers and not _is_given(rule.field, given):
            value = rule.value(was, now)
            if value is not UNCHANGED and value != _get(was, rule.field):
                found[rule.field] = value
                now = replace_paths(now, {rule.field: value})
    return found | _derive_sections(was, {**found, **given})


def _derive_sections(was: DerivingModel, given: Mapping[str, object]) -> dict[str, object]:
    found: dict[str, object] = {}
    for name, section in _sections(was).items():
        inner = derive(section, _section_changes(given, name))
        found |= {f"{name}.{field}": value for field, value in inner.items()}
    return found


def with_derived(was: AnyDerivingModel, given: Mapping[str, object]) -> AnyDerivingModel:
    """``was`` with the changes ``given`` and all that follows from them, not validated."""
    return replace_paths(was, {**given, **derive(was, given)})


def describe_derived(was: DerivingModel, now: DerivingModel, given: Collection[str], prefix: str = "") -> list[str]:
    """``"model.ffn_width 2112"`` for each field of ``now`` that is not among ``given`` and followed another one."""
    found: list[str] = []
    for name, section in _sections(now).items():
        before = getattr(was, name)
        if isinstance(before, DerivingModel):
            found += describe_derived(before, section, given, f"{prefix}{name}.")
    for rule in type(now).RULES:
        old, new = (_get(config, rule.shown or rule.field) for config in (was, now))
        if new and old != new and any(_get(was, source) != _get(now, source) for source in rule.follows):
            if f"{prefix}{rule.field}" not in given:
                found.append(
                    f"{prefix}{rule.field} {new:g}" if isinstance(new, float) else f"{prefix}{rule.field} {new}"
                )
    return found


def replace_paths(config: AnyModel, changes: Mapping[str, object]) -> AnyModel:
    """A copy of ``config`` with the fields named by dotted paths changed, not validated."""
    values = {name: value for name, value in changes.items() if "." not in name}
    for name in {path.partition(".")[0] for path in changes if "." in path}:
        section = values.get(name, getattr(config, name, None))
        kind = nested_model(type(config), name)
        if section is None and kind is not None:
            section = kind.model_construct(None)
        if isinstance(section, BaseModel):
            values[name] = replace_paths(section, _section_changes(changes, name))
    return type(config).model_construct(None, **(dict(config) | values))


def flatten(table: Mapping[str, Any], prefix: str = "") -> dict[str, object]:
    """Nested tables as one, by dotted names."""
    found: dict[str, object] = {}
    for name, value in table.items():
        if isinstance(value, dict):
            found |= flatten(cast("dict[str, Any]", value), f"{prefix}{name}.")
        else:
            found[prefix + name] = value
    return found


def nested_model(kind: type[BaseModel], name: str) -> type[BaseModel] | None:
    """The config class that a field of ``kind`` holds, perhaps optionally; None for any other field."""
    if name not in kind.model_fields:
        return None
    annotation = kind.model_fields[name].annotation
    kinds = [one for one in (annotation, *get_args(annotation)) if isinstance(one, type)]
    return next((one for one in kinds if issubclass(one, BaseModel)), None)


def _sections(config: BaseModel) -> dict[str, DerivingModel]:
    values = {name: getattr(config, name) for name in type(config).model_fields}
    return {name: value for name, value in values.items() if isinstance(value, DerivingModel)}


def _section_changes(changes: Mapping[str, object], section: str) -> dict[str, object]:
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


def scale_width(size: int, was: int, now: int) -> int:
    """``size`` · ``now`` / ``was``, rounded up to a multiple of gcd(``size``, :data:`WIDTH_MULTIPLE`)."""
    "common."
    step = math.gcd(size, WIDTH_MULTIPLE)
    return -(-size * now // (was * step)) * step


def _is_valid_source(value: object) -> bool:
    """False for a value that validation will refuse: nothing can follow from it."""
    return value is None or isinstance(value, BaseModel) or (isinstance(value, int | float) and 0 < value < MAX_SOURCE)


if TYPE_CHECKING:
    from colonnade.config.model import ModelConfig


def divisors(n: int) -> list[int]:
    """The divisors of ``n``, ascending."""
    low = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return low + [n // d for d in reversed(low) if d * d != n]


WITH_EXPERTS: dict[str, str] = {"llama": "mixtral", "mistral": "mixtral", "qwen3": "qwen3_moe"}
"""As what a dense family's models can be saved for Hugging Face when they have experts; others keep their name."""


def _family(was: "ModelConfig", now: "ModelConfig") -> object:
    if now.moe is not None:
        return WITH_EXPERTS.get(now.family, UNCHANGED) if was.moe is None else UNCHANGED
    dense = [one for one, family in WITH_EXPERTS.items() if family == now.family]
    return next((one for one in dense if (one == "mistral") == (now.window is not None)), UNCHANGED)


def _kv_heads(was: "ModelConfig", now: "ModelConfig") -> object:
    """As many query heads a key/value head as before, or a few more where they do not divide."""
    most = max(1, now.heads // was.group)
    return max(d for d in divisors(now.heads) if d <= most)


def _head_width(was: "ModelConfig", _: "ModelConfig") -> object:
    """0, which means width / heads, where that was so before (Qwen3's and DeepSeek's heads have their own width)."""
    return 0 if was.head_width * was.heads == was.width else UNCHANGED


def _ffn_width(was: "ModelConfig", now: "ModelConfig") -> object:
    return scale_width(was.ffn_width, was.width, now.width)


def _expert_width(was: "ModelConfig", now: "ModelConfig") -> object:
    """In proportion to ffn_width where the two are equal or no layer is dense; otherwise to width."""
    if was.moe is None or now.moe is None:
        return UNCHANGED if now.moe is None else now.ffn_width
    beside_dense = was.expert_layers < was.layers and was.moe.ffn_width != was.ffn_width
    source = "width" if beside_dense else "ffn_width"
    return scale_width(was.moe.ffn_width, getattr(was, source), getattr(now, source))


def _first_expert_layer(was: "ModelConfig", now: "ModelConfig") -> object:
    """Some layer has experts, where one had."""
    return UNCHANGED if was.moe is None or now.moe is None else min(was.moe.first, now.layers - 1)


MODEL_DERIVED_FIELDS = (
    DerivedField("family", ("moe",), _family),
    DerivedField("kv_heads", ("heads",), _kv_heads),
    DerivedField("head_width", ("width", "heads"), _head_width),
    DerivedField("ffn_width", ("width",), _ffn_width),
    DerivedField("moe.first", ("layers",), _first_expert_layer),
    DerivedField("moe.ffn_width", ("moe", "width", "ffn_width"), _expert_width),
)
