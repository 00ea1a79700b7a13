"""The JSON objects of all responses, in OpenAI's format; the same types define /openapi.json.

They are TypedDicts: a type checker verifies their fields, pydantic derives the description and writes the JSON. That
takes 1.5 µs for a chunk of a stream; pydantic's models take 6.3, ``json.dumps`` 4.2.
"""

from typing import Literal, NotRequired

from pydantic import ConfigDict, with_config
from typing_extensions import TypedDict

FinishReason = Literal["stop", "length", "tool_calls"]
"""stop: an end token, a stop string, or the end of the grammar. tool_calls: the same, after calls. length: max_tokens
or the context."""


@with_config(ConfigDict(extra="forbid"))
class Reply(TypedDict):
    """An object with the declared fields and no others."""


class ErrorDetail(Reply):
    """The error, and the field to change."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(Reply):
    """Every refusal."""

    error: ErrorDetail


class PromptTokensDetails(Reply):
    """Part of :class:`TokenUsage`."""

    cached_tokens: int
    """Tokens of the prompts that the prefix cache had."""


class TokenUsage(Reply):
    """Tokens of all completions of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class ReplyBase(Reply):
    """The fields common to all responses."""

    id: str
    created: int
    model: str


class PromptLogprob(Reply):
    """The log-probability of a token of the prompt, or of another one in its place."""

    logprob: float
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""vLLM's: for each token of the prompt by id the token and the most probable ones; null for the first."""


class CompletionLogprobs(Reply):
    """Log-probabilities of raw logits, entry i for token i; a token that is not UTF-8 is spelled by its bytes."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Reply):
    """The continuation of one prompt, or a piece of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    prompt_logprobs: NotRequired[PromptLogprobs]
    prompt_token_ids: NotRequired[list[int] | None]
    """In a stream, null but in the choice's first chunk; like ``token_ids``, with return_token_ids."""
    token_ids: NotRequired[list[int]]


class CompletionReply(ReplyBase):
    """POST /v1/completions."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: TokenUsage


class CompletionChunk(ReplyBase):
    """One event of its stream; ``usage`` only if stream_options requests it."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: NotRequired[TokenUsage | None]


class CalledFunction(Reply):
    """The function that the model calls; ``arguments`` is JSON."""

    name: NotRequired[str]
    arguments: str


class ToolCall(Reply):
    """A call that the model makes."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class ToolCallChunk(Reply):
    """A piece of a call: first its id, type and name, then more of its arguments."""

    index: int
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: CalledFunction


class AssistantMessage(Reply):
    """The model's message; ``content`` is null if it only calls tools."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: NotRequired[list[ToolCall]]


class TopLogprob(Reply):
    """A token and its log-probability."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(TopLogprob):
    """A generated token, and the most probable ones in its place."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(Reply):
    """Log-probabilities of raw logits, one entry per token."""

    content: list[ChatTokenLogprob]
    refusal: None


class ChatChoice(Reply):
    """The reply."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    token_ids: NotRequired[list[int]]


class ChatReply(ReplyBase):
    """POST /v1/chat/completions."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: TokenUsage
    prompt_logprobs: NotRequired[PromptLogprobs]
    prompt_token_ids: NotRequired[list[int]]


class Delta(Reply):
    """New content: first the role, then text."""

    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCallChunk]]


class ChatChunkChoice(Reply):
    """A piece of the reply."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    token_ids: NotRequired[list[int]]


class ChatChunk(ReplyBase):
    """One event of its stream; ``usage`` only if stream_options requests it."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: NotRequired[TokenUsage | None]
    prompt_token_ids: NotRequired[list[int]]
    """In the chunk of each choice's first token, with return_token_ids."""


class ModelCard(Reply):
    """The model that is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: Literal["colonnade"]
    max_model_len: int
    """Tokens that a request may have, prompt and output: the model's context, or what the cache holds of it."""
    capabilities: list[str]
    """The endpoints that the model supports: "completions", and "chat" if it has a chat template."""


class ModelList(Reply):
    """GET /v1/models."""

    object: Literal["list"]
    data: list[ModelCard]


class Health(Reply):
    """Liveness: only "ok" comes with status 200, also while the server loads its model or drains."""

    status: Literal["ok", "engine failed"]


class ReplicaCount(Reply):
    """Number of replicas that accept requests, and of all replicas."""

    up: int
    all: int


ReadinessStatus = Literal["ready", "loading", "draining", "queue full", "engine failed"]


class Readiness(Reply):
    """Whether new requests are accepted: only "ready" comes with status 200."""

    status: ReadinessStatus
    """The first other status of a model, if it has several."""
    models: NotRequired[dict[str, ReadinessStatus]]
    """Of each model, if it has several."""
    replicas: NotRequired[ReplicaCount]
    """Only of a server with several."""
