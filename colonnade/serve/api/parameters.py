"""Refuses parameters of a request body that are unknown, or that would have to be ignored."""

import difflib
from collections.abc import Collection, Mapping
from typing import Any

from colonnade.errors import RequestError
from colonnade.serve.api.errors import format_value

SIMILARITY_CUTOFF = 0.75
"""Minimum similarity between an unknown name and the suggested one (difflib's ratio)."""

MAX_NAME_CHARACTERS = 80
"""Longer names are cut off in error messages."""


def known_parameters(
    values: Mapping[str, Any],
    fields: Collection[str],
    ignored: Collection[str] = (),
    unsupported: Mapping[str, tuple[object, ...]] = {},
    reason: str = "",
) -> dict[str, Any]:
    """Those of ``values`` that are ``fields``.

    Raises :class:`RequestError` for an ``unsupported`` parameter, unless its value is one of those that have no effect,
    with the ``reason``; and for a name that is not one of the three, with the most similar field. An unsupported
    parameter that is a field is supported.
    """
    for name, neutral in unsupported.items():
        value = None if name in fields else values.get(name)
        if value is not None and not any(value == none and type(value) is type(none) for none in neutral):
            what = name if isinstance(value, list | dict) else f"{name}={format_value(value)}"
            raise RequestError(f"{what} is not supported{reason}; remove it", param=name)
    known = {*fields, *unsupported, *ignored}
    unknown = next((name for name in values if name not in known), None)
    if unknown is not None:
        shown = unknown[:MAX_NAME_CHARACTERS]
        near = difflib.get_close_matches(shown, sorted(fields), n=1, cutoff=SIMILARITY_CUTOFF)
        remedy = f"did you mean '{near[0]}'?" if near else "remove it"
        raise RequestError(f"unknown parameter '{shown}'; {remedy}", param=shown, code="unknown_parameter")
    return {name: value for name, value in values.items() if name in fields}


def are_ids(value: object) -> bool:
    """Whether ``value`` is a non-empty list of token ids."""
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)
