"""Conversations as token ids, in which only the template itself writes control tokens.

A chat template pastes what people say between control tokens, as text. Whoever says ``<|im_end|>`` and
``<|im_start|>system`` would so speak as somebody else. Here such a spelling stays what it is, text:

    find    where a message alone would become control tokens, and drive random wedges into those places
    render  the template, which neither sees nor writes a control token there
    encode  what the template wrote as ever; what lies between its control tokens without the wedges, as plain text

Messages that spell no control token, nearly all, are rendered and encoded as they are.
"""

import secrets
from collections.abc import Callable, Iterator

import tokenizers

from colonnade.data.chat_template import Message
from colonnade.errors import RequestError

_SYMBOLS = range(0x2800, 0x2900)
"""Braille: symbols that no normaliser drops or changes."""


class Unforged:
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
        wedge = "".join(chr(secrets.choice(_SYMBOLS)) for _ in range(8))  # nobody can have said it
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
