"""Requests for embeddings, classes and scores, submitted by the HTTP process, and the engine's results.

    PoolingRequest -> message -> texts to tokens, in a thread of the engine -> PoolingItem, one for each text or pair
    PoolingOutput  -> base64 of float32 numbers -> the reply

A vector travels as base64: OpenAI's clients request exactly that, and 384 numbers as JSON would take 20 times as long.
"""

from array import array
from binascii import a2b_base64
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from colonnade.config.base import plural
from colonnade.errors import RequestError

if TYPE_CHECKING:  # the HTTP process needs no tokenizer, which would load torch
    from colonnade.data.tokenizer import Tokenizer

Message = dict[str, Any]
Text = str | list[int] | tuple[str, str]
"""A text, its token ids, or a pair of texts."""

LONG_TEXT_RATIO = 16
"""Maximum length of a text, in multiples of the bytes that a context of the longest tokens spells. Spaces and unknown
WordPiece words make a text of few tokens long, but not that long."""


@dataclass(frozen=True)
class PoolingRequest:
    """The work of one HTTP request: a result for each of ``texts``."""

    texts: Sequence[Text]
    fields: Sequence[tuple[str, int]]
    """(field of the body, number of texts that it holds), in their order; 0 for a field that is not a list."""
    truncate: int | None = None
    """Keep the first tokens of longer texts, this many with the special ones; None: refuse texts over the context."""
    add_special_tokens: bool = True
    dimensions: int | None = None
    """Keep the first components of an embedding, and scale them to length 1; None: all."""
    timeout_s: float | None = None
    """As in a request for text."""

    @property
    def num_completions(self) -> int:
        """Results."""
        return len(self.texts)

    @property
    def size(self) -> int:
        """Characters of text and token ids."""
        return sum(sum(map(len, text)) if isinstance(text, tuple) else len(text) for text in self.texts)

    def check_lengths(self, context: int, longest_token_bytes: int, max_tokens: int) -> None:
        """Raise :class:`RequestError` for a text that is far too long for ``max_tokens``, without tokenising it."""
        if self.truncate is not None:
            return
        context = min(context, max_tokens)
        most = LONG_TEXT_RATIO * context * longest_token_bytes
        for index, text in enumerate(self.texts):
            if isinstance(text, list):
                continue
            size = max(len(part.encode()) for part in ([text] if isinstance(text, str) else text))
            if size > most:
                where = name_of(self.fields, index)
                raise RequestError(
                    f"{where} has {size} bytes; a model with a context of {context} tokens accepts at most {most}; "
                    "shorten it, or set truncate_prompt_tokens to -1 to use its beginning",
                    param=where.partition(".")[0],
                    code="context_length_exceeded",
                )

    def message(self, ids: Sequence[str]) -> Message:
        """The message that submits it, with an id for each result."""
        options = {"fields": self.fields, "truncate": self.truncate, "special": self.add_special_tokens}
        pooling = {**options, "dimensions": self.dimensions}
        return {"do": "submit", "ids": ids, "prompts": self.texts, "messages": None, "pooling": pooling}


@dataclass(eq=False, slots=True)
class PoolingItem:
    """One text in the engine's queue."""

    id: str
    tokens: list[int]
    segments: list[int] | None
    """The segment of each token of a pair; None: segment 0."""
    dimensions: int | None = None
    """As in :class:`PoolingRequest`."""


@dataclass(frozen=True, slots=True)
class PoolingOutput:
    """The result of one text."""

    id: str
    vector: str
    """Base64 of the embedding or the probabilities [float32, little-endian]."""
    prompt_tokens: int
    finish_reason: Literal["stop", "error"]
    """error: the numbers were not finite."""

    def numbers(self) -> list[float]:
        """The numbers of ``vector``."""
        return array("f", a2b_base64(self.vector)).tolist()


def name_of(fields: Sequence[tuple[str, int]], index: int) -> str:
    """The name of text ``index`` in the client's body: ``input``, or ``input.3`` in a list."""
    for field, count in fields:
        if index < max(count, 1):
            return f"{field}.{index}" if count else field
        index -= max(count, 1)
    raise IndexError(index)


def text_size(message: Message) -> int:
    """Characters of text that must be tokenised."""
    texts = message["prompts"]
    pairs = (part for text in texts if not isinstance(text, str) for part in text if isinstance(part, str))
    return sum(len(text) for text in texts if isinstance(text, str)) + sum(map(len, pairs))


def tokenize(message: Message, tokenizer: "Tokenizer", wanted: Callable[[], bool]) -> list[tuple[list[int], Any]]:
    """(tokens, segments or None) of each text of ``message``; stops early once ``wanted`` is False."""
    options, result = message["pooling"], []
    for text in message["prompts"]:
        if not wanted():
            break
        if isinstance(text, list) and text and isinstance(text[0], int):
            result.append((text[: options["truncate"]], None))
            continue
        first, second = (text, None) if isinstance(text, str) else text
        tokens, segments = tokenizer.encode_truncated(
            first, second, special=options["special"], max_tokens=options["truncate"]
        )
        result.append((tokens, None if second is None else segments))
    return result


def check_tokens(tokens: Sequence[int], where: str, *, context: int, vocab_size: int) -> None:
    """Raise :class:`RequestError` for no token, for more than the context, and for ids outside the vocabulary.

    ``where`` is the text's name in the client's body.
    """
    param = where.partition(".")[0]
    if not tokens:
        raise RequestError(f"{where} is empty; send at least one token", param=param)
    if len(tokens) > context:
        raise RequestError(
            f"{where} has {plural(len(tokens), 'token')}, more than the model's context of {context}; shorten it, or "
            "set truncate_prompt_tokens to -1 to use its beginning",
            param=param,
            code="context_length_exceeded",
        )
    if min(tokens) < 0 or max(tokens) >= vocab_size:
        unknown = next(token for token in tokens if not 0 <= token < vocab_size)
        raise RequestError(
            f"{where} has the token {unknown}, which is not in the vocabulary of {vocab_size}; send ids from 0 to "
            f"{vocab_size - 1}",
            param=param,
        )
