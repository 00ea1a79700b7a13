"""The constraint on an output: a JSON schema, a regular expression, a list of choices, or a grammar."""

import json as json_library
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from colonnade.errors import RequestError
from colonnade.serve.client_json import parse_text, to_json_text

MAX_GRAMMAR_BYTES = 64 << 10
"""Size limit of a schema, an expression, a grammar, or all choices of one request [bytes]."""

_OVERFLOWING = re.compile(r'(?<!"minimum": )(?<!"exclusiveMinimum": )-9\d{18}(?!\d)')
"""Integers down to -9·10¹⁸, other than as a minimum: llguidance's range of them overflows, and recurses without end."""

WHITESPACE = r"(\n[ \t]{0,64}| )?"
"""Between the parts of JSON: nothing, a space, or a new line with its indentation. Where any whitespace is allowed, a
weak model may generate nothing else."""


@dataclass(frozen=True, kw_only=True)
class StructuredOutputs:
    """Exactly one of these is given; vLLM has the same names."""

    json: Mapping[str, Any] | bool | str | None = None
    """A JSON schema, as an object or as its text."""
    regex: str | None = None
    """A regular expression that the whole text matches."""
    choice: Sequence[str] | None = None
    """The text is one of these strings."""
    grammar: str | None = None
    """A context-free grammar, in Lark's or llama.cpp's (GBNF) notation."""
    json_object: bool | None = None
    """True: any JSON object."""

    def __post_init__(self):
        given = self._given()
        if len(given) != 1:
            names = ", ".join(each.name for each in fields(self))
            what = " and ".join(given) or "none"
            raise _error(f"structured_outputs has {what} of {names}; send exactly one")
        if self.json is not None:
            self._check_schema()
        for name in ("regex", "grammar"):
            if not isinstance(getattr(self, name), str | None) or getattr(self, name) == "":
                raise _error(f"structured_outputs.{name} must be a non-empty string")
        if self.choice is not None:
            self._check_choices()
        if not isinstance(self.json_object, bool | None):
            raise _error("structured_outputs.json_object must be true or false")
        if self.kind in ("json", "grammar") and (found := _OVERFLOWING.search(self.source)):
            raise _error(f"structured_outputs.{self.kind} has {found.group()}, which is too close to -2⁶³; remove it")
        size = len(self.source.encode())
        if size > MAX_GRAMMAR_BYTES:
            raise _error(f"structured_outputs.{self.kind} has {size} bytes; at most {MAX_GRAMMAR_BYTES} are accepted")

    def _given(self) -> list[str]:
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return [name for name, value in values.items() if value is not None and (name, value) != ("json_object", False)]

    def _check_schema(self) -> None:
        schema = self.json
        if isinstance(schema, str):
            schema = parse_text(schema, "structured_outputs", "structured_outputs.json")
        if not isinstance(schema, Mapping | bool):
            raise _error("structured_outputs.json is not a JSON schema; send an object")
        if schema is False:
            raise _error("structured_outputs.json is false, which nothing matches; send another schema")
        object.__setattr__(self, "json", {} if schema is True else schema)

    def _check_choices(self) -> None:
        choices = self.choice
        valid = isinstance(choices, Sequence) and not isinstance(choices, str) and len(choices) > 0
        if not valid or not all(isinstance(each, str) and each for each in choices or ()):
            raise _error("structured_outputs.choice must be a list of non-empty strings")

    @property
    def kind(self) -> str:
        """The name of the field that is given."""
        return self._given()[0]

    @property
    def source(self) -> str:
        """The specification, as text."""
        value = getattr(self, self.kind)
        where = f"structured_outputs.{self.kind}"
        return value if isinstance(value, str) else to_json_text(value, "structured_outputs", where)


def lark_json(value: object) -> str:
    """``value`` as JSON that llguidance reads inside a Lark grammar: a string, or the schema of a ``%json``."""
    return json_library.dumps(value).replace("\x7f", "\\u007f")  # its lexer refuses the character itself


def _error(message: str) -> RequestError:
    return RequestError(message, param="structured_outputs")
