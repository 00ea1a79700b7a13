"""Builds the responses of /v1/completions and /v1/chat/completions from an engine's outputs, whole or as chunks."""

import time
import uuid
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple, cast

from colonnade.serve.api.replies import (
    AssistantMessage,
    CalledFunction,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatLogprobs,
    ChatReply,
    ChatTokenLogprob,
    CompletionChoice,
    CompletionChunk,
    CompletionReply,
    Delta,
    FinishReason,
    PromptLogprobs,
    ReplyBase,
    TokenUsage,
    ToolCall,
    ToolCallChunk,
    TopLogprob,
)
from colonnade.serve.request import Alternative, Output, TokenLogprob
from colonnade.serve.tool_calls import ToolCallDelta, ToolCallParser, ToolFormat


@dataclass
class Usage:
    """Counts the tokens of all completions of one request."""

    n: int = 1
    """Choices for each prompt, whose tokens are counted once."""
    prompt: dict[int, int] = field(default_factory=dict)
    generated: dict[int, int] = field(default_factory=dict)
    cached: dict[int, int] = field(default_factory=dict)

    def add(self, index: int, output: Output) -> None:
        """Record the newest output of completion ``index``."""
        self.prompt[index], self.generated[index] = output.prompt_tokens, output.generated_tokens
        self.cached[index] = output.cached_tokens

    def reply(self) -> TokenUsage:
        """The totals."""
        prompt, cached = (
            sum(count for index, count in counts.items() if index % self.n == 0)
            for counts in (self.prompt, self.cached)
        )
        generated = sum(self.generated.values())
        return {
            "prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated,
            "prompt_tokens_details": {"cached_tokens": cached},
        }  # fmt: skip


class LogprobsOptions(NamedTuple):
    """Which log-probabilities a reply has."""

    top: int | None = None
    """Alternatives to each token; None for no log-probabilities."""
    prompt: int | None = None
    """The same for ``prompt_logprobs``."""
    echo: bool = False
    """Whether the prompt's tokens come before the generated ones."""


class CompletionReplies:
    """Builds the response to one request of /v1/completions."""

    prefix: ClassVar = "cmpl"
    sends_text_unchanged = True
    """Whether a chunk has the output's text unchanged: false if it is parsed for tool calls."""

    def __init__(self, model: str, logprobs: LogprobsOptions, *, token_ids: bool = False):
        """``token_ids``: with the ids of prompts and tokens."""
        self.logprobs, self.token_ids = logprobs, token_ids
        self._base: ReplyBase = {
            "id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model,
        }  # fmt: skip

    def whole(self, completions: list[list[Output]], usage: Usage) -> CompletionReply | ChatReply:
        """The complete response, from all outputs of each completion."""
        choices = [self._choice(i, outputs) for i, outputs in enumerate(completions)]
        return {**self._base, "object": "text_completion", "choices": choices, "usage": usage.reply()}

    def first_chunk(self, index: int) -> CompletionChunk | ChatChunk | None:
        """The chunk before the first text, if there is one."""
        return None

    def chunk(self, index: int, output: Output) -> CompletionChunk | ChatChunk:
        """New text, or the end."""
        return {**self._base, "object": "text_completion", "choices": [self._choice(index, [output])]}

    def _choice(self, index: int, outputs: list[Output]) -> CompletionChoice:
        reason = cast(FinishReason | None, outputs[-1].finish_reason)
        choice: CompletionChoice = {"index": index, "text": _text(outputs), "logprobs": None, "finish_reason": reason}
        top, prompt, echo = self.logprobs
        if top is not None:
            echoed = [each for output in outputs for each in output.prompt_logprobs or ()] if echo else []
            tokens = [*echoed, *(output.logprobs for output in outputs if output.logprobs is not None)]
            choice["logprobs"] = {
                "tokens": [_token_text(each.data) for each in tokens],
                "token_logprobs": [None if each.logprob is None else _finite(each.logprob) for each in tokens],
                "top_logprobs": [_completion_logprobs(each, top) for each in tokens],
                "text_offset": [each.offset for each in tokens],
            }
        if prompt is not None:
            choice["prompt_logprobs"] = _prompt_logprobs(outputs[0], prompt)
        if self.token_ids:
            choice["prompt_token_ids"] = _prompt_ids(outputs[0])
            choice["token_ids"] = _token_ids(outputs)
        return choice

    def usage_chunk(self, usage: Usage) -> CompletionChunk | ChatChunk:
        """The last chunk, with only the usage."""
        return {**self._base, "object": "text_completion", "choices": [], "usage": usage.reply()}


class ChatReplies(CompletionReplies):
    """Builds the response to one request of /v1/chat/completions."""

    prefix: ClassVar = "chatcmpl"

    def __init__(
        self,
        model: str,
        logprobs: LogprobsOptions,
        tool_format: ToolFormat | None = None,
        *,
        token_ids: bool = False,
    ):
        """With ``tool_format`` the text is parsed for tool calls."""
        super().__init__(model, logprobs, token_ids=token_ids)
        self._tool_format, self.sends_text_unchanged = tool_format, tool_format is None
        self._parsers: dict[int, ToolCallParser] = {}

    def whole(self, completions: list[list[Output]], usage: Usage) -> ChatReply:
        """The complete response, from all outputs of each completion."""
        choices: list[ChatChoice] = []
        for index, outputs in enumerate(completions):
            message: AssistantMessage = {"role": "assistant", "content": _text(outputs), "refusal": None}
            reason = cast(FinishReason, outputs[-1].finish_reason)
            if self._tool_format is not None:
                message, reason = _parse_calls(self._tool_format, _text(outputs), reason)
            logprobs = self._chat_logprobs(outputs)
            choices.append({"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason})
            if self.token_ids:
                choices[-1]["token_ids"] = _token_ids(outputs)
        reply: ChatReply = {**self._base, "object": "chat.completion", "choices": choices, "usage": usage.reply()}
        if self.logprobs.prompt is not None:
            reply["prompt_logprobs"] = _prompt_logprobs(completions[0][0], self.logprobs.prompt)
        if self.token_ids:
            reply["prompt_token_ids"] = _prompt_ids(completions[0][0]) or []
        return reply

    def _chat_logprobs(self, outputs: list[Output]) -> ChatLogprobs | None:
        if self.logprobs.top is None:
            return None
        content: list[ChatTokenLogprob] = [
            {**_top_logprob(each), "top_logprobs": [_top_logprob(other) for other in each.top]}
            for output in outputs
            if (each := output.logprobs) is not None
        ]
        return {"content": content, "refusal": None}

    def first_chunk(self, index: int) -> ChatChunk:
        """The role."""
        return self._chunk(index, {"role": "assistant", "content": ""}, None)

    def chunk(self, index: int, output: Output) -> ChatChunk:
        """New text, or the end."""
        delta: Delta = {"content": output.text} if output.text else {}
        reason = cast(FinishReason | None, output.finish_reason)
        if self._tool_format is not None:
            parser = self._parsers.setdefault(index, ToolCallParser(self._tool_format))
            parsed = parser.push(output.text)
            if reason is not None:
                parsed.content += parser.finish().content
                reason = "tool_calls" if parser.calls and reason == "stop" else reason
            delta = {"content": parsed.content} if parsed.content else {}
            if parsed.calls:
                delta["tool_calls"] = [_tool_call_chunk(call) for call in parsed.calls]
        return self._chunk(index, delta, reason, output)

    def usage_chunk(self, usage: Usage) -> ChatChunk:
        """The last chunk, with only the usage."""
        return {**self._base, "object": "chat.completion.chunk", "choices": [], "usage": usage.reply()}

    def _chunk(self, index: int, delta: Delta, reason: FinishReason | None, output: Output | None = None) -> ChatChunk:
        logprobs = None if output is None else self._chat_logprobs([output])
        choice: ChatChunkChoice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        chunk: ChatChunk = {**self._base, "object": "chat.completion.chunk", "choices": [choice]}
        if self.token_ids and output is not None:
            choice["token_ids"] = _token_ids([output])
            if (prompt := _prompt_ids(output)) is not None:
                chunk["prompt_token_ids"] = prompt
        return chunk


def _parse_calls(tool_format: ToolFormat, text: str, reason: FinishReason) -> tuple[AssistantMessage, FinishReason]:
    """The message with its calls; one that ``max_tokens`` has cut off is omitted, since its arguments are not JSON."""
    parser = ToolCallParser(tool_format)
    parts = [parser.push(text), parser.finish()]
    content = "".join(part.content for part in parts)
    calls: list[ToolCall] = []
    for delta in (delta for part in parts for delta in part.calls):
        if delta.name is not None:
            calls.append({"id": delta.id or "", "type": "function", "function": {"name": delta.name, "arguments": ""}})
        calls[-1]["function"]["arguments"] += delta.arguments
    if parser.in_arguments:
        calls.pop()
    message: AssistantMessage = {"role": "assistant", "content": content, "refusal": None}
    if not calls:
        return message, reason
    message = {**message, "content": content or None, "tool_calls": calls}
    return message, "tool_calls" if reason == "stop" else reason


def _tool_call_chunk(delta: ToolCallDelta) -> ToolCallChunk:
    if delta.name is None:
        return {"index": delta.index, "function": {"arguments": delta.arguments}}
    function: CalledFunction = {"name": delta.name, "arguments": delta.arguments}
    return {"index": delta.index, "id": delta.id or "", "type": "function", "function": function}


def _text(outputs: list[Output]) -> str:
    return "".join(output.text for output in outputs)


def _token_ids(outputs: list[Output]) -> list[int]:
    return [output.token for output in outputs if output.token is not None]


def _prompt_ids(first: Output) -> list[int] | None:
    return None if first.prompt_token_ids is None else list(first.prompt_token_ids)


LOWEST_LOGPROB = -9999.0
"""JSON has no -inf; OpenAI's value for very improbable tokens."""


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)


def _token_text(data: bytes) -> str:
    """The text of a token; one that is not UTF-8 is written by its bytes, as OpenAI does, so that tokens stay
    distinct.
    """
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _top_logprob(it: TokenLogprob | Alternative) -> TopLogprob:
    assert it.logprob is not None, "only a prompt's first token has no log-probability"
    return {"token": it.data.decode(errors="replace"), "logprob": _finite(it.logprob), "bytes": list(it.data)}


def _prompt_logprobs(first: Output, top: int) -> PromptLogprobs:
    entries: PromptLogprobs = []
    for each in first.prompt_logprobs or ():
        if each.logprob is None:
            entries.append(None)
            continue
        tokens = {str(it.token): it for it in (*each.top[:top], each)}
        entries.append(
            {
                key: {"logprob": _finite(it.logprob or 0.0), "decoded_token": it.data.decode(errors="replace")}
                for key, it in tokens.items()
            }
        )
    return entries


def _completion_logprobs(each: TokenLogprob, top: int) -> dict[str, float] | None:
    """The most probable tokens in descending order, and the token itself."""
    if each.logprob is None:
        return None
    best: dict[str, float] = {}
    for it in (*each.top[:top], each):
        best.setdefault(_token_text(it.data), _finite(it.logprob or 0.0))
    return best
