"""Requests for text: what the HTTP process submits to an engine, for completions of prompts or for a chat.

Prompts that exceed the context whatever their text is are refused in the HTTP process, without tokenising.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from colonnade.errors import RequestError
from colonnade.serve.prompts import context_error
from colonnade.serve.sampling_params import SamplingParams


@dataclass(frozen=True)
class GenerationRequest:
    """The work of one HTTP request: completions of prompts, or the reply to the messages of a chat."""

    prompts: Sequence[str | Sequence[int]] = ()
    messages: Sequence[Mapping[str, Any]] | None = None
    params: SamplingParams = field(default_factory=SamplingParams)
    n: int = 1
    """Choices for each prompt."""
    special: bool = True
    """Whether the tokenizer's begin and end tokens are added to ``prompts`` that are text."""
    template: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of :meth:`Tokenizer.encode_chat`: ``tools``, ``continue_last``, and variables of the template."""
    client: str = ""
    """The client: the name of an API key, or an address. Clients take turns in the queue."""
    priority: int = 0
    """Its class in the queue; lower ones first."""
    adapter: str = ""
    """The name of its adapter; empty: none."""
    timeout_s: float | None = None
    """It is refused if it would wait longer, and ended with an error if it takes longer; None: no limit [s]."""
    resume: Sequence[Sequence[int] | None] = ()
    """If it continues after another engine has failed: the output ids of each completion so far; None: it has ended."""

    @property
    def num_completions(self) -> int:
        """``n`` for each prompt, or for a chat; those of a prompt follow one another."""
        return self.n * (len(self.prompts) if self.messages is None else 1)

    @property
    def size(self) -> int:
        """Approximate number of characters of text and token ids."""
        if self.messages is None:
            return sum(map(len, self.prompts))
        return sum(len(message["content"]) for message in self.messages)

    def check_lengths(self, context: int, longest_token_bytes: int, limit: int | None = None) -> None:
        """Raise :class:`RequestError` for a prompt that exceeds the context with any tokenisation, without tokenising
        it.

        T tokens hold at most T · ``longest_token_bytes`` bytes of text. The cache holds ``limit`` tokens of a request.
        """
        if self.messages is None:
            for prompt in self.prompts:
                if isinstance(prompt, str):
                    _check_text_bytes(_num_bytes(prompt), context, longest_token_bytes, "prompt")
                elif len(prompt) > context - (self.params.max_tokens != 0):
                    raise context_error(len(prompt), self.params.max_tokens, context, limit)
        else:
            size = sum(_num_bytes(message["content"]) for message in self.messages)
            _check_text_bytes(size, context, longest_token_bytes, "messages")

    def message(self, ids: Sequence[str]) -> dict[str, Any]:
        """The message that submits it, with an id for each completion (:mod:`colonnade.serve.ipc`)."""
        values = {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}
        return {"do": "submit", "ids": list(ids), **values, "params": dataclasses.asdict(self.params)}


def _num_bytes(text: str) -> int:
    """Bytes of ``text`` in UTF-8."""
    return len(text.encode(errors="surrogatepass"))


def _check_text_bytes(size: int, context: int, longest_token_bytes: int, param: str) -> None:
    if size > context * longest_token_bytes:
        raise RequestError(
            f"the text has {size} bytes; this model's maximum context length is {context} tokens, each of at most "
            f"{longest_token_bytes} bytes, which makes {context * longest_token_bytes}; shorten it",
            param=param,
            code="context_length_exceeded",
        )
