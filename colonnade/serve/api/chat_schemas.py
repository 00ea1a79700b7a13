"""The body of a chat: messages, tools, and variables of the chat template."""

from dataclasses import replace
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema, field_validator, model_validator

from colonnade.errors import RequestError
from colonnade.serve.api.reply_builders import LogprobsOptions
from colonnade.serve.api.request_schemas import Body
from colonnade.serve.client_json import parse_text, to_json_text
from colonnade.serve.generation_request import GenerationRequest
from colonnade.serve.sampling_params import MAX_LOGPROBS, SamplingParams
from colonnade.serve.structured_outputs import StructuredOutputs
from colonnade.serve.tool_calls import ToolNotation, ToolOptions

MAX_TOOLS = 128
"""Maximum number of tools of a request."""

MAX_TOOLS_BYTES = 256 << 10
"""Size limit of the tools of a request as JSON [bytes]."""

RESERVED_VARIABLES = frozenset(
    {"messages", "tools", "add_generation_prompt", "continue_last", "bos_token", "eos_token", "self"}
)
"""Variables of a chat template that ``chat_template_kwargs`` may not set."""

IGNORED_FIELDS = frozenset({"annotations", "provider_specific_fields"})
"""Fields that clients (OpenAI's, litellm) add to a reply and send back with it; templates do not see them."""

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


class CalledFunction(BaseModel):
    """``function`` of a tool call."""

    model_config = ConfigDict(extra="forbid", strict=True)
    name: str
    arguments: str

    def arguments_object(self) -> dict[str, Any]:
        """The arguments as templates expect them."""
        where = f"the arguments of the tool call '{self.name[:80]}'"
        values = parse_text(self.arguments or "{}", "messages", where)
        if not isinstance(values, dict):
            raise RequestError(f"{where} are not a JSON object; send them as they were generated", param="messages")
        return values


class ToolCall(BaseModel):
    """A call in an earlier reply."""

    model_config = ConfigDict(extra="forbid", strict=True)
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None


class ChatMessage(BaseModel):
    """One message of a conversation; other fields are refused, since a template might read them."""

    model_config = ConfigDict(extra="forbid", strict=True)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str, WithJsonSchema(CONTENT)] = ""
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def _has_the_fields_of_its_role(self) -> Self:
        if "content" not in self.model_fields_set and not self.tool_calls:
            raise RequestError(f"the message of role '{self.role}' has no content; send text", param="messages")
        for name, role in (("tool_calls", "assistant"), ("tool_call_id", "tool")):
            if getattr(self, name) and self.role != role:
                raise RequestError(f"{name} belong to the role '{role}', not '{self.role}'", param="messages")
        return self

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates expect it."""
        message = self.model_dump(include={"role", "content", "name", "tool_call_id"}, exclude_none=True)
        if self.tool_calls:
            calls = [(call.id, call.function.name, call.function.arguments_object()) for call in self.tool_calls]
            message["tool_calls"] = [
                {"id": key, "type": "function", "function": {"name": name, "arguments": arguments}}
                for key, name, arguments in calls
            ]
        return message

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, values: object) -> object:
        """Drop nulls and empty lists of calls: clients send an earlier reply back as they received it."""
        if not isinstance(values, dict):
            return values
        return {k: v for k, v in values.items() if v is not None and v != [] and k not in IGNORED_FIELDS}

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
            raise RequestError("only parts of type 'text' are supported; remove the others", param="messages")
        return "".join(parts)  # type: ignore[arg-type]


class ToolFunction(BaseModel):
    """``function`` of a tool."""

    model_config = ConfigDict(extra="forbid", strict=True)
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(BaseModel):
    """A function that the model may call; its arguments always follow ``parameters``, a JSON schema of an object."""

    model_config = ConfigDict(extra="forbid", strict=True)
    type: Literal["function"]
    function: ToolFunction


class NamedFunction(BaseModel):
    """``function`` of a tool choice."""

    model_config = ConfigDict(extra="forbid", strict=True)
    name: str


class NamedTool(BaseModel):
    """The tool that must be called."""

    model_config = ConfigDict(extra="forbid", strict=True)
    type: Literal["function"]
    function: NamedFunction


class ChatBody(Body):
    """POST /v1/chat/completions."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    tools: list[Tool] | None = Field(default=None, max_length=MAX_TOOLS)
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if not self.messages:
            raise RequestError("messages is empty; send at least one", param="messages")
        if None not in (self.max_tokens, self.max_completion_tokens):
            raise RequestError("max_tokens and max_completion_tokens mean the same; send one", param="max_tokens")
        if self.continue_final_message and (self.add_generation_prompt or self.messages[-1].role != "assistant"):
            raise RequestError(
                "continue_final_message continues a last message of role 'assistant', without add_generation_prompt",
                param="continue_final_message",
            )
        if reserved := RESERVED_VARIABLES.intersection(self.chat_template_kwargs or ()):
            raise RequestError(
                f"chat_template_kwargs may not set '{min(reserved)}', which the server sets; remove it",
                param="chat_template_kwargs",
            )
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs=true; set it", param="top_logprobs")
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

    def tool_options(self, notation: ToolNotation) -> ToolOptions | None:
        """Which tools the response may call, in the model's notation; None if it is plain text."""
        choice = self.tool_choice or ("auto" if self.tools else "none")
        if choice in ("none", "auto") and not self.tools:
            return None
        tools = self._tools()
        if isinstance(choice, NamedTool):
            names = [tool["function"]["name"] for tool in tools]
            tools = [tool for tool in tools if tool["function"]["name"] == choice.function.name]
            if not tools:
                raise RequestError(
                    f"tool_choice names '{choice.function.name[:80]}', which is not one of the tools: "
                    f"{', '.join(names) or 'there are none'}",
                    param="tool_choice",
                )
        if not tools:
            raise RequestError("tool_choice is 'required' but there are no tools; send tools", param="tool_choice")
        if choice == "none":
            return None
        if choice == "auto" and not notation.in_template:
            raise RequestError(
                "this model's chat template does not show tools to the model, so it cannot choose one; send "
                "tool_choice 'required' or a named function for a call, or 'none' for a text response",
                param="tools",
            )
        several = self.parallel_tool_calls is not False and not isinstance(choice, NamedTool)
        return ToolOptions(notation=notation, tools=tools, required=choice != "auto", parallel=several)

    def _tools(self) -> list[dict[str, Any]]:
        tools = [tool.model_dump(exclude_none=True) for tool in self.tools or ()]
        if (size := len(to_json_text(tools, "tools", "tools").encode())) > MAX_TOOLS_BYTES:
            raise RequestError(f"tools have {size} bytes as JSON; send at most {MAX_TOOLS_BYTES}", param="tools")
        for tool in tools:
            name, parameters = tool["function"]["name"], tool["function"].get("parameters", {})
            if parameters.get("type", "object") != "object":
                raise RequestError(f"parameters of the tool '{name}' must have the type 'object'", param="tools")
        return tools

    def to_generation_request(self, options: ToolOptions | None = None) -> GenerationRequest:
        """The reply to the conversation, with calls as in ``options``."""
        limit = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        params = self.model_copy(update={"max_tokens": limit}).params()
        if options is not None:
            params = _with_tools(params, options)
        template: dict[str, Any] = dict(self.chat_template_kwargs or {})
        if self.tools:
            template["tools"] = self._tools()
        if self.add_generation_prompt is not None:
            template["add_generation_prompt"] = self.add_generation_prompt
        if self.continue_final_message:
            template["continue_last"] = True
        messages = [message.for_template() for message in self.messages]
        return GenerationRequest(messages=messages, params=params, n=self.n or 1, template=template)


def _with_tools(params: SamplingParams, options: ToolOptions) -> SamplingParams:
    if params.structured_outputs is not None:
        raise RequestError(
            "tools and a response format are mutually exclusive; send one, or tool_choice 'none'",
            param="response_format",
        )
    try:
        grammar = StructuredOutputs(grammar=options.grammar())
    except RequestError as error:
        raise RequestError(f"the tools' grammar is too large: {error}", param="tools") from None
    return replace(params, structured_outputs=grammar, skip_special_tokens=False)
