"""RoPE settings of config.json: ``rope_parameters`` (transformers 5), ``rope_theta`` and ``rope_scaling`` (4).

Implemented are none, linear (Chen 2023), llama3 (the Llama 3.1 report) and yarn (Peng 2023, arXiv 2309.00071).
``dynamic`` and ``longrope`` change the frequencies with the length of the text; cached keys were rotated with the old
ones, so a long forward pass and token-by-token decoding disagree. They are refused with a remedy.
"""

from typing import Any

from colonnade.checkpoint.hf.family import ConfigKeys
from colonnade.config import ModelConfig, RopeScaling
from colonnade.errors import CheckpointError

ORIGINAL = "original_max_position_embeddings"
FIELDS: dict[str, dict[str, str]] = {
    kind: {name: ORIGINAL if name == "original_context" else name for name in names.split()}
    for kind, names in {
        "linear": "factor",
        "llama3": "factor original_context low_freq_factor high_freq_factor",
        "yarn": "factor original_context beta_fast beta_slow attention_factor mscale mscale_all_dim truncate",
    }.items()
}
"""Our field names to theirs, for each kind."""
REFUSED = {
    "dynamic": "its frequencies change with the length of the text, so cached keys become invalid; "
    "use rope_type 'yarn' with the same factor (and fine-tune, or check the perplexity)",
    "longrope": "it switches frequencies at the original context length, so cached keys become invalid; "
    "use a checkpoint of the same model with 'llama3' or 'yarn' scaling",
}
OTHER_KEYS = {"type", "rope_type", "rope_theta", "partial_rotary_factor", "finetuned"}
"""Read elsewhere, or without effect (Yarn-Llama's mark of fine-tuning)."""
NULLABLE = {"attention_factor", "mscale", "mscale_all_dim", "factor", "beta_fast", "beta_slow"}
"""Settings that transformers computes or sets to its default when they are null."""
TABLES = ("rope_scaling", "rope_parameters")
WHOLE_HEAD = "only rotation of the whole head is implemented"


def rope_from_hf(keys: ConfigKeys, context: int, *, theta: float) -> dict[str, Any]:
    """Reads the fields ``rope_theta``, ``rope_scaling`` and ``context`` of a :class:`ModelConfig`.

    ``context`` is max_position_embeddings [tokens]. Qwen's recipe for yarn leaves it at the original value; then the
    extended one is returned. ``theta`` is the default RoPE base. Raises :class:`CheckpointError` for settings that are
    not implemented or contradict each other.
    """
    keys.must_be("partial_rotary_factor", 1.0, WHOLE_HEAD)
    tables = {name: table for name in TABLES if (table := _table(keys, name))}
    bases = {"rope_theta": keys.number("rope_theta", theta)} if "rope_theta" in keys.raw else {}
    bases |= {f"{name}.rope_theta": table["rope_theta"] for name, table in tables.items() if "rope_theta" in table}
    scalings = {name: _scaling(keys, name, table, context) for name, table in tables.items()}
    _check_equal(keys, bases)
    _check_equal(keys, scalings)
    base = next(iter(bases.values()), theta)
    return {"rope_theta": base} | next(iter(scalings.values()), {"context": context})


def _check_equal(keys: ConfigKeys, settings: dict[str, Any]) -> None:
    """Refuses the file when two of its values for the same setting differ."""
    names = list(settings)
    for name in names[1:]:
        if settings[name] != settings[names[0]]:
            raise CheckpointError(
                f"{keys.file} contradicts itself: '{names[0]}' gives {settings[names[0]]} and '{name}' gives "
                f"{settings[name]}; remove one of them"
            )


def _table(keys: ConfigKeys, name: str) -> dict[str, Any]:
    table = keys.take(name, {}, null={})
    if not isinstance(table, dict) or any(isinstance(value, dict) for value in table.values()):
        raise keys.refuse(name, "one set of RoPE settings for all layers was expected")
    if table.get("partial_rotary_factor", 1.0) != 1.0:
        raise keys.refuse(name, WHOLE_HEAD)
    if len({str(table[key]) for key in ("type", "rope_type") if key in table}) > 1:
        raise keys.refuse(name, "its 'type' and 'rope_type' differ; remove one of them")
    return table


def _scaling(keys: ConfigKeys, name: str, table: dict[str, Any], context: int) -> dict[str, Any]:
    """Reads ``rope_scaling`` and ``context`` from one of :data:`TABLES`."""
    kind = table.get("rope_type", table.get("type", "default"))
    if kind != "default" and (not isinstance(kind, str) or kind not in FIELDS):
        known_kinds = f"supported kinds: default, {', '.join(FIELDS)}"
        raise keys.refuse(name, REFUSED.get("longrope" if kind == "su" else str(kind), known_kinds))
    known = FIELDS.get(kind, {})
    if unknown := table.keys() - set(known.values()) - OTHER_KEYS:
        raise keys.refuse(name, f"the setting '{min(unknown)}' of kind '{kind}' is not supported")
    if nulls := [key for key in table if table[key] is None and key not in NULLABLE]:
        raise keys.refuse(name, f"its setting '{nulls[0]}' is null; set a value or remove it")
    if kind == "default":
        return {"context": context}
    values: dict[str, Any] = {"kind": kind}
    values |= {ours: table[theirs] for ours, theirs in known.items() if table.get(theirs) is not None}
    if "original_context" in known:
        inner, outer = values.get("original_context"), keys.take(ORIGINAL)  # Phi
        originals = {f"{name}.{ORIGINAL}": inner, ORIGINAL: outer}
        _check_equal(keys, {key: value for key, value in originals.items() if value is not None})
        values["original_context"] = outer or inner or context
    if kind == "llama3" and (missing := set(known) - values.keys()):
        raise keys.refuse(name, f"kind 'llama3' needs '{known[min(missing)]}'")
    if kind == "yarn":
        original = values["original_context"]
        values.setdefault("factor", context / original)
        context = round(original * values["factor"]) if context == original else context
    if "factor" not in values:
        raise keys.refuse(name, f"kind '{kind}' needs 'factor'")
    return {"context": context, "rope_scaling": RopeScaling(**values)}


def rope_to_hf(config: ModelConfig) -> dict[str, Any]:
    """Writes ``rope_parameters`` for transformers 5, and ``rope_theta`` and ``rope_scaling`` for 4 and others."""
    version_4: dict[str, Any] = {"rope_theta": config.rope_theta}
    parameters: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if (scaling := config.rope_scaling) is not None:
        fields = {theirs: getattr(scaling, ours) for ours, theirs in FIELDS[scaling.kind].items()}
        values = {"rope_type": scaling.kind} | {name: value for name, value in fields.items() if value is not None}
        if values.get("truncate", False):
            del values["truncate"]  # the default; older versions do not read it
        version_4["rope_scaling"] = values
        parameters |= values
    return version_4 | {"rope_parameters": parameters}
