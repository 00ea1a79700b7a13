"""Rotary settings, as transformers 5 writes them (``rope_parameters``) and as 4 did (``rope_theta``, ``rope_scaling``).

The kinds that :mod:`colonnade.model` implements: none, linear (Chen 2023), llama3 (the Llama 3.1 report) and yarn
(Peng 2023, arXiv 2309.00071). ``dynamic`` and ``longrope`` change the frequencies with the length of the text at hand;
a cached key was rotated under the old ones, so one long forward pass and token-by-token decoding disagree. We refuse
them and say what to do.
"""

from typing import Any

from colonnade.checkpoint.hf.keys import Keys
from colonnade.config import ModelConfig, RopeScaling

# Ours -> theirs, for each kind.
FIELDS: dict[str, dict[str, str]] = {
    "linear": {"factor": "factor"},
    "llama3": {
        "factor": "factor",
        "original_context": "original_max_position_embeddings",
        "low_freq_factor": "low_freq_factor",
        "high_freq_factor": "high_freq_factor",
    },
    "yarn": {
        "factor": "factor",
        "original_context": "original_max_position_embeddings",
        "beta_fast": "beta_fast",
        "beta_slow": "beta_slow",
        "attention_factor": "attention_factor",
        "mscale": "mscale",
        "mscale_all_dim": "mscale_all_dim",
        "truncate": "truncate",
    },
}
REFUSED = {
    "dynamic": "its frequencies change with the length of the text, so cached keys go stale; "
    "use rope_type 'yarn' with the same factor (and fine-tune, or check the perplexity)",
    "longrope": "it switches frequencies at the original context, so cached keys go stale; "
    "use a checkpoint of the same model with 'llama3' or 'yarn' scaling",
}
# Written beside the others and without effect: Phi's spelling of the type, and Yarn-Llama's mark of fine-tuning.
WITHOUT_EFFECT = {"type", "rope_type", "rope_theta", "partial_rotary_factor", "finetuned"}


def rope_from_hf(keys: Keys, context: int, *, theta: float = 10000.0) -> dict[str, Any]:
    """The fields ``rope_theta``, ``rope_scaling`` and ``context`` of a :class:`ModelConfig`.

    ``context`` is their max_position_embeddings [tokens]. Qwen's recipe for yarn leaves it at the original value;
    then the stretched one is returned. ``theta`` is the base where the file names none. Raises
    :class:`CheckpointError` for what we cannot express.
    """
    # transformers 5 lets an old rope_scaling win over rope_parameters; an old rope_theta only fills a gap.
    old, new = (_table(keys, name) for name in ("rope_scaling", "rope_parameters"))
    name, rope = ("rope_scaling", old) if old else ("rope_parameters", new)
    outer_theta = keys.number("rope_theta", new.get("rope_theta") or theta)
    theta = rope.get("rope_theta") or outer_theta
    keys.must_be("partial_rotary_factor", 1.0, "only rotation of the whole head is implemented")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise keys.refuse(name, "only rotation of the whole head is implemented")
    kind = str(rope.get("rope_type") or rope.get("type") or "default")
    if kind == "default":
        return {"rope_theta": theta, "context": context}
    if kind not in FIELDS:
        why = REFUSED.get("longrope" if kind == "su" else kind, f"known kinds are default, {', '.join(FIELDS)}")
        raise keys.refuse(name, why)
    known = FIELDS[kind]
    if unknown := rope.keys() - set(known.values()) - WITHOUT_EFFECT:
        raise keys.refuse(name, f"the setting '{min(unknown)}' of kind '{kind}' is not known")
    given = {ours: rope[theirs] for ours, theirs in known.items() if rope.get(theirs) is not None}
    values: dict[str, Any] = {"kind": kind, **given}
    if "original_context" in known:
        # Phi's place for it, then transformers' default.
        outer = keys.take("original_max_position_embeddings")
        values["original_context"] = outer or values.get("original_context") or context
    if kind == "llama3" and (missing := set(known) - values.keys()):
        raise keys.refuse(name, f"kind 'llama3' needs '{known[min(missing)]}'")
    if kind == "yarn":
        original = values["original_context"]
        values.setdefault("factor", context / original)
        context = round(original * values["factor"]) if context == original else context
    if "factor" not in values:
        raise keys.refuse(name, f"kind '{kind}' needs 'factor'")
    return {"rope_theta": theta, "context": context, "rope_scaling": RopeScaling(**values)}


def _table(keys: Keys, name: str) -> dict[str, Any]:
    table = keys.take(name, {})
    if not isinstance(table, dict) or any(isinstance(value, dict) for value in table.values()):
        raise keys.refuse(name, "one set of rotary settings for all layers was expected")
    return table


def rope_to_hf(config: ModelConfig) -> dict[str, Any]:
    """``rope_parameters`` for transformers 5, and the same as ``rope_theta`` and ``rope_scaling`` for 4 and others."""
    written: dict[str, Any] = {"rope_theta": config.rope_theta}
    parameters: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if (scaling := config.rope_scaling) is not None:
        fields = {theirs: getattr(scaling, ours) for ours, theirs in FIELDS[scaling.kind].items()}
        values = {"rope_type": scaling.kind} | {name: value for name, value in fields.items() if value is not None}
        if values.get("truncate", False):
            del values["truncate"]  # the default; older readers do not know it
        written["rope_scaling"] = values
        parameters |= values
    return written | {"rope_parameters": parameters}
