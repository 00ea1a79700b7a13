"""What clients may send: OpenAI's request bodies, checked before anything reaches the engine.

What this server cannot do yet is refused by name, unless its value asks for nothing (``n=1``): an answer that silently
ignores ``logprobs`` or a penalty is a wrong answer. Names that change no text (``user``, ``metadata``) are accepted.
Unknown names are refused, with a known one that is near.
"""

import difflib
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, WithJsonSchema, field_validator, model_validator

from colonnade.errors import RequestError
from colonnade.serve.api.errors import quoted
from colonnade.serve.ipc import Ask
from colonnade.serve.sampling_params import SamplingParams

MAX_STOP_CHARACTERS = 512
"""Of one stop string: all of them are looked for at each token."""

NEAR = 0.75
"""How alike an unknown name must be to one that we suggest in its place (difflib's ratio)."""

NOT_YET: dict[str, tuple[object, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "prompt_logprobs": (),
    "echo": (False,),
    "suffix": ("",),
    "logit_bias": ({},),
    "frequency_penalty": (0, 0.0),
    "presence_penalty": (0, 0.0),
    "repetition_penalty": (1, 1.0),
    "min_tokens": (0,),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "web_search_options": (),
    "moderation": (),
}
"""Parameters that are refused, except with the values that ask for nothing (null is always one)."""

WITHOUT_EFFECT = {
    "user", "metadata", "store", "service_tier", "safety_identifier", "parallel_tool_calls", "prediction",
    "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention",
}  # fmt: skip
"""Parameters that change no text."""


class StreamOptions(BaseModel):
    """``stream_options``."""

    model_config = ConfigDict(extra="forbid", strict=True)
    include_usage: bool = False


class Body(BaseModel):
    """What both endpoints share. None, also an explicit null, means the default."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    default_max_tokens: ClassVar[int | None] = None

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    max_tokens: int | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @model_validator(mode="before")
    @classmethod
    def _supported(cls, values: object) -> object:
        if not isinstance(values, dict):
            return values
        for name, neutral in NOT_YET.items():
            value = values.get(name)
            if value is not None and not any(value == none and type(value) is type(none) for none in neutral):
                what = name if isinstance(value, list | dict) else f"{name}={quoted(value)}"
                raise RequestError(f"{what} is not supported; leave it out", param=name)
        known = set(cls.model_fields) | set(NOT_YET) | WITHOUT_EFFECT
        for name in values:
            if name not in known:
                near = difflib.get_close_matches(name[:80], sorted(cls.model_fields), n=1, cutoff=NEAR)
                remedy = f"did you mean '{near[0]}'?" if near else "leave it out"
                what = f"unknown parameter '{name[:80]}'; {remedy}"
                raise RequestError(what, param=name[:80], code="unknown_parameter")
        return {name: value for name, value in values.items() if name in cls.model_fields}

    @field_validator("stop", mode="before")
    @classmethod
    def _short_texts(cls, stop: object) -> object:
        """A string, or a list of them: what of the two was not meant is no part of the complaint."""
        several = isinstance(stop, list)
        for i, text in enumerate(stop if several else [] if stop is None else [stop]):
            where = f"stop.{i}" if several else "stop"
            if not isinstance(text, str):
                wanted = "a string" if several else "a string or a list of strings"
                raise RequestError(f"{where} is {quoted(text)}; it must be {wanted}", param="stop")
            if len(text) > MAX_STOP_CHARACTERS:
                raise RequestError(
                    f"{where} has {len(text)} characters; a stop string may have {MAX_STOP_CHARACTERS}", param="stop"
                )
        return stop

    @model_validator(mode="after")
    def _stream_options_need_stream(self) -> Self:
        if self.stream_options and not self.stream:
            raise RequestError(
                "stream_options belong to stream=true; set it, or leave them out", param="stream_options"
            )
        return self

    @property
    def include_usage(self) -> bool:
        """True when a last chunk with the usage is wanted."""
        return bool(self.stream_options and self.stream_options.include_usage)

    def params(self) -> SamplingParams:
        """The sampling parameters; RequestError names a bad one."""
        names = ("temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "max_tokens", "ignore_eos")
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        return SamplingParams(**{"max_tokens": self.default_max_tokens, **given})

    def ask(self) -> Ask:
        """What the engine is asked for."""
        raise NotImplementedError


PROMPT: dict[str, Any] = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "integer"}},
        {"type": "array", "items": {"type": "string"}},
        {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
    ]
}
"""Text or token ids, or several of either. Checked by hand: pydantic would complain of all four."""


class CompletionBody(Body):
    """POST /v1/completions."""

    default_max_tokens: ClassVar[int | None] = 16  # OpenAI's
    prompt: Annotated[Any, WithJsonSchema(PROMPT)]

    @field_validator("prompt")
    @classmethod
    def _text_or_tokens(cls, prompt: object) -> object:
        items = prompt if isinstance(prompt, list) else [prompt]
        if items and (all(isinstance(item, str) for item in items) or _are_ids(prompt)):
            return prompt
        if items and all(_are_ids(item) for item in items):
            return prompt
        raise RequestError("prompt must be a string, a list of token ids, or a list of either", param="prompt")

    def ask(self) -> Ask:
        """An answer (``choice``) for each prompt."""
        several = isinstance(self.prompt, list) and not _are_ids(self.prompt)
        return Ask(prompts=self.prompt if several else [self.prompt], params=self.params())


CONTENT: dict[str, Any] = {
    "anyOf": [
        {"type": "string"},
        {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
                "required": ["type", "text"],
            },
        },
    ]
}
"""Text, or its parts, which :class:`ChatMessage` puts together."""


class ChatMessage(BaseModel):
    """One turn of a conversation; whatever else a template might read is refused, not dropped."""

    model_config = ConfigDict(extra="forbid", strict=True)

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, WithJsonSchema(CONTENT)]
    name: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, values: object) -> object:
        """Clients send an earlier answer back as they got it, with a null for all that it did not have."""
        return {k: v for k, v in values.items() if v is not None} if isinstance(values, dict) else values

    @field_validator("content", mode="before")
    @classmethod
    def _only_text(cls, content: object) -> object:
        """OpenAI's list of parts, when all of them are text."""
        if not isinstance(content, list):
            return content
        parts = [
            part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in content
        ]
        if not all(isinstance(part, str) for part in parts):
            raise RequestError("only parts of type 'text' can be read; leave the others out", param="messages")
        return "".join(parts)  # type: ignore[arg-type]


class ChatBody(Body):
    """POST /v1/chat/completions."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if not self.messages:
            raise RequestError("messages is empty; send at least one", param="messages")
        if None not in (self.max_tokens, self.max_completion_tokens):
            raise RequestError("max_tokens and max_completion_tokens mean the same; send one", param="max_tokens")
        return self

    def ask(self) -> Ask:
        """The answer to the conversation."""
        messages = [message.model_dump(exclude_none=True) for message in self.messages]
        limit = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        return Ask(messages=messages, params=self.model_copy(update={"max_tokens": limit}).params())


def _are_ids(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)
