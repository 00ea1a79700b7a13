"""OpenAI's Responses API over HTTP, with the openai client; the model is untrained."""

import json
from typing import Any

import httpx
import jsonschema
import openai
import pydantic
import pytest

from tests.serve import tiny
from tests.serve.serving import Running
from tests.serve.test_serve_http_tools import BLANKS, SCHEMAS

TOOLS: list[Any] = [
    {"type": "function", "name": name, "description": "d", "parameters": schema, "strict": True}
    for name, schema in SCHEMAS.items()
]
OPTIONS: dict[str, Any] = {"model": "tiny", "max_output_tokens": 160, "extra_body": {"seed": 1, "logit_bias": BLANKS}}
TERSE: dict[str, Any] = {"model": "tiny", "input": "a", "max_output_tokens": 8, "extra_body": {"ignore_eos": True}}


@pytest.fixture
def client(tool_server: Running):
    with tool_server.client as it:
        yield it


def post(at: Running, **body: Any) -> httpx.Response:
    return httpx.post(f"{at.url}/v1/responses", json={"input": "a", "max_output_tokens": 4, **body}, timeout=120)


def test_text_is_that_of_the_chat(tool_server: Running, client: openai.OpenAI):
    more = {"ignore_eos": True, "seed": 3}
    answer = client.responses.create(
        model="tiny", instructions="s", input="hello", max_output_tokens=9, temperature=0.7, top_p=0.9, extra_body=more
    )
    messages: list[Any] = [{"role": "system", "content": "s"}, {"role": "user", "content": "hello"}]
    chat = client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=9, temperature=0.7, top_p=0.9, extra_body=more
    )
    assert answer.output_text == chat.choices[0].message.content
    assert (answer.status, answer.incomplete_details and answer.incomplete_details.reason) == (
        "incomplete",
        "max_output_tokens",
    )
    assert answer.usage and chat.usage
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (chat.usage.prompt_tokens, 9)
    assert (answer.temperature, answer.top_p, answer.instructions, answer.tools) == (0.7, 0.9, "s", [])
    assert answer.id.startswith("resp_") and answer.object == "response"


def test_a_finished_answer_is_completed(client: openai.OpenAI):
    answer = client.responses.create(**{**TERSE, "extra_body": {"logit_bias": {"0": 100}}}, metadata={"a": "b"})
    assert (answer.status, answer.output_text, answer.metadata) == ("completed", "", {"a": "b"})
    (message,) = answer.output
    assert message.type == "message" and message.status == "completed"


def check_sequence(events: list[Any]) -> None:
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert all(event.response.output == [] for event in events[:2])


def test_a_stream_of_text_joins_to_the_whole(client: openai.OpenAI):
    options = {**TERSE, "temperature": 0}
    whole = client.responses.create(**options)
    events: list[Any] = list(client.responses.create(**options, stream=True))
    check_sequence(events)
    kinds = [event.type.removeprefix("response.") for event in events[2:]]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert kinds == [
        "output_item.added", "content_part.added", *["output_text.delta"] * len(deltas), "output_text.done",
        "content_part.done", "output_item.done", "incomplete",
    ]  # fmt: skip
    assert len(deltas) > 1 and "".join(deltas) == whole.output_text
    assert events[-1].response.output_text == whole.output_text and events[-1].response.usage == whole.usage
    assert events[2].item.content == [] and events[2].item.status == "in_progress"


@pytest.mark.slow
@pytest.mark.parametrize("choice", ["required", "auto"])
def test_a_stream_of_calls_joins_to_the_whole(client: openai.OpenAI, choice: Any):
    body = {"seed": 2, "logit_bias": {**BLANKS, "300": 100} if choice == "auto" else BLANKS}
    options = {**OPTIONS, "input": "a", "tools": TOOLS, "tool_choice": choice, "extra_body": body}
    whole = client.responses.create(**options)
    calls = [item for item in whole.output if item.type == "function_call"]
    assert calls and whole.output_text == ""
    for call in calls:
        if call.status == "incomplete":  # the last one
            assert call is calls[-1] and whole.status == "incomplete"
            continue
        assert call.call_id != call.id
        jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])
    events: list[Any] = list(client.responses.create(**options, stream=True))
    check_sequence(events)
    assert events[-1].type == f"response.{whole.status}"
    expected = [(call.name, call.arguments) for call in calls]
    assert [(item.name, item.arguments) for item in events[-1].response.output] == expected
    deltas = [""] * len(calls)
    for event in events:
        if event.type == "response.function_call_arguments.delta":
            deltas[event.output_index] += event.delta
    assert deltas == [arguments for _, arguments in expected]
    done = [event for event in events if event.type == "response.function_call_arguments.done"]
    assert [(event.name, event.arguments) for event in done] == expected


def test_a_named_function_and_one_call_at_most(client: openai.OpenAI):
    for name in SCHEMAS:
        options = {**OPTIONS, "tools": TOOLS, "tool_choice": {"type": "function", "name": name}}
        (call,) = client.responses.create(**options, input="a", parallel_tool_calls=False).output
        assert call.type == "function_call" and call.name == name


@pytest.mark.slow
def test_a_whole_exchange_with_the_earlier_output_as_input(client: openai.OpenAI):
    question: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "a"}]}]
    first = client.responses.create(**OPTIONS, input=question, tools=TOOLS, tool_choice="required")
    results = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "sunny"}
        for item in first.output
        if item.type == "function_call"
    ]
    assert results
    items: list[Any] = [*question, *first.output, *results]
    second = client.responses.create(**OPTIONS, input=items, tools=TOOLS, tool_choice="none")
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"arguments": {}}} for _ in results]},
        *({"role": "tool", "content": "sunny"} for _ in results),
    ]
    least = len(tiny.tokenizer(tools=True).encode_chat(messages))
    assert second.usage and second.usage.input_tokens >= least
    third = client.responses.create(**{**TERSE, "input": [*items, *second.output, *question]}, tools=TOOLS)
    assert third.usage and third.usage.input_tokens > second.usage.input_tokens


class Weather(pydantic.BaseModel):
    """A schema of an answer, and the arguments of a tool."""

    model_config = pydantic.ConfigDict(extra="forbid")
    days: int = pydantic.Field(ge=1, le=9)


def test_parse_and_stream_helpers(client: openai.OpenAI):
    parsed = client.responses.parse(**OPTIONS, input="a", text_format=Weather)
    assert isinstance(parsed.output_parsed, Weather)
    with client.responses.stream(**OPTIONS, input="a", text_format=Weather) as stream:
        kinds = {event.type for event in stream}
        assert stream.get_final_response().output_parsed == parsed.output_parsed
    assert {"response.output_text.delta", "response.completed"} <= kinds
    tool = openai.pydantic_function_tool(Weather, name="weather")["function"]
    options = {**OPTIONS, "tools": [{"type": "function", **tool}], "tool_choice": "required", "input": "a"}
    with client.responses.stream(**options) as stream:
        for event in stream:
            if event.type == "response.function_call_arguments.delta":
                assert event.snapshot.endswith(event.delta)
        final = stream.get_final_response()
    assert [item.type for item in final.output] == ["function_call"] * len(final.output)
    client.responses.parse(**options)


def test_objects_of_the_format(client: openai.OpenAI):
    answer = client.responses.create(
        **{**OPTIONS, "max_output_tokens": 60}, input="a", text={"format": {"type": "json_object"}}
    )
    assert answer.output_text.startswith("{")
    if answer.status == "completed":
        assert isinstance(json.loads(answer.output_text), dict)


@pytest.mark.sample(22)
@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"store": True}, "store", "store=true"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "not supported"),
        ({"conversation": "c"}, "conversation", "not supported"),
        ({"background": True}, "background", "background=true"),
        ({"truncation": "auto"}, "truncation", "auto"),
        ({"reasoning": {"effort": "high"}}, "reasoning", "not supported"),
        ({"include": ["message.output_text.logprobs"]}, "include", "not supported"),
        ({"tools": [{"type": "web_search"}]}, "tools", "'web_search'"),
        ({"tools": [3]}, "tools", "3"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "x"}}, "tool_choice", "weather, time"),
        ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
        ({"tool_choice": {"type": "file_search"}}, "tool_choice", ""),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text", "schema"),
        ({"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "x"}}}}, "text", ""),
        ({"text": {"verbosity": "high"}}, "text", "medium"),
        ({"max_output_tokens": 0}, "max_output_tokens", "greater"),
        ({"max_output_tokens": 5000}, "input", "context"),
        ({"temperature": -1}, "temperature", "-1"),
        ({"inptu": "a"}, "inptu", "'input'"),
        ({"input": None}, "input", "string"),
        ({"input": []}, "input", "non-empty"),
        ({"input": 5}, "input", "string"),
        ({"input": ["a"]}, "input", "input.0"),
        ({"input": [{"role": "user"}]}, "input", "'content'"),
        ({"input": [{"role": "robot", "content": "a"}]}, "input", "robot"),
        ({"input": [{"role": "user", "content": "a", "b": 1}]}, "input", "'b'"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input", "input_image"),
        ({"input": [{"type": "reasoning", "summary": []}]}, "input", "'reasoning'"),
        ({"input": [{"type": "function_call", "call_id": "1", "name": "f", "arguments": "["}]}, "input", "JSON"),
        ({"input": [{"type": "function_call_output", "call_id": "1"}]}, "input", "'output'"),
        ({"input": [{"type": "item_reference", "id": "1"}]}, "input", "item_reference"),
        ({"input": [{"type": ["message"], "role": "user", "content": "a"}]}, "input", "a list of 1"),
        ({"input": [{"role": {"a": 1}, "content": "a"}]}, "input", ""),
        ({"stream_options": {"include_obfuscation": True}, "stream": True}, "stream_options", ""),
    ],
)
def test_bad_bodies_are_refused(tool_server: Running, body: dict[str, Any], param: str, words: str):
    answer = post(tool_server, **body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param) and words in error["message"], error
    assert "\n" not in error["message"]


def test_values_without_effect_are_accepted(tool_server: Running):
    assert post(tool_server, store=False, background=False, truncation="disabled", include=[], user="u",
                previous_response_id=None, reasoning=None, tools=[], text={"format": {"type": "text"}},
                metadata={}, service_tier="auto", stream_options=None).status_code == 200  # fmt: skip


def test_answers_are_what_openapi_describes(tool_server: Running):
    description = httpx.get(f"{tool_server.url}/openapi.json").json()
    components = {"components": description["components"]}
    for name, body in (("ResponseReply", {}), ("ResponseReply", {"tools": TOOLS, "tool_choice": "required"})):
        schema = {"$ref": f"#/components/schemas/{name}", **components}
        jsonschema.validate(post(tool_server, **body).json(), schema)
    lines = post(tool_server, stream=True).text.splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
    assert [line[7:] for line in lines if line.startswith("event: ")] == [event["type"] for event in events]
    for event in events:
        jsonschema.validate(event, {"$ref": "#/components/schemas/ResponseEvent", **components})
