"""Chat templates: the Jinja program that a model's authors ship to turn messages into its prompt.

The conventions are Hugging Face's ("Chat templates", transformers documentation): blocks swallow their own newline and
indentation, ``raise_exception`` refuses a conversation, ``strftime_now`` tells the date, ``tojson`` does not escape
HTML, ``{% generation %}`` marks the assistant's part and ``break``/``continue`` work in loops.

A template comes from a downloaded file, so it is a foreign program. It runs in Jinja's immutable sandbox: no Python
internals, no changes to the messages; here, too, no namespace attribute that begins with an underscore.
"""

import datetime
import json
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from colonnade.errors import DataError, RequestError

Message = dict[str, Any]
"""``{"role": "user", "content": "..."}``, and whatever else the template reads."""


class ChatTemplate:
    """A compiled template; :meth:`render` turns messages into the prompt."""

    def __init__(self, source: str):
        """Compile ``source``; raises :class:`DataError` with the line when it is not valid Jinja."""
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise DataError(
                f"chat template, line {error.lineno}: {error.message}; mend it, or load the model without one"
            ) from None

    def render(self, messages: list[Message], **variables: Any) -> str:
        """The prompt; raises :class:`RequestError` with the template's own words when it refuses the messages."""
        try:
            return self._template.render(messages=messages, **variables)
        except Exception as error:  # a foreign program may raise anything
            raise RequestError(
                f"the model's chat template refuses these messages: {' '.join(str(error).split())}; "
                "change their roles, order or content",
                param="messages",
            ) from error


class _Generation(jinja2.ext.Extension):
    """Accepts ``{% generation %} ... {% endgeneration %}``, which marks text for training and prints it unchanged."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


class _Namespace(jinja2.utils.Namespace):
    """Jinja's ``namespace()`` without underscore names: ``__html__`` and its like would be called by Python itself."""

    def __init__(*args: Any, **attributes: Any) -> None:
        self, *given = args  # not named parameters, so that an attribute may be called "self"
        known = dict(*given, **attributes)
        for name in known:
            _refuse_underscore(name)
        jinja2.utils.Namespace.__init__(self, known)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_underscore(name)
        jinja2.utils.Namespace.__setitem__(self, name, value)


def _refuse_underscore(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace attribute may not begin with an underscore: {name!r}")


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now, namespace=_Namespace)
    return environment


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.datetime.now().strftime(layout)
