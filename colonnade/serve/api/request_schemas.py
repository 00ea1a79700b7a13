"""OpenAI's request bodies, validated before anything reaches the engine: the common part, and completions.

An unsupported parameter is refused by name, unless its value has no effect (``suffix=""``): silently ignoring a
parameter would give a wrong result. Parameters that never change the text (``user``, ``metadata``) are accepted. An
unknown parameter is refused, with the closest known one.
"""

from dataclasses import fields
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema, field_validator, model_validator

from colonnade.errors import RequestError
from colonnade.serve.api.errors import format_value
from colonnade.serve.api.parameters import are_ids, known_parameters
from colonnade.serve.api.reply_builders import LogprobsOptions
from colonnade.serve.generation_request import GenerationRequest
from colonnade.serve.sampling_params import MAX_LOGPROBS, SamplingParams
from colonnade.serve.structured_outputs import StructuredOutputs

MAX_STOP_CHARACTERS = 512
"""Length limit of a stop string: each is searched for at every token."""

MAX_CHOICES = 16
"""Maximum ``n``."""

MAX_TOKEN_DIGITS = 9
"""Maximum length of a token id in ``logit_bias``."""
MAX_PRIORITY = 100
"""Maximum absolute value of a priority: a request rises one class in 30 s, and each must eventually become the
first."""

MAX_TIMEOUT_S = 1e6
"""Maximum timeout [s]."""

UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "top_logprobs": (0,),
    "echo": (False,),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
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
    "user", "metadata", "store", "service_tier", "safety_identifier", "prediction",
    "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention",
}  # fmt: skip
"""Parameters that never change the text."""


LIMITS: dict[str, dict[str, Any]] = {
    "temperature": {"minimum": 0},
    "top_p": {"exclusiveMinimum": 0, "maximum": 1},
    "top_k": {"minimum": 0},
    "min_p": {"minimum": 0, "maximum": 1},
    "frequency_penalty": {"minimum": -2, "maximum": 2},
    "presence_penalty": {"minimum": -2, "maximum": 2},
    "repetition_penalty": {"minimum": 0.001, "maximum": 1000},
    "logprobs": {"minimum": 0, "maximum": MAX_LOGPROBS},
    "top_logprobs": {"minimum": 0, "maximum": MAX_LOGPROBS},
    "prompt_logprobs": {"minimum": 0, "maximum": MAX_LOGPROBS},
    "max_tokens": {"minimum": 0},
    "min_tokens": {"minimum": 0},
    "messages": {"minItems": 1},
    "guided_choice": {"minItems": 1},
}
"""Limits in /openapi.json of fields that :class:`SamplingParams`, or the endpoint, checks."""


def _describe_limits(schema: dict[str, Any]) -> None:
    for name in LIMITS.keys() & schema["properties"].keys():
        schema["properties"][name] |= LIMITS[name]


class StreamOptions(BaseModel):
    """``stream_options``."""

    model_config = ConfigDict(extra="forbid", strict=True)
    include_usage: bool = False
    continuous_usage_stats: bool = False


class JsonSchema(BaseModel):
    """``response_format.json_schema``; only ``schema`` has an effect, and it is always strict."""

    model_config = ConfigDict(extra="forbid", strict=True)
    name: str
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(BaseModel):
    """``response_format``."""

    model_config = ConfigDict(extra="forbid", strict=True)
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise RequestError(
                "response_format.json_schema and the type 'json_schema' must be sent together; send both or neither",
                param="response_format",
            )
        return self

    @property
    def structured_outputs(self) -> StructuredOutputs | None:
        """The grammar that the text must match, if any."""
        if self.json_schema is not None and self.json_schema.schema_ is not None:
            return StructuredOutputs(json=self.json_schema.schema_)
        return None if self.type == "text" else StructuredOutputs(json_object=True)


class SamplingFields(BaseModel):
    """The sampling parameters of all endpoints that generate. None, also an explicit null, means the default."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    bad_words: list[str] | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None


class SchedulingFields(BaseModel):
    """When a request runs, and for how long at most."""

    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = None
    timeout_s: Annotated[float, Field(gt=0, le=MAX_TIMEOUT_S)] | None = None


class Body(SamplingFields, SchedulingFields):
    """The fields of completions and chats."""

    model_config = ConfigDict(json_schema_extra=_describe_limits)
    default_max_tokens: ClassVar[int | None] = None

    model: str | None = None
    max_tokens: int | None = None
    prompt_logprobs: int | None = None
    n: int | None = Field(default=None, ge=1, le=MAX_CHOICES)
    best_of: int | None = None
    skip_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | bool | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @model_validator(mode="before")
    @classmethod
    def _supported(cls, values: object) -> object:
        if not isinstance(values, dict):
            return values
        return known_parameters(values, cls.model_fields, IGNORED, UNSUPPORTED)

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
            raise RequestError("stream_options needs stream=true; set it, or remove them", param="stream_options")
        return self

    @model_validator(mode="after")
    def _prompt_logprobs_are_not_streamed(self) -> Self:
        if self.prompt_logprobs is not None and self.stream:
            raise RequestError(
                "prompt_logprobs cannot be streamed; remove stream, or use echo and logprobs of /v1/completions",
                param="prompt_logprobs",
            )
        return self

    @model_validator(mode="after")
    def _best_of_is_n(self) -> Self:
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise RequestError(
                f"best_of is {self.best_of} and n is {self.n or 1}: all choices are returned; remove best_of",
                param="best_of",
            )
        return self

    @field_validator("logit_bias")
    @classmethod
    def _token_ids(cls, bias: dict[str, float] | None) -> dict[str, float] | None:
        for token in bias or ():
            if not token.isascii() or not token.isdigit() or len(token) > MAX_TOKEN_DIGITS:
                raise RequestError(
                    f"logit_bias has the key '{token[:80]}'; its keys must be token ids", param="logit_bias"
                )
        return bias

    @property
    def include_usage(self) -> bool:
        """True if a final chunk with the usage is requested."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Whether every chunk of the stream has the usage so far."""
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    def params(self) -> SamplingParams:
        """The sampling parameters; raises RequestError for a bad one."""
        names = ("max_tokens", "prompt_logprobs", "skip_special_tokens", *SamplingFields.model_fields)
        given: dict[str, Any] = {name: value for name in names if (value := getattr(self, name)) is not None}
        given["logit_bias"] = {int(token): bias for token, bias in (self.logit_bias or {}).items()}
        given["structured_outputs"] = self._structured_outputs()
        given["return_prompt_ids"] = bool(self.return_token_ids)
        given = {"max_tokens": self.default_max_tokens, **given, **self._more_params()}
        return SamplingParams(**given)

    def _more_params(self) -> dict[str, Any]:
        """Sampling parameters that the endpoints spell differently."""
        return {}

    def _structured_outputs(self) -> StructuredOutputs | None:
        """The grammar that the text must match, from the one field that sets it: OpenAI's, vLLM's, or vLLM's older
        ones.
        """
        found: dict[str, StructuredOutputs] = {}
        if self.response_format is not None and (wanted := self.response_format.structured_outputs):
            found["response_format"] = wanted
        if self.structured_outputs is not None:
            found["structured_outputs"] = _structured_outputs(self.structured_outputs)
        for kind in ("json", "regex", "choice", "grammar"):
            if (value := getattr(self, name := f"guided_{kind}")) is not None:
                found[name] = StructuredOutputs(**{kind: value})
        if len(found) > 1:
            raise RequestError(f"{' and '.join(found)} are mutually exclusive; send one", param=[*found][1])
        return next(iter(found.values()), None)

    @property
    def logprobs_options(self) -> LogprobsOptions:
        """Which log-probabilities the reply has."""
        raise NotImplementedError

    def to_generation_request(self) -> GenerationRequest:
        """The request for the engine."""
        raise NotImplementedError


def _structured_outputs(values: dict[str, Any]) -> StructuredOutputs:
    known = [each.name for each in fields(StructuredOutputs)]
    given = {name: value for name, value in values.items() if value is not None}
    if (unknown := next((name for name in given if name not in known), None)) is not None:
        raise RequestError(
            f"structured_outputs has the unknown field '{unknown[:80]}'; it may have one of {', '.join(known)}",
            param="structured_outputs",
        )
    return StructuredOutputs(**given)


_IDS: dict[str, Any] = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
PROMPT: dict[str, Any] = {
    "anyOf": [
        {"type": "string"},
        _IDS,
        {"type": "array", "items": {"type": "string"}, "minItems": 1},
        {"type": "array", "items": _IDS, "minItems": 1},
    ]
}
"""Text or token ids, or a list of either. Checked by hand: pydantic's error would describe all four."""


class CompletionBody(Body):
    """POST /v1/completions."""

    default_max_tokens: ClassVar[int | None] = 16  # OpenAI's
    prompt: Annotated[Any, WithJsonSchema(PROMPT)]
    logprobs: int | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None
    beams: int | None = None
    length_penalty: float | None = None
    source_lang: str | None = None
    target_lang: str | None = None

    @model_validator(mode="after")
    def _beams_give_one_choice(self) -> Self:
        if self.beams is not None and self.beams > 1 and (self.n or 1) > 1:
            raise RequestError(
                "n and beams are mutually exclusive: beam search returns one best text; remove n", param="n"
            )
        return self

    def _more_params(self) -> dict[str, Any]:
        prompt = self.prompt_logprobs
        if self.echo and self.logprobs is not None:
            prompt = max(self.logprobs, prompt or 0)
        return {
            "logprobs": self.logprobs, "prompt_logprobs": prompt, "echo": bool(self.echo),
            "source_lang": self.source_lang, "target_lang": self.target_lang,
            "beams": 1 if self.beams is None else self.beams,
            "length_penalty": 1.0 if self.length_penalty is None else self.length_penalty,
        }  # fmt: skip

    @property
    def logprobs_options(self) -> LogprobsOptions:
        """Which log-probabilities the reply has."""
        return LogprobsOptions(self.logprobs, self.prompt_logprobs, bool(self.echo))

    @field_validator("prompt")
    @classmethod
    def _text_or_tokens(cls, prompt: object) -> object:
        items = prompt if isinstance(prompt, list) else [prompt]
        if items and (all(isinstance(item, str) for item in items) or are_ids(prompt)):
            return prompt
        if items and all(are_ids(item) for item in items):
            return prompt
        raise RequestError("prompt must be a string, a list of token ids, or a list of either", param="prompt")

    def to_generation_request(self) -> GenerationRequest:
        """One completion for each prompt."""
        several = isinstance(self.prompt, list) and not are_ids(self.prompt)
        prompts, special = self.prompt if several else [self.prompt], self.add_special_tokens is not False
        return GenerationRequest(prompts=prompts, params=self.params(), n=self.n or 1, special=special)
