"""Tool calls over HTTP, with the openai client; the model is untrained, so only the grammar makes it obey."""

import json
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import openai
import pydantic
import pytest

from tests.serve import tiny
from tests.serve.fuzzing import BODIES, send_mutated
from tests.serve.schemathesis_run import run_schemathesis
from tests.serve.serving import Running
from tests.serve.test_serve_http import settle

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Rom", "Köln"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TIME = {
    "type": "object",
    "properties": {"zone": {"type": "boolean"}},
    "required": ["zone"],
    "additionalProperties": False,
}
SCHEMAS = {"weather": WEATHER, "time": TIME}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "description": "d", "parameters": schema}}
    for name, schema in SCHEMAS.items()
]
MESSAGES: list[Any] = [{"role": "user", "content": "a"}]
BLANKS = {str(i): -100 for i in range(300) if tiny.tokenizer().token_bytes(i).isspace()}
OPTIONS: dict[str, Any] = {
    "model": "tiny",
    "messages": MESSAGES,
    "tools": TOOLS,
    "max_tokens": 160,
    "logit_bias": BLANKS,
}


@pytest.fixture
def running(tool_server: Running) -> Running:
    return tool_server


@pytest.fixture
def client(tool_server: Running):
    with tool_server.client as it:
        yield it


def check_calls(choice: Any) -> None:
    assert choice.message.tool_calls
    for call in choice.message.tool_calls:
        assert call.type == "function" and len(call.id) == 9
        jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])


@pytest.mark.slow
def test_required_tools_are_called(client: openai.OpenAI):
    names = set()
    for seed in range(6):
        answer = client.chat.completions.create(**OPTIONS, tool_choice="required", parallel_tool_calls=False, seed=seed)
        (choice,) = answer.choices
        assert choice.finish_reason == "tool_calls" and choice.message.content is None
        assert choice.message.tool_calls and len(choice.message.tool_calls) == 1
        check_calls(choice)
        names.add(choice.message.tool_calls[0].function.name)  # type: ignore[union-attr]
    assert names == {"weather", "time"}


def test_a_named_tool_is_called(client: openai.OpenAI):
    for name in SCHEMAS:
        choice = {"type": "function", "function": {"name": name}}
        answer = client.chat.completions.create(**OPTIONS, tool_choice=choice, seed=3, n=2)
        for each in answer.choices:
            check_calls(each)
            assert [call.function.name for call in each.message.tool_calls or ()] == [name]


@pytest.mark.slow
def test_a_stream_of_calls_joins_to_the_whole(client: openai.OpenAI):
    options = {**OPTIONS, "logit_bias": {**BLANKS, "300": 100}}  # the model begins with the token of tool calls
    for seed in range(4):
        whole = client.chat.completions.create(**options, seed=seed)
        expected = [
            (call.function.name, call.function.arguments)
            for call in whole.choices[0].message.tool_calls or ()
            if call.type == "function"
        ]
        calls: list[list[str]] = []
        content, reason = "", None
        for chunk in client.chat.completions.create(**options, seed=seed, stream=True):
            (choice,) = chunk.choices
            content += choice.delta.content or ""
            reason = choice.finish_reason or reason
            for call in choice.delta.tool_calls or ():
                if call.id:
                    assert call.type == "function" and call.index == len(calls)
                    calls.append(["", ""])
                assert call.function
                calls[call.index][0] += call.function.name or ""
                calls[call.index][1] += call.function.arguments or ""
        assert calls, "auto"
        cut_off = reason == "length" and calls[-1][1].count("{") > calls[-1][1].count("}")
        assert [tuple(call) for call in (calls[:-1] if cut_off else calls)] == expected
        assert (content or None, reason) == (whole.choices[0].message.content, whole.choices[0].finish_reason)
        if reason == "tool_calls":
            check_calls(whole.choices[0])


def test_auto_leaves_text_free(client: openai.OpenAI):
    options = {**OPTIONS, "max_tokens": 12, "logit_bias": {"300": -100}}
    texts = [client.chat.completions.create(**options, seed=seed).choices[0].message for seed in range(4)]
    assert all(text.tool_calls is None and text.content for text in texts)
    assert len({text.content for text in texts}) == 4


class Weather(pydantic.BaseModel):
    """Arguments of a tool."""

    model_config = pydantic.ConfigDict(extra="forbid")
    days: int = pydantic.Field(ge=1, le=9)


def test_openai_parse_and_tools(client: openai.OpenAI):
    tool = openai.pydantic_function_tool(Weather, name="weather")
    answer = client.chat.completions.parse(**{**OPTIONS, "tools": [tool]}, tool_choice="required", seed=1)
    calls = answer.choices[0].message.tool_calls or []
    assert calls and all(isinstance(call.function.parsed_arguments, Weather) for call in calls)
    # The whole exchange: the call, its result, and an answer to it.
    first = client.chat.completions.create(**OPTIONS, tool_choice="required", seed=2).choices[0].message
    results: list[Any] = [
        {"role": "tool", "tool_call_id": each.id, "content": "sunny"} for each in first.tool_calls or ()
    ]
    messages = [*MESSAGES, first.model_dump(), *results]
    last = client.chat.completions.create(**{**OPTIONS, "messages": messages}, tool_choice="none", seed=2)
    assert last.choices[0].finish_reason in ("stop", "length") and last.usage and first.tool_calls
    assert last.usage.prompt_tokens > 40


def test_a_call_cut_off_by_max_tokens_is_left_out(client: openai.OpenAI):
    """The untrained model calls without end, and its arguments take many tokens."""
    for limit in range(4, 60, 4):
        options = {**OPTIONS, "tools": [openai.pydantic_function_tool(Weather, name="weather")], "max_tokens": limit}
        choice = client.chat.completions.create(**options, tool_choice="required", seed=limit).choices[0]
        for call in choice.message.tool_calls or ():
            assert call.type == "function" and json.loads(call.function.arguments)


def test_templates_get_variables_and_continue(running: Running):
    def prompt_tokens(**body: Any) -> int:
        answer = httpx.post(f"{running.url}/v1/chat/completions", json={"messages": MESSAGES, "max_tokens": 1, **body})
        assert answer.status_code == 200, answer.text
        return answer.json()["usage"]["prompt_tokens"]

    plain, encode = prompt_tokens(), tiny.tokenizer(tools=True).encode_chat
    assert prompt_tokens(chat_template_kwargs={"mood": "glad"}) == len(encode(MESSAGES, mood="glad")) > plain
    assert prompt_tokens(add_generation_prompt=False) < plain
    more = [*MESSAGES, {"role": "assistant", "content": "So"}]
    assert prompt_tokens(messages=more, continue_final_message=True) == len(encode(more, continue_last=True))


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice",
            "weather, time",
        ),
        ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice", "'any'"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools", "a b"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]},
            "tools",
            "'object'",
        ),
        (
            {
                "tools": [
                    {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "x"}}}}}
                ]
            },
            "tools",
            "Invalid type",
        ),
        ({"tools": TOOLS * 65}, "tools", "at most 128"),
        ({"tools": TOOLS, "response_format": {"type": "json_object"}}, "response_format", "mutually exclusive"),
        ({"messages": [{"role": "tool", "tool_call_id": "x"}]}, "messages", "has no content"),
        (
            {"messages": [{"role": "user", "content": "a", "tool_call_id": "x"}]},
            "messages",
            "belong to the role 'tool'",
        ),
        (
            {
                "messages": [
                    {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "[1]"}}]}
                ]
            },
            "messages",
            "not a JSON object",
        ),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs", "may not set 'tools'"),
        ({"continue_final_message": True}, "continue_final_message", "role 'assistant'"),
    ],
)
def test_bad_bodies_are_refused(running: Running, body: dict, param: str, words: str):
    answer = httpx.post(f"{running.url}/v1/chat/completions", json={"messages": MESSAGES, "max_tokens": 1, **body})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param) and words in error["message"], error


@pytest.mark.sample(1)
@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=[pytest.mark.long, pytest.mark.timeout(1800)])])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
def test_mutated_bodies_are_answered_or_refused(running: Running, path: str, count: int):
    """No status of 500 or more, no broken connection, all pages free at the end."""
    for body in BODIES[path]:
        assert httpx.post(f"{running.url}{path}", json=body).status_code == 200, body
    statuses = send_mutated(running, path, count)
    assert statuses[200] > 0.05 * count and sum(statuses.values()) == count
    settle(running)


@pytest.mark.slow
@pytest.mark.parametrize("examples", [1, pytest.param(300, marks=[pytest.mark.long, pytest.mark.timeout(1800)])])
def test_schemathesis(running: Running, tmp_path: Path, examples: int):
    """Every route but the one that stops the server; those of encoders answer 400 here."""
    admin = ("-H", "authorization: Bearer boss", "--exclude-path", "/admin/drain")
    report = run_schemathesis(running, tmp_path, *admin, examples=examples)
    assert "Tested: " in report
    settle(running)
