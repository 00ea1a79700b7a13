"""The body of OpenAI's POST /v1/responses, translated to that of a chat; nothing is stored between requests.

    instructions                    a first message of role 'system'
    input: message                  a message
    input: function_call            a tool call of the assistant's message
    input: function_call_output     a message of role 'tool'
    text.format                     response_format
    max_output_tokens               max_completion_tokens

What needs a store (``store``, ``previous_response_id``, ``conversation``), a queue (``background``) or tools that
OpenAI runs is refused by name.
"""

from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, WithJsonSchema, model_validator

from colonnade.errors import RequestError
from colonnade.serve.api.chat_schemas import MAX_TOOLS, ChatBody
from colonnade.serve.api.errors import format_value, validation_error
from colonnade.serve.api.parameters import known_parameters
from colonnade.serve.api.request_schemas import SamplingFields, SchedulingFields

UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "store": (False,),
    "previous_response_id": (),
    "conversation": (),
    "background": (False,),
    "prompt": (),
    "include": ([],),
    "max_tool_calls": (),
    "reasoning": ({}, {"effort": None, "summary": None}, {"effort": "none"}),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
    "context_management": ([],),
}
"""Parameters that are refused, with the values that have no effect and are accepted (like null)."""

IGNORED = {"user", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"}
"""Parameters that never change the text."""

CHAT_NAMES = {
    "messages": "input", "response_format": "text", "structured_outputs": "text", "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
}  # fmt: skip
"""Parameters of a chat, and their names here."""

CHAT_PARAMETERS = (*SamplingFields.model_fields, "chat_template_kwargs", "parallel_tool_calls")
"""Parameters that are those of a chat."""

_IGNORED_OUTPUT_FIELDS = frozenset({"id", "status", "phase", "annotations", "logprobs", "parsed", "parsed_arguments"})
"""Fields of earlier outputs that clients send back, and that mean nothing to the model."""

INPUT: dict[str, Any] = {
    "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}, "minItems": 1}],
}
"""Text, or items: messages, function calls and their outputs. Checked by hand: pydantic would describe each kind."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class TextFormat(_Strict):
    """``text.format``; a JSON schema is always strict."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> Self:
        if (self.type == "json_schema") != (self.schema_ is not None):
            raise RequestError(
                "text.format.schema and the type 'json_schema' must be sent together; send both or neither",
                param="text",
            )
        return self

    def to_chat(self) -> dict[str, Any] | None:
        """``response_format`` of a chat."""
        if self.type != "json_schema":
            return {"type": self.type}
        return {"type": self.type, "json_schema": {"name": self.name or "answer", "schema": self.schema_}}


class TextConfig(_Strict):
    """``text``."""

    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class FunctionTool(_Strict):
    """A function that the model may call."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def to_chat(self) -> dict[str, Any]:
        """The tool of a chat."""
        return {"type": "function", "function": self.model_dump(exclude={"type"}, exclude_none=True)}


class NamedFunction(_Strict):
    """The function that must be called."""

    type: Literal["function"]
    name: str


class StreamOptions(_Strict):
    """``stream_options``; obfuscation, which hides the lengths of deltas, is not implemented."""

    include_obfuscation: Literal[False] | None = None


class ResponsesBody(SamplingFields, SchedulingFields):
    """POST /v1/responses."""

    include_usage: ClassVar[bool] = False
    continuous_usage: ClassVar[bool] = False

    model: str | None = None
    input: Annotated[Any, WithJsonSchema(INPUT)]
    instructions: str | None = None
    max_output_tokens: int | None = Field(default=None, ge=1)
    metadata: dict[str, str] | None = None
    tools: list[FunctionTool] | None = Field(default=None, max_length=MAX_TOOLS)
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="before")
    @classmethod
    def _supported(cls, values: object) -> object:
        if not isinstance(values, dict):
            return values
        known = known_parameters(values, cls.model_fields, IGNORED, UNSUPPORTED, ": this server stores nothing")
        tools = values.get("tools")
        for i, tool in enumerate(tools if isinstance(tools, list) else ()):
            kind = tool.get("type") if isinstance(tool, dict) else tool
            if kind != "function":
                what = f"tools.{i} has the type {format_value(kind)}, which this server does not run; send functions"
                raise RequestError(what, param="tools")
        return known

    @model_validator(mode="after")
    def _is_a_chat(self) -> Self:
        _ = self.chat
        return self

    @cached_property
    def chat(self) -> ChatBody:
        """The same as a chat; raises :class:`RequestError` for what a chat cannot represent."""
        values: dict[str, Any] = {name: value for name in CHAT_PARAMETERS if (value := getattr(self, name)) is not None}
        values["messages"] = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        values["messages"] += to_messages(self.input)
        values["max_completion_tokens"] = self.max_output_tokens
        values["tools"] = [tool.to_chat() for tool in self.tools or ()] or None
        choice = self.tool_choice
        if isinstance(choice, NamedFunction):
            values["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
        else:
            values["tool_choice"] = choice
        if self.text is not None and self.text.format is not None:
            values["response_format"] = self.text.format.to_chat()
        try:
            return ChatBody.model_validate(values)
        except ValidationError as error:
            raise renamed(validation_error(error)) from None
        except RequestError as error:
            raise renamed(error) from None


def renamed(error: RequestError) -> RequestError:
    """``error`` about a chat, with the parameter's name in this API."""
    if error.param in CHAT_NAMES:
        error.param = CHAT_NAMES[error.param]
    return error


def to_messages(given: object) -> list[dict[str, Any]]:
    """The messages of a chat for ``input``: text or items."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise RequestError("input must be a string, or a non-empty list of items", param="input")
    messages: list[dict[str, Any]] = []
    for i, item in enumerate(given):
        if not isinstance(item, dict):
            raise RequestError(f"input.{i} is {format_value(item)}; it must be an object", param="input")
        values = {
            name: value for name, value in item.items() if value is not None and name not in _IGNORED_OUTPUT_FIELDS
        }
        match kind := values.pop("type", "message"):
            case "message":
                messages.append(_message(values, i))
            case "function_call":
                call = _tool_call(values, i)
                if not messages or messages[-1]["role"] != "assistant":
                    messages.append({"role": "assistant", "tool_calls": []})
                messages[-1].setdefault("tool_calls", []).append(call)
            case "function_call_output":
                _check_fields(values, {"call_id", "output"}, f"input.{i}")
                content = _text(values["output"], f"input.{i}.output")
                messages.append({"role": "tool", "content": content, "tool_call_id": values["call_id"]})
            case _:
                raise RequestError(
                    f"input.{i} has the type {format_value(kind)}; it may be message, function_call or "
                    "function_call_output",
                    param="input",
                )
    return messages


def _message(values: Mapping[str, Any], i: int) -> dict[str, Any]:
    _check_fields(values, {"role", "content"}, f"input.{i}")
    return {"role": values["role"], "content": _text(values["content"], f"input.{i}.content")}


def _tool_call(values: Mapping[str, Any], i: int) -> dict[str, Any]:
    _check_fields(values, {"call_id", "name", "arguments"}, f"input.{i}")
    function = {"name": values["name"], "arguments": values["arguments"]}
    return {"id": values["call_id"], "type": "function", "function": function}


def _check_fields(values: Mapping[str, Any], expected: set[str], where: str) -> None:
    if missing := sorted(expected - values.keys()):
        raise RequestError(f"{where} has no '{missing[0]}'; send it", param="input")
    if unknown := sorted(values.keys() - expected):
        raise RequestError(f"{where} has the unknown field '{unknown[0][:80]}'; remove it", param="input")


def _text(content: object, where: str) -> str:
    """Text, or parts of text joined."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(f"{where} is {format_value(content)}; it must be a string or a list of parts", param="input")
    parts: list[str] = []
    for j, part in enumerate(content):
        kind, text = (part.get("type"), part.get("text")) if isinstance(part, dict) else (part, None)
        if kind not in ("input_text", "output_text", "text") or not isinstance(text, str):
            what = (
                f"{where}.{j} is a part of type {format_value(kind)}; only text (input_text, output_text) is supported"
            )
            raise RequestError(f"{what}; remove the others", param="input")
        parts.append(text)
    return "".join(parts)
