"""Choices, penalties and structured output over HTTP, with the openai client."""

import json
from collections import Counter
from typing import Any, Literal

import httpx
import jsonschema
import openai
import pydantic
import pytest
import torch

from colonnade.config import ServeConfig
from colonnade.serve import Engine, SamplingParams
from colonnade.serve.sampling_params import choice_seed
from tests.serve import tiny
from tests.serve.serving import Running, server


@pytest.fixture(scope="module")
def running():
    with server(page_tokens=4, pages=256, token_budget=64) as it:
        yield it


@pytest.fixture(scope="module")
def client(running: Running):
    with running.client as it:
        yield it


def test_choices_are_seeds(client: openai.OpenAI):
    """Choice i of every prompt has the text of a request with seed i of the request's seed."""
    prompts = ["The quick", "My fellow"]
    answer = client.completions.create(model="tiny", prompt=prompts, n=4, seed=11, max_tokens=9)
    assert [choice.index for choice in answer.choices] == list(range(8))
    engine = Engine(tiny.model(dtype=torch.float32), tiny.tokenizer(), ServeConfig())
    for i, choice in enumerate(answer.choices):
        params = SamplingParams(seed=choice_seed(11, i % 4), max_tokens=9)
        assert choice.text == engine.generate([prompts[i // 4]], params)[0].text
    assert len({choice.text for choice in answer.choices}) == 8
    assert answer.usage is not None
    sizes = [len(tiny.tokenizer().encode(prompt)) for prompt in prompts]
    assert answer.usage.prompt_tokens == sum(sizes), "a prompt is counted once"
    alone = client.completions.create(model="tiny", prompt=prompts[1], seed=11, max_tokens=9)
    assert alone.choices[0].text == answer.choices[4].text


def test_choices_of_a_stream_join_to_the_whole(client: openai.OpenAI):
    body: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "n": 3, "seed": 5}
    whole = client.chat.completions.create(**body, max_tokens=9)
    texts, ends, roles = Counter[int](), {}, Counter[int]()
    parts: dict[int, str] = dict.fromkeys(range(3), "")
    usage = None
    for chunk in client.chat.completions.create(
        **body, max_tokens=9, stream=True, stream_options={"include_usage": True}
    ):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += 1
            roles[choice.index] += choice.delta.role == "assistant"
            parts[choice.index] += choice.delta.content or ""
            ends[choice.index] = choice.finish_reason or ends.get(choice.index)
    assert [parts[i] for i in range(3)] == [choice.message.content for choice in whole.choices]
    assert len(set(parts.values())) == 3 and set(roles.values()) == {1} and set(ends.values()) == {"length"}
    assert usage is not None and whole.usage is not None and usage.total_tokens == whole.usage.total_tokens


def test_penalties_and_biases_change_the_text(client: openai.OpenAI):
    engine = Engine(tiny.model(dtype=torch.float32), tiny.tokenizer(), ServeConfig())
    given: dict[str, Any] = {"frequency_penalty": 1.5, "presence_penalty": 0.5, "logit_bias": {"7": 9.0, "300": -100}}
    more = {"repetition_penalty": 1.2, "min_tokens": 5, "bad_words": ["the"]}
    answer = client.completions.create(
        model="tiny", prompt="The quick", temperature=0, max_tokens=9, extra_body=more, **given
    )
    params = SamplingParams(
        temperature=0, max_tokens=9, frequency_penalty=1.5, presence_penalty=0.5, logit_bias={7: 9.0, 300: -100}, **more
    )
    assert answer.choices[0].text == engine.generate(["The quick"], params)[0].text
    plain = client.completions.create(model="tiny", prompt="The quick", temperature=0, max_tokens=9)
    assert answer.choices[0].text != plain.choices[0].text


class Visit(pydantic.BaseModel):
    """What the model fills in."""

    model_config = pydantic.ConfigDict(extra="forbid")
    guest: Literal["Ada", "Grace"]
    nights: int = pydantic.Field(ge=1, le=9)
    breakfast: bool


def test_openai_parse(client: openai.OpenAI):
    messages: list[Any] = [{"role": "user", "content": "Book a room."}]
    blanks = {str(i): -100 for i in range(301) if tiny.tokenizer().token_bytes(i).isspace()}
    options: dict[str, Any] = {"model": "tiny", "messages": messages, "max_tokens": 60, "logit_bias": blanks}
    visit = None
    for seed in range(4):
        answer = client.chat.completions.parse(response_format=Visit, seed=seed, **options)
        visit = answer.choices[0].message.parsed
        assert isinstance(visit, Visit) and answer.choices[0].finish_reason == "stop"
    with client.chat.completions.stream(response_format=Visit, seed=3, **options) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.parsed == visit


def test_every_form_of_structured_output(client: openai.OpenAI):
    schema = {
        "type": "object",
        "properties": {"a": {"type": "boolean"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    forms: list[dict[str, Any]] = [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}},
        {"structured_outputs": {"json": schema}},
        {"structured_outputs": {"json": json.dumps(schema)}},
        {"guided_json": schema},
        {"guided_json": json.dumps(schema)},
    ]
    for form in forms:
        answer = client.completions.create(model="tiny", prompt="x", max_tokens=60, seed=1, extra_body=form)
        jsonschema.validate(json.loads(answer.choices[0].text), schema)
    texts = [
        client.completions.create(model="tiny", prompt="x", max_tokens=60, seed=1, extra_body=form).choices[0].text
        for form in (
            {"structured_outputs": {"regex": "[xy]{7}"}},
            {"guided_regex": "[xy]{7}"},
            {"structured_outputs": {"choice": ["one", "two"]}},
            {"guided_choice": ["one", "two"]},
            {"guided_grammar": 'start: "3" | "4"'},
        )
    ]
    assert texts[0] == texts[1] and set(texts[0]) <= {"x", "y"} and len(texts[0]) == 7
    assert texts[2] == texts[3] and texts[2] in ("one", "two") and texts[4] in ("3", "4")


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"n": 17}, "n", "less than or equal to 16"),
        ({"n": 0}, "n", "greater than or equal to 1"),
        ({"best_of": 3}, "best_of", "best_of is 3 and n is 1"),
        ({"logit_bias": {"a": 1}}, "logit_bias", "the key 'a'; its keys must be token ids"),
        ({"logit_bias": {"9999": 1}}, "logit_bias", "token 9999 of logit_bias is not in the vocabulary of 301"),
        ({"logit_bias": {"1": 101}}, "logit_bias", "from -100 to 100"),
        ({"frequency_penalty": 3}, "frequency_penalty", "from -2 to 2"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens", "from 0 to max_tokens"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "must be sent together"),
        ({"response_format": {"type": "xml"}}, "response_format", "json_object"),
        ({"guided_regex": "("}, "structured_outputs", "regex cannot be compiled"),
        ({"structured_outputs": {"xml": "a"}}, "structured_outputs", "unknown field 'xml'"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "mutually exclusive"),
        ({"guided_json": {"type": "array", "uniqueItems": True}}, "structured_outputs", "uniqueItems"),
    ],
)
def test_bad_values_are_refused(running: Running, body: dict, param: str, words: str):
    answer = httpx.post(f"{running.url}/v1/completions", json={"prompt": "x", **body})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param) and words in error["message"], error
