"""The response to POST /v1/responses, whole or as a stream of typed events.

    response.created, response.in_progress
    for a message       response.output_item.added, response.content_part.added, response.output_text.delta, …,
                        response.output_text.done, response.content_part.done, response.output_item.done
    for a call          response.output_item.added, response.function_call_arguments.delta, …,
                        response.function_call_arguments.done, response.output_item.done
    response.completed, response.incomplete (max_output_tokens or the context) or response.failed

The whole response is in the last event.
"""

import time
import uuid
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Literal, NotRequired

from pydantic_core import to_json
from typing_extensions import TypedDict

from colonnade.errors import RequestError
from colonnade.serve.api.event_stream import Batches
from colonnade.serve.api.replies import PromptTokensDetails, Reply
from colonnade.serve.api.reply_builders import Usage
from colonnade.serve.api.responses_schemas import ResponsesBody
from colonnade.serve.request import Output
from colonnade.serve.tool_calls import ToolCallDelta, ToolCallParser, ToolFormat

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputText(Reply):
    """A message's text."""

    type: Literal["output_text"]
    text: str
    annotations: list[dict[str, Any]]
    logprobs: list[dict[str, Any]]


class OutputMessage(Reply):
    """A message of the response."""

    type: Literal["message"]
    id: str
    status: ItemStatus
    role: Literal["assistant"]
    content: list[OutputText]


class FunctionCall(Reply):
    """A call that the model makes; ``arguments`` is JSON unless the call is incomplete."""

    type: Literal["function_call"]
    id: str
    call_id: str
    status: ItemStatus
    name: str
    arguments: str


class OutputTokensDetails(Reply):
    """Part of :class:`ResponseUsage`."""

    reasoning_tokens: int


class ResponseUsage(Reply):
    """Tokens of a response."""

    input_tokens: int
    input_tokens_details: PromptTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseFailure(Reply):
    """Why a response failed."""

    code: str
    message: str


class IncompleteDetails(Reply):
    """Why a response is incomplete."""

    reason: Literal["max_output_tokens"]


class ResponseReply(Reply):
    """POST /v1/responses; the request's parameters are repeated."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    model: str
    output: list[OutputMessage | FunctionCall]
    usage: ResponseUsage | None
    error: ResponseFailure | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    temperature: float
    top_p: float
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    text: dict[str, Any]
    truncation: Literal["disabled"]
    store: Literal[False]
    background: Literal[False]
    previous_response_id: None


class ResponseEvent(TypedDict):
    """One event of the stream; which other fields it has depends on ``type``."""

    type: str
    sequence_number: int
    response: NotRequired[ResponseReply]
    item: NotRequired[OutputMessage | FunctionCall]
    part: NotRequired[OutputText]
    item_id: NotRequired[str]
    output_index: NotRequired[int]
    content_index: NotRequired[int]
    delta: NotRequired[str]
    text: NotRequired[str]
    arguments: NotRequired[str]
    name: NotRequired[str]
    logprobs: NotRequired[list[dict[str, Any]]]


class ResponseReplies:
    """Builds one response from its outputs; each method returns the new events."""

    def __init__(self, model: str, body: ResponsesBody, tool_format: ToolFormat | None):
        """With ``tool_format`` the text is parsed for calls."""
        self._parser = None if tool_format is None else ToolCallParser(tool_format)
        self._sequence, self._blank = 0, ""
        """Number of the next event; blanks that are text only if more text follows."""
        self._open: OutputMessage | FunctionCall | None = None
        """The last item, while it is written."""
        self.response: ResponseReply = {
            "id": f"resp_{uuid.uuid4().hex}", "object": "response", "created_at": int(time.time()),
            "status": "in_progress", "model": model, "output": [], "usage": None, "error": None,
            "incomplete_details": None, "instructions": body.instructions, "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {}, "parallel_tool_calls": body.parallel_tool_calls is not False,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "top_p": 1.0 if body.top_p is None else body.top_p, "tool_choice": _tool_choice(body),
            "tools": [{"description": None, "parameters": None, "strict": True, **tool.model_dump(exclude_none=True)}
                      for tool in body.tools or ()],
            "text": {"format": _text_format(body)}, "truncation": "disabled", "store": False, "background": False,
            "previous_response_id": None,
        }  # fmt: skip

    def whole(self, completions: list[list[Output]], usage: Usage) -> ResponseReply:
        """The complete response, from all its outputs."""
        for output in completions[0]:
            self.push(output, usage)
        return self.response

    def begin(self) -> list[ResponseEvent]:
        """The first events."""
        return [self._event(f"response.{name}", response={**self.response}) for name in ("created", "in_progress")]

    def push(self, output: Output, usage: Usage) -> list[ResponseEvent]:
        """New text, new pieces of calls, or the end, with the ``usage``."""
        events = self._push_text(output.text) if self._parser is None else self._push_parsed(self._parser, output.text)
        if output.finish_reason is None:
            return events
        if self._parser is not None:
            events += self._push_text(self._parser.finish().content)
        if not self.response["output"]:
            events += self._open_message()
            events += self._write_text(self._blank)
        incomplete = output.finish_reason == "length"
        events += self._close("incomplete" if incomplete else "completed")
        return [*events, self._end(usage, incomplete=incomplete)]

    def fail(self, error: RequestError) -> ResponseEvent:
        """The last event of a response that fails."""
        self.response["status"] = "failed"
        self.response["error"] = {"code": error.code or "server_error", "message": error.message}
        return self._event("response.failed", response=self.response)

    def _end(self, usage: Usage, *, incomplete: bool) -> ResponseEvent:
        counts = usage.reply()
        self.response["usage"] = {
            "input_tokens": counts["prompt_tokens"], "input_tokens_details": counts["prompt_tokens_details"],
            "output_tokens": counts["completion_tokens"], "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": counts["total_tokens"],
        }  # fmt: skip
        self.response["status"] = status = "incomplete" if incomplete else "completed"
        if incomplete:
            self.response["incomplete_details"] = {"reason": "max_output_tokens"}
        return self._event(f"response.{status}", response=self.response)

    def _push_parsed(self, parser: ToolCallParser, text: str) -> list[ResponseEvent]:
        parsed, events = parser.push(text), []
        calls = deque(parsed.calls)
        while calls and calls[0].name is None:  # they belong to the open call, before any text
            events += self._push_call(calls.popleft())
        if parsed.content:
            events += self._push_text(parsed.content)
        for call in calls:
            events += self._push_call(call)
        if self._open is not None and self._open["type"] == "function_call" and not parser.in_arguments:
            events += self._close("completed")
        return events

    def _push_text(self, text: str) -> list[ResponseEvent]:
        if self._open is not None and self._open["type"] == "message":
            return self._write_text(text)
        self._blank += text
        if not self._blank or self._blank.isspace():  # as between two calls
            return []
        events = self._close("completed")
        events += self._open_message()
        return events + self._write_text(self._blank)

    def _push_call(self, call: ToolCallDelta) -> list[ResponseEvent]:
        events: list[ResponseEvent] = []
        if call.name is not None:
            events += self._close("completed")
            self._blank = ""
            item: FunctionCall = {
                "type": "function_call", "id": f"fc_{uuid.uuid4().hex}", "call_id": call.id or "",
                "status": "in_progress", "name": call.name, "arguments": "",
            }  # fmt: skip
            events.append(self._add(item))
        assert self._open is not None
        assert self._open["type"] == "function_call"
        if call.arguments:
            self._open["arguments"] += call.arguments
            events.append(self._item_event("response.function_call_arguments.delta", delta=call.arguments))
        return events

    def _open_message(self) -> list[ResponseEvent]:
        item: OutputMessage = {
            "type": "message", "id": f"msg_{uuid.uuid4().hex}", "status": "in_progress", "role": "assistant",
            "content": [],
        }  # fmt: skip
        added = self._add({**item})
        assert self._open is not None
        assert self._open["type"] == "message"
        part: OutputText = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        self._open["content"] = [part]
        return [added, self._item_event("response.content_part.added", content_index=0, part={**part})]

    def _write_text(self, text: str) -> list[ResponseEvent]:
        self._blank = ""
        if not text:
            return []
        assert self._open is not None
        assert self._open["type"] == "message"
        self._open["content"][0]["text"] += text
        return [self._item_event("response.output_text.delta", content_index=0, delta=text, logprobs=[])]

    def _add(self, item: OutputMessage | FunctionCall) -> ResponseEvent:
        self._open = item
        self.response["output"].append(item)
        return self._event("response.output_item.added", output_index=self._index, item={**item})

    def _close(self, status: ItemStatus) -> list[ResponseEvent]:
        """End the item that is written, if there is one."""
        item, events = self._open, []
        if item is None:
            return []
        item["status"] = status
        if item["type"] == "message":
            part = item["content"][0]
            events.append(
                self._item_event("response.output_text.done", content_index=0, text=part["text"], logprobs=[])
            )
            events.append(self._item_event("response.content_part.done", content_index=0, part=part))
        else:
            done = {"name": item["name"], "arguments": item["arguments"]}
            events.append(self._item_event("response.function_call_arguments.done", **done))
        events.append(self._event("response.output_item.done", output_index=self._index, item=item))
        self._open = None
        return events

    @property
    def _index(self) -> int:
        return len(self.response["output"]) - 1

    def _item_event(self, kind: str, **fields: Any) -> ResponseEvent:
        assert self._open is not None
        return self._event(kind, item_id=self._open["id"], output_index=self._index, **fields)

    def _event(self, kind: str, **fields: Any) -> ResponseEvent:
        event: ResponseEvent = {"type": kind, "sequence_number": self._sequence}
        event.update(fields)  # type: ignore[typeddict-item] - as declared
        self._sequence += 1
        return event


def _tool_choice(body: ResponsesBody) -> str | dict[str, Any]:
    choice = body.tool_choice
    return choice or "auto" if choice is None or isinstance(choice, str) else choice.model_dump()


def _text_format(body: ResponsesBody) -> dict[str, Any]:
    if body.text is None or body.text.format is None:
        return {"type": "text"}
    return body.text.format.model_dump(by_alias=True, exclude_none=True)


async def response_events(
    first: list[tuple[int, Output]], batches: Batches, builder: ResponseReplies, usage: Usage, **_: bool
) -> AsyncGenerator[bytes]:
    """The events of a response."""
    async with aclosing(batches):
        try:
            yield _encode(builder.begin()) + _encode(_push(first, builder, usage))
            async for batch in batches:
                yield _encode(_push(batch, builder, usage))
        except RequestError as error:  # the status was sent long ago
            yield _encode([builder.fail(error)])


def _push(batch: list[tuple[int, Output]], builder: ResponseReplies, usage: Usage) -> list[ResponseEvent]:
    events: list[ResponseEvent] = []
    for index, output in batch:
        usage.add(index, output)
        events += builder.push(output, usage)
    return events


def _encode(events: list[ResponseEvent]) -> bytes:
    return b"".join(b"event: %b\ndata: %b\n\n" % (event["type"].encode(), to_json(event)) for event in events)
