"""litellm's OpenAI provider: completions, chats, streams, tools, schemas, log-probabilities, embeddings, errors."""

import asyncio
import json
import os
from collections.abc import Iterator
from typing import Any

import pytest

from tests.serve import encoders
from tests.serve.serving import Running
from tests.serve.test_serve_http_tools import SCHEMAS, TOOLS
from tests.serve.test_serve_pooling import served

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would download a list of prices
litellm = pytest.importorskip("litellm", reason="needs litellm: pip install --group clients")

pytestmark = [
    pytest.mark.filterwarnings("default"),  # of packages that are not ours
]

TALK = [{"role": "user", "content": "Hello"}]


@pytest.fixture
def options(running: Running) -> dict[str, Any]:
    return {"model": "openai/tiny", "api_base": f"{running.url}/v1", "api_key": "none", "max_retries": 0, "seed": 1}


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = encoders.write(tmp_path_factory.mktemp("encoder") / "embedder", encoders.config())
    with served(folder, "--serve.log", "off") as it:
        yield it


def test_litellm_chats(options: dict[str, Any]):
    asked = {**options, "messages": TALK, "max_tokens": 9, "temperature": 0}
    whole = litellm.completion(**asked, n=2, logprobs=True, top_logprobs=2)
    assert [choice.finish_reason for choice in whole.choices] == ["length"] * 2
    assert len(whole.choices[0].logprobs.content) == 9 and whole.usage.completion_tokens == 18
    chunks = list(litellm.completion(**asked, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert litellm.stream_chunk_builder(chunks, messages=TALK).choices[0].message.content == text
    assert [chunk.usage.completion_tokens for chunk in chunks if getattr(chunk, "usage", None)][-1] == 9

    async def both() -> list[Any]:
        return await asyncio.gather(*(litellm.acompletion(**asked) for _ in range(8)))

    assert {answer.choices[0].message.content for answer in asyncio.run(both())} == {text}


def test_litellm_completes_text(options: dict[str, Any]):
    asked = {
        **options,
        "model": "text-completion-openai/tiny",
        "prompt": "The quick",
        "max_tokens": 5,
        "temperature": 0,
    }
    whole = litellm.text_completion(**asked, logprobs=1)
    assert len(whole.choices[0].logprobs.tokens) == 5
    streamed = "".join(chunk.choices[0].text or "" for chunk in litellm.text_completion(**asked, stream=True))
    assert streamed == whole.choices[0].text


@pytest.mark.parametrize("stream", [False, True])
def test_litellm_calls_tools(options: dict[str, Any], stream: bool):
    asked = {**options, "messages": TALK, "tools": TOOLS, "max_tokens": 200}
    for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
        answer = litellm.completion(**asked, tool_choice=choice, stream=stream, parallel_tool_calls=False)
        if stream:
            answer = litellm.stream_chunk_builder(list(answer), messages=TALK)
        (call,) = answer.choices[0].message.tool_calls
        assert set(json.loads(call.function.arguments)) == set(SCHEMAS[call.function.name]["required"])
        assert answer.choices[0].finish_reason == "tool_calls"
        talk = [
            *TALK,
            answer.choices[0].message.model_dump(),
            {"role": "tool", "tool_call_id": call.id, "content": "9"},
        ]
        assert litellm.completion(**{**asked, "messages": talk, "max_tokens": 3}, tool_choice="none").usage


def test_litellm_follows_schemas(options: dict[str, Any]):
    schema = SCHEMAS["weather"]
    form = {"type": "json_schema", "json_schema": {"name": "weather", "schema": schema, "strict": True}}
    answer = litellm.completion(**options, messages=TALK, response_format=form, max_tokens=200)
    assert json.loads(answer.choices[0].message.content)["city"] in ("Rom", "Köln")


def test_litellm_embeds(encoder: Running):
    options = {"model": "openai/embedder", "api_base": f"{encoder.url}/v1", "api_key": "none"}
    found = litellm.embedding(**options, input=["we the people", "a dog"])
    assert [each["index"] for each in found.data] == [0, 1] and len(found.data[0]["embedding"]) == 24
    assert found.usage.prompt_tokens > 4
    assert (
        len(
            litellm.embedding(**options, input=["a"], dimensions=8, allowed_openai_params=["dimensions"]).data[0][
                "embedding"
            ]
        )
        == 8
    )


def test_litellm_knows_the_errors(options: dict[str, Any]):
    asked = {**options, "messages": TALK, "max_tokens": 3}
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(**{**asked, "max_tokens": 5000})
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion(**asked, temperature=-1)
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(**{**asked, "model": "openai/other"})
