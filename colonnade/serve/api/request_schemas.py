"""OpenAI's request bodies, validated before anything reaches the engine.

An unsupported parameter is refused by name, unless its value has no effect (``n=1``): an answer that silently ignores a
penalty is a wrong answer. Parameters that never change the text (``user``, ``metadata``) are
accepted. An unknown parameter is refused, with the nearest known one.
"""

import difflib
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema, field_validator, model_validator

from colonnade.errors import RequestError
from colonnade.serve.api.errors import format_value
from colonnade.serve.api.replies import LogprobsOptions
from colonnade.serve.ipc import GenerationRequest
from colonnade.serve.sampling_params import MAX_LOGPROBS, SamplingParams

MAX_STOP_CHARACTERS = 512
"""Length limit of a stop string: each is searched for at every token."""

MAX_PRIORITY = 100
"""Largest absolute value of a priority: a request rises one class in 30 s, and each must become the first some day."""

MAX_TIMEOUT_S = 1e6
"""Largest timeout [s]."""

SIMILARITY_CUTOFF = 0.75
"""Least similarity of an unknown name to the one suggested in its place (difflib's ratio)."""

UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "top_logprobs": (0,),
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
"""Parameters that are refused, with the values that have no effect and are accepted (like null).

A body that has a field of that name accepts it.
"""

IGNORED = {
    "user", "metadata", "store", "service_tier", "safety_identifier", "parallel_tool_calls", "prediction",
    "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention",
}  # fmt: skip
"""Parameters that never change the text."""


class StreamOptions(BaseModel):
    """``stream_options``."""

    model_config = ConfigDict(extra="forbid", strict=True)
    include_usage: bool = False
    continuous_usage_stats: bool = False


class Body(BaseModel):
    """The fields of both endpoints. None, also an explicit null, means the default."""

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
    prompt_logprobs: int | None = None
    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = None
    timeout_s: Annotated[float, Field(gt=0, le=MAX_TIMEOUT_S)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @model_validator(mode="before")
    @classmethod
    def _supported(cls, values: object) -> object:
        if not isinstance(values, dict):
            return values
        for name, neutral in UNSUPPORTED.items():
            value = None if name in cls.model_fields else values.get(name)
            if value is not None and not any(value == none and type(value) is type(none) for none in neutral):
                what = name if isinstance(value, list | dict) else f"{name}={format_value(value)}"
                raise RequestError(f"{what} is not supported; leave it out", param=name)
        known = set(cls.model_fields) | set(UNSUPPORTED) | IGNORED
        for name in values:
            if name not in known:
                near = difflib.get_close_matches(name[:80], sorted(cls.model_fields), n=1, cutoff=SIMILARITY_CUTOFF)
                remedy = f"did you mean '{near[0]}'?" if near else "leave it out"
                what = f"unknown parameter '{name[:80]}'; {remedy}"
                raise RequestError(what, param=name[:80], code="unknown_parameter")
        return {name: value for name, value in values.items() if name in cls.model_fields}

    @field_validator("stop", mode="before")
    @classmethod
    def _short_texts(cls, stop: object) -> object:
        """Check a string or a list of strings; pydantic's error would describe both alternatives."""
        several = isinstance(stop, list)
        for i, text in enumerate(stop if several else [] if stop is None else [stop]):
            where = f"stop.{i}" if several else "stop"
            if not isinstance(text, str):
                wanted = "a string" if several else "a string or a list of strings"
                raise RequestError(f"{where} is {format_value(text)}; it must be {wanted}", param="stop")
            if len(text) > MAX_STOP_CHARACTERS:
                raise RequestError(
                    f"{where} has {len(text)} characters; a stop string may have at most {MAX_STOP_CHARACTERS}",
                    param="stop",
                )
        return stop

    @model_validator(mode="after")
    def _stream_options_need_stream(self) -> Self:
        if self.stream_options and not self.stream:
            raise RequestError(
                "stream_options belong to stream=true; set it, or leave them out", param="stream_options"
            )
        return self

    @model_validator(mode="after")
    def _prompt_logprobs_are_not_streamed(self) -> Self:
        if self.prompt_logprobs is not None and self.stream:
            raise RequestError(
                "prompt_logprobs are not part of a stream; leave stream out, or use echo and logprobs of "
                "/v1/completions",
                param="prompt_logprobs",
            )
        return self

    @property
    def include_usage(self) -> bool:
        """True if a last chunk with the usage is wanted."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Whether every chunk of the stream has the usage so far."""
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    def params(self) -> SamplingParams:
        """The sampling parameters; raises RequestError for a bad one."""
        names = (
            "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "max_tokens", "ignore_eos",
            "prompt_logprobs",
        )  # fmt: skip
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        return SamplingParams(**{"max_tokens": self.default_max_tokens, **given, **self._more_params()})

    def _more_params(self) -> dict[str, Any]:
        """Sampling parameters that the endpoints spell differently."""
        return {}

    @property
    def logprobs_options(self) -> LogprobsOptions:
        """Which log-probabilities the reply has."""
        raise NotImplementedError

    def to_generation_request(self) -> GenerationRequest:
        """The request for the engine."""
        raise NotImplementedError


PROMPT: dict[str, Any] = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "integer"}},
        {"type": "array", "items": {"type": "string"}},
        {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
    ]
}
"""Text or token ids, or a list of either. Checked by hand: pydantic's error would describe all four."""


class CompletionBody(Body):
    """POST /v1/completions."""

    default_max_tokens: ClassVar[int | None] = 16  # OpenAI's
    prompt: Annotated[Any, WithJsonSchema(PROMPT)]
    logprobs: int | None = None
    echo: bool | None = None

    def _more_params(self) -> dict[str, Any]:
        prompt = self.prompt_logprobs
        if self.echo and self.logprobs is not None:
            prompt = max(self.logprobs, prompt or 0)
        return {"logprobs": self.logprobs, "prompt_logprobs": prompt, "echo": bool(self.echo)}

    @property
    def logprobs_options(self) -> LogprobsOptions:
        """Which log-probabilities the reply has."""
        return LogprobsOptions(self.logprobs, self.prompt_logprobs, bool(self.echo))

    @field_validator("prompt")
    @classmethod
    def _text_or_tokens(cls, prompt: object) -> object:
        items = prompt if isinstance(prompt, list) else [prompt]
        if items and (all(isinstance(item, str) for item in items) or _are_ids(prompt)):
            return prompt
        if items and all(_are_ids(item) for item in items):
            return prompt
        raise RequestError("prompt must be a string, a list of token ids, or a list of either", param="prompt")

    def to_generation_request(self) -> GenerationRequest:
        """One completion for each prompt."""
        several = isinstance(self.prompt, list) and not _are_ids(self.prompt)
        return GenerationRequest(prompts=self.prompt if several else [self.prompt], params=self.params())


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
"""Text, or parts of text that :class:`ChatMessage` joins."""


class ChatMessage(BaseModel):
    """One message of a conversation; other fields are refused, since a template might read them."""

    model_config = ConfigDict(extra="forbid", strict=True)

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, WithJsonSchema(CONTENT)]
    name: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, values: object) -> object:
        """Drop nulls: clients send an earlier answer back as they received it."""
        return {k: v for k, v in values.items() if v is not None} if isinstance(values, dict) else values

    @field_validator("content", mode="before")
    @classmethod
    def _only_text(cls, content: object) -> object:
        """Join OpenAI's list of parts, if all of them are text."""
        if not isinstance(content, list):
            return content
        parts = [
            part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in content
        ]
        if not all(isinstance(part, str) for part in parts):
            raise RequestError("only parts of type 'text' are supported; leave the others out", param="messages")
        return "".join(parts)  # type: ignore[arg-type]


class ChatBody(Body):
    """POST /v1/chat/completions."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if not self.messages:
            raise RequestError("messages is empty; send at least one", param="messages")
        if None not in (self.max_tokens, self.max_completion_tokens):
            raise RequestError("max_tokens and max_completion_tokens mean the same; send one", param="max_tokens")
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs belong to logprobs=true; set it", param="top_logprobs")
        if not 0 <= (self.top_logprobs or 0) <= MAX_LOGPROBS:
            raise RequestError(
                f"top_logprobs is {self.top_logprobs}; it must be from 0 to {MAX_LOGPROBS}", param="top_logprobs"
            )
        return self

    def _more_params(self) -> dict[str, Any]:
        return {"logprobs": self.logprobs_options.top}

    @property
    def logprobs_options(self) -> LogprobsOptions:
        """Which log-probabilities the reply has."""
        return LogprobsOptions((self.top_logprobs or 0) if self.logprobs else None, self.prompt_logprobs)

    def to_generation_request(self) -> GenerationRequest:
        """The answer to the conversation."""
        messages = [message.model_dump(exclude_none=True) for message in self.messages]
        limit = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        return GenerationRequest(messages=messages, params=self.model_copy(update={"max_tokens": limit}).params())


def _are_ids(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)
