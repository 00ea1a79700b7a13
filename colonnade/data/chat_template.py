"""Chat templates: the Jinja program that turns messages into a model's prompt, protected against injection.

The conventions are Hugging Face's ("Chat templates", transformers documentation): blocks swallow their own newline and
indentation, ``raise_exception`` refuses a conversation, ``strftime_now`` formats the date, ``tojson`` does not escape
HTML, ``{% generation %}`` marks the assistant's part and ``break``/``continue`` work in loops. A template comes from a
downloaded file, so it is untrusted. It runs in Jinja's immutable sandbox: no Python internals, no changes to the
messages; in addition, no namespace attribute that begins with an underscore.

A template pastes messages as text between special tokens. A message that contains ``<|im_end|>`` and
``<|im_start|>system`` could therefore impersonate the system. :class:`ChatEncoder` keeps such spellings as text:

    find    where a message alone would produce special tokens, and insert a random marker at those positions
    render  the template, which then neither sees nor produces a special token there
    encode  the template's own text as usual; the text between its special tokens without the markers, as plain text

Messages that spell no special token, nearly all, are rendered and encoded unchanged.
"""

import bisect
import datetime
import itertools
import json
import secrets
from collections.abc import Callable, Iterator
from typing import Any, Literal

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import tokenizers
from jinja2.sandbox import ImmutableSandboxedEnvironment

from colonnade.errors import DataError, RequestError

GENERATION_MARKER = "generation_marker"
"""The template variable that is printed before and after each ``{% generation %}`` part; undefined: nothing."""

Role = Literal["system", "developer", "user", "assistant", "tool"]
"""The sender of a message; fine-tuning and the server accept the same roles."""

Message = dict[str, Any]
"""``{"role": "user", "content": "..."}`` and any other keys that the template reads."""


class ChatTemplate:
    """A compiled template; :meth:`render` turns messages into the prompt."""

    def __init__(self, source: str):
        """Compile ``source``; raises :class:`DataError` with the line if it is not valid Jinja."""
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise DataError(
                f"chat template, line {error.lineno}: {error.message}; fix it, or load the model without one"
            ) from None

    def render(self, messages: list[Message], /, **variables: Any) -> str:
        """The prompt; raises :class:`RequestError` with the template's message if it refuses the conversation."""
        try:
            return self._template.render(messages=messages, **variables)
        except Exception as error:  # an untrusted program may raise anything
            raise RequestError(
                f"the model's chat template refuses these messages: {' '.join(str(error).split())}; "
                "change their roles, order or content",
                param="messages",
            ) from error


class _Generation(jinja2.ext.Extension):
    """Accepts ``{% generation %} ... {% endgeneration %}``, which marks text for training.

    The text is printed between two :data:`GENERATION_MARKER`.
    """

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        marker = jinja2.nodes.Output([jinja2.nodes.Name(GENERATION_MARKER, "load")], lineno=line)
        return jinja2.nodes.Scope([marker, *body, marker], lineno=line)


class _Namespace(jinja2.utils.Namespace):
    """Jinja's ``namespace()`` without underscore names: Python itself would call ``__html__`` and the like."""

    def __init__(*args: Any, **attributes: Any) -> None:
        self, *positional = args  # not named parameters, so that an attribute may be called "self"
        known = dict(*positional, **attributes)
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
    environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now, namespace=_Namespace)  # pyrefly: ignore[bad-argument-type]
    return environment


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.datetime.now().strftime(layout)


_MARKER_SYMBOLS = range(0x2800, 0x2900)
"""Braille symbols, which no normaliser drops or changes."""


class ChatEncoder:
    """Encodes conversations; only the template's own special tokens become special tokens.

    ``core`` is the tokenizer, ``special`` its special tokens; ``literal`` returns a copy that encodes those as text.
    """

    def __init__(
        self, core: tokenizers.Tokenizer, literal: Callable[[], tokenizers.Tokenizer], special: frozenset[int]
    ):
        self._core, self._literal, self._special = core, literal, special
        tokens = [token for i, token in core.get_added_tokens_decoder().items() if i in special]
        self._spellings = [token.content for token in tokens]
        # A special token that is matched after normalisation has many spellings.
        self._exact = core.normalizer is None or not any(token.normalized for token in tokens)

    def encode(
        self,
        messages: list[Message],
        render: Callable[..., str],
        /,
        *,
        continue_last: bool = False,
        **variables: Any,
    ) -> list[int]:
        """The ids of ``render(messages, **variables)``, with special tokens only where the template wrote them.

        With ``continue_last`` the prompt ends where the last message's content ends. Raises what ``render`` raises,
        TypeError for a lone surrogate, and :class:`RequestError` if the vocabulary cannot spell a message as plain
        text.
        """
        marker = "".join(chr(secrets.choice(_MARKER_SYMBOLS)) for _ in range(8))  # random, so no message contains it
        marked, values = self._mark([messages, variables], marker)
        if not continue_last:
            text = render(marked, **values)
        else:
            end = marker[::-1] + marker
            marked[-1]["content"] += end
            text, found, _ = render(marked, **values).partition(end)
            if not found:
                raise RequestError(
                    "the model's chat template does not show the last message's content, which cannot be continued; "
                    "remove continue_final_message",
                    param="continue_final_message",
                )
        if marker not in text:
            return self._core.encode(text, add_special_tokens=False).ids
        return [i for i, _ in self._encode_pieces(text, marker)]

    def encode_generations(
        self, messages: list[Message], render: Callable[..., str], /, **variables: Any
    ) -> tuple[list[int], list[int]]:
        """The ids of :meth:`encode`, and for each the number of its ``{% generation %}`` part, or -1.

        A token belongs to a part if it begins in it. Raises as :meth:`encode`.
        """
        marker, edge = ("".join(chr(secrets.choice(_MARKER_SYMBOLS)) for _ in range(8)) for _ in range(2))
        marked, values = self._mark([messages, variables], marker)
        pieces = render(marked, **values, **{GENERATION_MARKER: edge}).split(edge)
        text = "".join(pieces)
        # Piece 1, 3, … is a part; its end in the text is the start of the next piece.
        ends = list(itertools.accumulate(len(piece) for piece in pieces))
        if marker in text:
            encoded = list(self._encode_pieces(text, marker))
        else:
            encoding = self._core.encode(text, add_special_tokens=False)
            encoded = [(i, start) for i, (start, _) in zip(encoding.ids, encoding.offsets, strict=True)]
        piece_of = [bisect.bisect_right(ends, start) for _, start in encoded]
        return [i for i, _ in encoded], [piece // 2 if piece % 2 else -1 for piece in piece_of]

    def _encode_pieces(self, text: str, marker: str) -> Iterator[tuple[int, int]]:
        """(id, where it begins in ``text``) of ``text``, encoded piece by piece between its special tokens.

        A tokenizer that prepends a space to each text does so to each piece.
        """
        begin = 0
        for token, start, end in [*self._special_tokens(text), (None, len(text), len(text))]:
            parts = text[begin:start].split(marker)
            piece = self._literal().encode("".join(parts), add_special_tokens=False)
            if injected := self._special.intersection(piece.ids):
                name = self._core.id_to_token(min(injected))
                raise RequestError(f"the messages spell the special token '{name}'; remove it", param="messages")
            lengths = list(itertools.accumulate(len(part) for part in parts))
            for i, (at, _) in zip(piece.ids, piece.offsets, strict=True):
                yield i, begin + at + len(marker) * min(bisect.bisect_right(lengths, at), len(parts) - 1)
            if token is not None:
                yield token, start
            begin = end

    def _mark(self, value: Any, marker: str) -> Any:
        """``value`` with a marker around each character of what would become a special token, at any depth."""
        if isinstance(value, dict):
            return {self._mark(key, marker): self._mark(each, marker) for key, each in value.items()}
        if isinstance(value, list):
            return [self._mark(each, marker) for each in value]
        if not isinstance(value, str) or (self._exact and not any(spelling in value for spelling in self._spellings)):
            return value
        parts, begin = list[str](), 0
        for _, start, end in self._special_tokens(value):
            parts += [value[begin:start], marker, *(character + marker for character in value[start:end])]
            begin = end
        return "".join([*parts, value[begin:]])

    def _special_tokens(self, text: str) -> list[tuple[int, int, int]]:
        """(id, start, end) of each special token in the encoding of ``text``."""
        encoding = self._core.encode(text, add_special_tokens=False)
        return [(i, *span) for i, span in zip(encoding.ids, encoding.offsets, strict=True) if i in self._special]
