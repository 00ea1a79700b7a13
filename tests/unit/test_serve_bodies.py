"""The HTTP layer: request bodies that it refuses, and its OpenAPI description."""

import asyncio
import inspect
import json
import re
from typing import Any

import httpx
import openai
import pytest

from colonnade.config import ServeConfig
from colonnade.serve.api.chat_schemas import ChatBody
from colonnade.serve.api.request_schemas import IGNORED, UNSUPPORTED, CompletionBody
from colonnade.serve.api.routes import build_app
from colonnade.serve.engine_client import EngineClient
from colonnade.serve.served_models import ServedModels

APP = build_app(ServedModels({"tiny": EngineClient()}), ServeConfig())


def send(method: str, path: str, **more: Any) -> httpx.Response:
    """One request to the application, without a socket or an engine."""

    async def once() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(APP), base_url="http://here") as http:
            return await asyncio.wait_for(http.request(method, path, **more), 10)

    return asyncio.run(once())


def refusal(body: bytes | dict[str, Any], path: str = "/v1/completions") -> dict[str, Any]:
    content = body if isinstance(body, bytes) else json.dumps({"prompt": "x", **body}).encode()
    reply = send("POST", path, content=content, headers={"content-type": "application/json"})
    assert reply.status_code == 400, reply.text
    return reply.json()["error"]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"prompt": "\xff"}', r"the body is not UTF-8: invalid start byte \(0xff\) at byte 12; send JSON in UTF-8"),
        (b"[" * 100_000, "the body nests lists or objects too deeply"),
        (b'{"a":' * 100_000, "the body nests lists or objects too deeply"),
        (b'{"prompt": ' + b"1" * 5000 + b"}", r"the body cannot be read: exceeds the limit \(4300 digits\)"),
        (b'{"prompt": ', "the body is not valid JSON: Expecting value at character 11"),
    ],
    ids=range(5),
)
def test_invalid_json_is_explained(body: bytes, words: str):
    error = refusal(body)
    assert error["code"] == "invalid_json" and error["param"] is None
    assert re.match(words, error["message"]), error


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"prompt": "x", "temperature": 1e400}', "temperature is inf: input should be a finite number"),
        ({"max_tokens": True}, "max_tokens is true: input should be a valid integer"),
        ({"max_tokens": 3.0}, "max_tokens is 3.0: input should be a valid integer"),
        ({"max_tokens": "3"}, "max_tokens is '3': input should be a valid integer"),
        ({"model": 5}, "model is 5: input should be a valid string"),
        ({"stop": ["ok", 5]}, "stop.1 is 5; it must be a string"),
        ({"stop": 5}, "stop is 5; it must be a string or a list of strings"),
        ({"stop": {"a": 1}}, "stop is an object; it must be a string or a list of strings"),
        ({"stop": ["ok", "x" * 513]}, "stop.1 has 513 characters; a stop string may have at most 512"),
        ({"stop": "x" * 100_000}, "stop has 100000 characters; a stop string may have at most 512"),
        ({"stop": ["x" * 512] * 65}, "at most 64"),
        ({"model": "m" * 100}, "there is no model"),
        ({"seed": [1, 2]}, "seed is a list of 2: input should be a valid integer"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools is not supported; remove it"),
        ({"reasoning_effort": "high"}, "reasoning_effort='high' is not supported; remove it"),
        ({"verbosity": "low"}, "verbosity='low' is not supported; remove it"),
        ({"beam_width": 1}, "unknown parameter 'beam_width'; remove it"),
        ({"stream_option": 1}, "unknown parameter 'stream_option'; did you mean 'stream_options'?"),
    ],
    ids=range(18),
)
def test_errors_quote_values_as_sent(body: bytes | dict[str, Any], message: str):
    content = body if isinstance(body, bytes) else json.dumps({"prompt": "x", **body}).encode()
    reply = send("POST", "/v1/completions", content=content, headers={"content-type": "application/json"})
    assert reply.status_code == (404 if "no model" in message else 400)
    assert message in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "create"),
    [
        (ChatBody, openai.resources.chat.Completions.create),
        (CompletionBody, openai.resources.Completions.create),
    ],
)
def test_every_parameter_of_the_openai_client_is_known(body: type[ChatBody] | type[CompletionBody], create: Any):
    theirs = set(inspect.signature(create).parameters)
    theirs -= {"self", "extra_headers", "extra_query", "extra_body", "timeout"}  # of the client itself
    assert theirs - set(body.model_fields) - set(UNSUPPORTED) - IGNORED == set()


def test_openapi_lists_status_codes_and_schemas():
    description = send("GET", "/openapi.json").json()
    text, defined = json.dumps(description), description["components"]["schemas"]
    assert set(re.findall(r'"#/components/schemas/(\w+)"', text)) <= set(defined)
    assert "HTTPValidationError" not in defined
    for path, whole, chunk in (
        ("/v1/completions", "CompletionReply", "CompletionChunk"),
        ("/v1/chat/completions", "ChatReply", "ChatChunk"),
    ):
        responses = description["paths"][path]["post"]["responses"]
        assert set(responses) == {"200", "400", "401", "403", "404", "413", "429", "500", "503", "504", "4XX"}
        shapes = {status: reply["content"]["application/json"]["schema"]["$ref"] for status, reply in responses.items()}
        assert shapes.pop("200").endswith(f"/{whole}")
        assert {shape.rsplit("/")[-1] for shape in shapes.values()} == {"ErrorReply"}
        event = responses["200"]["content"]["text/event-stream"]["itemSchema"]
        done, data = event["properties"]["data"]["anyOf"]
        names = [each["$ref"].rsplit("/")[-1] for each in data["contentSchema"]["anyOf"]]
        assert done == {"const": "[DONE]"} and names == [chunk, "ErrorReply"] and event["required"] == ["data"]
    stream = description["paths"]["/v1/responses"]["post"]["responses"]["200"]["content"]["text/event-stream"]
    assert stream["itemSchema"]["properties"]["data"]["contentSchema"]["$ref"].endswith("/ResponseEvent")
    for path, shape in (
        ("/v1/models", "ModelList"),
        ("/v1/models/{name}", "ModelCard"),
        ("/health", "Health"),
        ("/ready", "Readiness"),
    ):
        reply = description["paths"][path]["get"]["responses"]["200"]["content"]["application/json"]
        assert reply["schema"]["$ref"].endswith(f"/{shape}")
