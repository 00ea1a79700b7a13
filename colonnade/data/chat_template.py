"""Chat templates"""

import datetime
import json
import secrets
from collections.abc import Callable, Iterator
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import tokenizers
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


_MARKER_SYMBOLS = range(0x2800, 0x2900)
"""Braille: symbols that no normaliser drops or changes."""


class ChatEncoder:
    """Encodes conversations with ``core``; ``literal`` makes, when it is needed, a copy of it to which the tokens
    ``special`` are text.
    """

    def __init__(
        self, core: tokenizers.Tokenizer, literal: Callable[[], tokenizers.Tokenizer], special: frozenset[int]
    ):
        self._core, self._literal, self._special = core, literal, special
        tokens = [token for i, token in core.get_added_tokens_decoder().items() if i in special]
        self._spellings = [token.content for token in tokens]
        # Who is looked for after the text was normalised may be spelt in many ways.
        self._exact = core.normalizer is None or not any(token.normalized for token in tokens)

    def encode(self, messages: list[Message], render: Callable[[list[Message]], str]) -> list[int]:
        """The ids of ``render(messages)``, with control tokens where the template wrote them and nowhere else.

        Raises what ``render`` raises, TypeError for a lone surrogate, and :class:`RequestError` where a vocabulary has
        no other way to spell what was said.
        """
        wedge = "".join(chr(secrets.choice(_MARKER_SYMBOLS)) for _ in range(8))  # nobody can have said it
        split = [{key: self._split(value, wedge) for key, value in message.items()} for message in messages]
        text = render(split)
        if wedge not in text:
            return self._core.encode(text, add_special_tokens=False).ids
        return list(self._pieces(text, wedge))

    def _pieces(self, text: str, wedge: str) -> Iterator[int]:
        """The ids of ``text``, cut at its control tokens. A tokenizer that begins each text with a space does so here
        with each piece.
        """
        begin = 0
        for token, start, end in [*self._control(text), (None, len(text), len(text))]:
            said = self._literal().encode(text[begin:start].replace(wedge, ""), add_special_tokens=False)
            if forged := self._special.intersection(said.ids):
                spelt = self._core.id_to_token(min(forged))
                raise RequestError(f"the messages spell the control token '{spelt}'; remove it", param="messages")
            yield from said.ids
            if token is not None:
                yield token
            begin = end

    def _split(self, value: object, wedge: str) -> object:
        """``value`` with a wedge around each character of what would become a control token."""
        if not isinstance(value, str) or (self._exact and not any(spelling in value for spelling in self._spellings)):
            return value
        parts, begin = list[str](), 0
        for _, start, end in self._control(value):
            parts += [value[begin:start], wedge, *(character + wedge for character in value[start:end])]
            begin = end
        return "".join([*parts, value[begin:]])

    def _control(self, text: str) -> list[tuple[int, int, int]]:
        """(id, start, end) of the control tokens that ``text`` becomes."""
        encoding = self._core.encode(text, add_special_tokens=False)
        return [(i, *span) for i, span in zip(encoding.ids, encoding.offsets, strict=True) if i in self._special]
