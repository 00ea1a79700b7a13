"""A real server process on a real socket, queried with the openai client."""

import asyncio
import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest
import torch
from pydantic import TypeAdapter

from colonnade.config import ServeConfig
from colonnade.serve import Engine, SamplingParams
from colonnade.serve.api import replies
from tests.serve import tiny
from tests.serve.serving import Running, server

GREEDY = {"temperature": 0, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def running():
    with server(page_tokens=4, pages=96, token_budget=64, max_body_bytes=20_000) as it:
        yield it


@pytest.fixture(scope="module")
def client(running: Running):
    with running.client as it:
        yield it


def metric(running: Running, name: str) -> float:
    lines = httpx.get(f"{running.url}/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(f"colonnade:{name}{{"))


def settle(running: Running) -> None:
    """Wait until the engine is idle; leaked pages fail the test."""
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    limit_s = time.monotonic() + 20
    while left := {name: value for name in names if (value := metric(running, name))}:
        assert time.monotonic() < limit_s, left
        time.sleep(0.02)


# -- responses ---------------------------------------------------------------------------------------------------------


def test_completion_equals_engine(client: openai.OpenAI):
    answer = client.completions.create(model="tiny", prompt="The quick", max_tokens=9, **GREEDY)
    engine = Engine(tiny.model(dtype=torch.float32), tiny.tokenizer(), ServeConfig())
    expected = engine.generate(["The quick"], SamplingParams(temperature=0, max_tokens=9, ignore_eos=True))[0]
    assert answer.choices[0].text == expected.text and answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (expected.prompt_tokens, 9)
    assert answer.usage.total_tokens == expected.prompt_tokens + 9
    assert answer.model == "tiny" and answer.object == "text_completion" and answer.id.startswith("cmpl-")


def test_default_is_sixteen_tokens(client: openai.OpenAI):
    answer = client.completions.create(model="tiny", prompt="The quick", **GREEDY)
    assert answer.usage is not None and answer.usage.completion_tokens == 16


def test_lists_of_prompts_and_of_tokens(client: openai.OpenAI):
    ids = [tiny.tokenizer().encode(text) for text in ("The quick", "My fellow")]
    for prompt in (["The quick", "My fellow"], ids):
        both = client.completions.create(model="tiny", prompt=prompt, max_tokens=5, **GREEDY)
        assert [choice.index for choice in both.choices] == [0, 1]
        for choice, one in zip(both.choices, prompt, strict=True):
            alone = client.completions.create(model="tiny", prompt=one, max_tokens=5, **GREEDY)
            assert choice.text == alone.choices[0].text


def test_chat_uses_the_template(client: openai.OpenAI):
    messages: list = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    answer = client.chat.completions.create(model="tiny", messages=messages, max_completion_tokens=7, **GREEDY)
    rendered = "<|system|>Be brief.\n<|user|>Hello\n<|assistant|>"
    same = client.completions.create(model="tiny", prompt=rendered, max_tokens=7, **GREEDY)
    assert answer.choices[0].message.content == same.choices[0].text
    assert answer.choices[0].message.role == "assistant" and answer.object == "chat.completion"
    again: list = [
        *messages,
        answer.choices[0].message,
        {"role": "user", "content": [{"type": "text", "text": "Go on"}]},
    ]
    assert client.chat.completions.create(model="tiny", messages=again, max_tokens=3, **GREEDY).usage


def test_stream_chunks_join_to_the_completion(client: openai.OpenAI):
    asked = {"model": "tiny", "prompt": "The quick", "max_tokens": 12, **GREEDY}
    whole = client.completions.create(**asked)
    chunks = list(client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].text for c in chunks if c.choices) == whole.choices[0].text
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage
    assert len({c.id for c in chunks}) == 1 and len(chunks) > 4
    assert all(c.usage is None for c in chunks[:-1])


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_continuous_usage_counts_the_tokens_so_far(running: Running, path: str):
    asked = {"prompt": "The quick"} if path == "completions" else {"messages": [{"role": "user", "content": "x"}]}
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {**asked, "max_tokens": 12, "temperature": 0, "ignore_eos": True, "stream": True, "stream_options": options}
    events = httpx.post(f"{running.url}/v1/{path}", json=body).text.split("\n\n")[:-2]
    usages = [json.loads(event.removeprefix("data: "))["usage"] for event in events]
    counts = [usage["completion_tokens"] for usage in usages]
    assert counts == sorted(counts) and counts[0] >= 1 and counts[-2:] == [12, 12] and len(set(counts)) > 3
    assert all(u["total_tokens"] == u["prompt_tokens"] + u["completion_tokens"] and u["prompt_tokens"] for u in usages)
    del options["include_usage"]
    events = httpx.post(f"{running.url}/v1/{path}", json=body).text.split("\n\n")[:-2]
    assert not any("usage" in json.loads(event.removeprefix("data: ")) for event in events)


def test_chat_streams_and_several_prompts_stream(client: openai.OpenAI):
    asked = {"model": "tiny", "messages": [{"role": "user", "content": "ö"}], "max_tokens": 8, **GREEDY}
    whole = client.chat.completions.create(**asked).choices[0].message.content
    chunks = list(client.chat.completions.create(**asked, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == whole
    texts = {0: "", 1: ""}
    for chunk in client.completions.create(model="tiny", prompt=["a", "b"], max_tokens=5, stream=True, **GREEDY):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    plain = client.completions.create(model="tiny", prompt=["a", "b"], max_tokens=5, **GREEDY)
    assert [texts[0], texts[1]] == [choice.text for choice in plain.choices]


def test_the_wire_format_is_server_sent_events_in_utf_8(running: Running):
    body = {"prompt": "你好", "max_tokens": 30, "stream": True, "seed": 3, "ignore_eos": True}
    with httpx.stream("POST", f"{running.url}/v1/completions", json=body) as reply:
        assert reply.headers["content-type"].startswith("text/event-stream")
        events = [line for line in b"".join(reply.iter_bytes()).decode("utf-8").split("\n\n") if line]
    assert all(event.startswith("data: ") for event in events) and events[-1] == "data: [DONE]"
    text = "".join(json.loads(event[6:])["choices"][0]["text"] for event in events[:-1])
    whole = httpx.post(f"{running.url}/v1/completions", json={**body, "stream": False}).json()
    assert text == whole["choices"][0]["text"]


def test_stop_strings_end_the_text(client: openai.OpenAI):
    text = client.completions.create(model="tiny", prompt="The quick", max_tokens=20, **GREEDY).choices[0].text
    stop = text[6:9]
    for stream in (False, True):
        asked = {"model": "tiny", "prompt": "The quick", "max_tokens": 20, "stop": [stop, "never"], **GREEDY}
        pieces = (
            list(client.completions.create(**asked, stream=True)) if stream else [client.completions.create(**asked)]
        )
        assert "".join(p.choices[0].text for p in pieces) == text[: text.index(stop)]
        assert pieces[-1].choices[0].finish_reason == "stop"


def test_a_seed_repeats_and_another_does_not(client: openai.OpenAI):
    def complete(seed: int) -> str:
        asked = {"model": "tiny", "prompt": "dog", "max_tokens": 20, "seed": seed, "temperature": 1.2}
        return client.completions.create(**asked, extra_body={"ignore_eos": True, "top_k": 100}).choices[0].text

    with ThreadPoolExecutor(6) as pool:
        texts = list(pool.map(complete, [1, 2, 1, 2, 1, 2]))
    assert texts[0] == texts[2] == texts[4] != texts[1] == texts[3] == texts[5]


def test_the_async_client(running: Running):
    async def ask() -> tuple[str, str]:
        async with running.async_client as client:
            asked = {"model": "tiny", "prompt": "The quick", "max_tokens": 9, **GREEDY}
            whole = (await client.completions.create(**asked)).choices[0].text
            stream = await client.completions.create(**asked, stream=True)
            return whole, "".join([chunk.choices[0].text async for chunk in stream])

    whole, streamed = asyncio.run(ask())
    assert whole == streamed != ""


def test_models_and_health(running: Running, client: openai.OpenAI):
    assert [card.id for card in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").model_dump()["max_model_len"] == 128
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("huge")
    assert httpx.get(f"{running.url}/health").json() == {"status": "ok"}
    assert httpx.get(f"{running.url}/ready").json() == {"status": "ready"}
    for path in ("health", "ready"):
        head = httpx.head(f"{running.url}/{path}")
        assert (head.status_code, head.content) == (200, b"")


def test_no_pages_with_external_scripts(running: Running):
    """FastAPI's /docs and /redoc load scripts from a CDN, so they are disabled."""
    assert "/v1/completions" in httpx.get(f"{running.url}/openapi.json").json()["paths"]
    assert [httpx.get(f"{running.url}/{page}").status_code for page in ("docs", "redoc")] == [404, 404]


def test_responses_match_the_openapi_schema(running: Running):
    calm = {"temperature": 0, "ignore_eos": True}
    prompt, talk = {"prompt": "The quick", **calm}, {"messages": [{"role": "user", "content": "x"}], **calm}
    with httpx.Client(base_url=running.url) as http:
        for path, asked, whole, chunk in (
            ("completions", prompt, replies.CompletionReply, replies.CompletionChunk),
            ("chat/completions", talk, replies.ChatReply, replies.ChatChunk),
        ):
            TypeAdapter(whole).validate_json(http.post(f"/v1/{path}", json={**asked, "max_tokens": 12}).content)
            options = {"stream": True, "stream_options": {"include_usage": True}}
            for more in ({"stream": True}, options):
                events = http.post(f"/v1/{path}", json={**asked, "max_tokens": 12, **more}).text.split("\n\n")[:-2]
                assert len([TypeAdapter(chunk).validate_json(event.removeprefix("data: ")) for event in events]) > 2
        TypeAdapter(replies.ModelList).validate_json(http.get("/v1/models").content)
        TypeAdapter(replies.ErrorReply).validate_json(http.get("/v1/models/huge").content)


# -- bad requests------------------------------------------------------------------------------------------------------


def test_an_unknown_model_is_not_found(client: openai.OpenAI):
    with pytest.raises(openai.NotFoundError, match="there is no model 'gpt-9' here; use 'tiny'") as refusal:
        client.completions.create(model="gpt-9", prompt="x")
    assert (refusal.value.param, refusal.value.code) == ("model", "model_not_found")


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_over_the_context_is_refused_with_the_numbers(client: openai.OpenAI, stream: bool):
    with pytest.raises(openai.BadRequestError, match="the prompt has 120, and max_tokens 9 make them 129") as no:
        client.completions.create(model="tiny", prompt=[1] * 120, max_tokens=9, stream=stream)
    assert (no.value.param, no.value.code) == ("prompt", "context_length_exceeded")
    with pytest.raises(openai.BadRequestError, match="this model's maximum context length is 128 tokens") as no:
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x" * 500}], stream=stream)
    assert no.value.param == "messages"


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"prompt": "x", "temperature": -1}, "temperature", "temperature is -1.0; it must be 0 or more"),
        ({"prompt": "x", "temperature": "hot"}, "temperature", "temperature is 'hot': input should be a valid number"),
        (b'{"prompt": "x", "temperature": NaN}', "temperature", "temperature is nan"),
        (b'{"prompt": "x", "temperature": 1' + b"0" * 400 + b"}", "temperature", "temperature"),
        ({"prompt": "x", "seed": 10**30}, "seed", "signed 64-bit"),
        ({"prompt": [10**30]}, "prompt", "not in the vocabulary"),
        ({"prompt": "x", "max_tokens": 10**30}, "prompt", "context length is 128"),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens", "max_tokens is 0; it must be 1 or more"),
        ({"prompt": "x", "max_tokens": True}, "max_tokens", "valid integer"),
        ({"prompt": "x", "top_p": 2}, "top_p", "above 0 and at most 1"),
        ({"prompt": "x", "stop": [""]}, "stop", "non-empty"),
        ({"prompt": "x", "temprature": 1}, "temprature", "unknown parameter 'temprature'; did you mean 'temperature'?"),
        ({"prompt": "x", "logprobs": 21}, "logprobs", "logprobs is 21; it must be from 0 to 20"),
        ({"prompt": "x", "logprobs": True}, "logprobs", "valid integer"),
        ({"prompt": "x", "top_logprobs": 1}, "top_logprobs", "top_logprobs=1 is not supported"),
        ({"prompt": "x", "prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "cannot be streamed"),
        ({"prompt": "x", "suffix": "y"}, "suffix", "suffix='y' is not supported"),
        ({"prompt": "x", "stream_options": {"include_usage": True}}, "stream_options", "needs stream=true"),
        ({}, "prompt", "'prompt' is missing"),
        ({"prompt": ""}, "prompt", "the prompt is empty"),
        ({"prompt": []}, "prompt", "prompt must be a string, a list of token ids"),
        ({"prompt": [1, "x"]}, "prompt", "prompt must be a string, a list of token ids"),
        ({"prompt": [301]}, "prompt", "token 301 is not in the vocabulary of 301"),
        ({"prompt": "x", "stop_token_ids": [301]}, "stop_token_ids", "token 301 of stop_token_ids is not in the"),
        ({"prompt": ["fine", ""]}, "prompt", "the prompt is empty"),
        ({"prompt": "\ud800"}, "prompt", "lone surrogate"),
        ([1, 2], None, "the body is a list of 2; send a JSON object"),
        (b'{"prompt": ', None, "not valid JSON"),
        (b"", None, "the body"),
        (b"[" * 9000, None, "body"),
    ],
)
def test_bad_bodies_are_refused_with_the_parameter(running: Running, body, param: str | None, words: str):
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"content-type": "application/json"}
    reply = httpx.post(f"{running.url}/v1/completions", content=content, headers=headers)
    error = reply.json()["error"]
    assert reply.status_code == 400 and error["param"] == param and words in error["message"], error
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "messages is empty"),
        ("hello", "valid list"),
        ([{"role": "user"}], "has no content; send text"),
        ([{"role": "bot", "content": "x"}], "'system', 'developer', 'user', 'assistant' or 'tool'"),
        ([{"role": "developer", "content": "x"}], "refuses these messages: unknown role developer"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            "only parts of type 'text'",
        ),
        ([{"role": "user", "content": "x", "tool_calls": [1]}], "tool_calls"),
    ],
)
def test_bad_chats_are_refused(running: Running, messages, words: str):
    reply = httpx.post(f"{running.url}/v1/chat/completions", json={"messages": messages})
    error = reply.json()["error"]
    assert reply.status_code == 400 and error["param"] == "messages" and words in error["message"], error


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        (rb'{"model": "\ud83d", "prompt": "a"}', "model", "model has the lone surrogate U+D83D at character 0"),
        (rb'{"prompt": "a", "x\uDE00": 1}', None, "the name of a field in the body has the lone surrogate U+DE00"),
        (rb'{"prompt": ["a", "b \ud83d"]}', "prompt", "prompt.1 has the lone surrogate U+D83D at character 2"),
        (rb'{"prompt": "a", "stop": ["\udfff"]}', "stop", "stop.0 has the lone surrogate"),
        (
            rb'{"prompt": "a", "user": "\ud83d\ud83d\ude00"}',
            "user",
            "user has the lone surrogate U+D83D at character 0",
        ),
        (rb'{"prompt": "a", "metadata": {"k": [{"\ud800": 1}]}}', "metadata", "a field in metadata.k.0 has the lone"),
        (rb'"\ud800"', None, "the body has the lone surrogate"),
        (b'{"prompt": "\xed\xa0\xbd"}', None, "the body is not UTF-8"),
    ],
    ids=range(8),
)
@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_lone_surrogates_are_refused_anywhere(running: Running, path: str, body: bytes, param: str | None, words: str):
    headers = {"content-type": "application/json"}
    reply = httpx.post(f"{running.url}/v1/{path}", content=body, headers=headers)
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["param"] == param and words in error["message"], error


def test_escaped_characters_and_backslashes_are_no_surrogates(running: Running):
    """A pair of escapes is one character, and an escaped backslash begins no escape."""
    for prompt in (rb"\ud83d\ude42", rb"\\ud83d"):
        content = b'{"prompt": "%s", "max_tokens": 1}' % prompt
        reply = httpx.post(
            f"{running.url}/v1/completions", content=content, headers={"content-type": "application/json"}
        )
        assert reply.status_code == 200, reply.text


def test_harmless_parameters_are_accepted(client: openai.OpenAI):
    asked = {
        "model": "tiny",
        "prompt": "x",
        "max_tokens": 1,
        "user": "me",
        "n": 1,
        "presence_penalty": 0,
        "echo": False,
    }
    assert client.completions.create(**asked, logprobs=None, best_of=1, suffix=None).choices


def test_all_errors_have_the_same_format(running: Running):
    for method, path, status in (("GET", "/nope", 404), ("GET", "/v1/completions", 405)):
        reply = httpx.request(method, running.url + path)
        assert reply.status_code == status and set(reply.json()["error"]) == {"message", "type", "param", "code"}
        assert ("use POST" if status == 405 else "/openapi.json") in reply.json()["error"]["message"]
    form = httpx.post(f"{running.url}/v1/completions", data={"prompt": "x"})
    assert form.status_code == 400 and "content-type: application/json" in form.json()["error"]["message"]


def test_a_large_body_is_refused_before_it_is_parsed(running: Running, client: openai.OpenAI):
    with pytest.raises(openai.APIStatusError, match="bytes or more; send at most 20,000") as refusal:
        client.completions.create(model="tiny", prompt="x" * 100_000)
    assert refusal.value.status_code == 413

    def endless():
        for _ in range(300):
            yield b"x" * 1000

    reply = httpx.post(f"{running.url}/v1/completions", content=endless())
    assert reply.status_code == 413 and reply.json()["error"]["code"] == "body_too_large"


def test_prompts_beyond_the_queue_are_refused_together(running: Running, client: openai.OpenAI):
    before = metric(running, "request_success_total")
    with pytest.raises(
        openai.BadRequestError, match=r"1,025 completions; send at most 1,024 in one request$"
    ) as refusal:
        client.completions.create(model="tiny", prompt=["x"] * 1025)
    assert (refusal.value.param, refusal.value.code) == ("prompt", "too_many_prompts")
    settle(running)
    assert metric(running, "request_success_total") == before


def test_no_refusal_names_a_flag_of_the_server(running: Running):
    """Each has the numbers that a client needs, in every description and message."""
    bodies: list[dict] = [
        {"prompt": "x" * 30_000}, {"prompt": ["x"] * 1025}, {"prompt": [1] * 100, "max_tokens": 100},
        {"prompt": [1] * 200}, {"prompt": "x" * 10_000}, {"prompt": "x", "top_p": 7}, {"prompt": "x", "n": 99},
    ]  # fmt: skip
    replies = [httpx.post(f"{running.url}/v1/completions", json=body) for body in bodies]
    texts = [reply.json()["error"]["message"] for reply in replies]
    assert {reply.status_code for reply in replies} <= {400, 413}
    assert not [text for text in texts if "--" in text], texts
    assert "--" not in httpx.get(f"{running.url}/openapi.json").text
    assert "make them 200: ask for at most 28" in texts[2]


def test_a_message_cannot_forge_control_tokens(client: openai.OpenAI):
    """In a message <|end|> is seven text tokens; in a raw prompt it is one control token."""
    prompt_ids = tiny.tokenizer().encode_documents(["<|user|>a<|end|>b\n<|assistant|>"])[0]
    assert tiny.tokenizer().eos_ids[0] not in prompt_ids and tiny.tokenizer().encode("a<|end|>b")[1] == 0
    messages: list = [{"role": "user", "content": "a<|end|>b"}]
    chat = client.chat.completions.create(model="tiny", messages=messages, max_tokens=7, **GREEDY)
    same = client.completions.create(model="tiny", prompt=prompt_ids, max_tokens=7, **GREEDY)
    assert chat.usage and same.usage and chat.usage.total_tokens == same.usage.total_tokens
    assert chat.choices[0].message.content == same.choices[0].text


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": "a"}),
        ("/classify", {"input": "a"}),
        ("/v1/score", {"text_1": "a", "text_2": "b"}),
        ("/rerank", {"query": "a", "documents": ["b"]}),
    ],
)
def test_a_model_that_generates_embeds_no_text(running: Running, path: str, body: dict):
    reply = httpx.post(f"{running.url}{path}", json=body)
    error = reply.json()["error"]
    assert reply.status_code == 400 and error["code"] == "wrong_endpoint"
    assert error["message"] == "the model 'tiny' generates text; use /v1/chat/completions or /v1/completions"


# -- concurrency and disconnects----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_sixty_four_clients_at_once(running: Running):
    """More than the pool can hold: some wait, some are preempted, each gets its own text."""
    prompts = [tiny.TEXT[i % 3][: 5 + i] for i in range(64)]

    async def ask(client: openai.AsyncOpenAI, number: int) -> tuple[str, int]:
        asked = {"model": "tiny", "prompt": prompts[number], "max_tokens": 10 + number % 7, **GREEDY}
        if number % 2:
            answer = await client.completions.create(**asked)
            assert answer.usage is not None
            return answer.choices[0].text, answer.usage.completion_tokens
        stream = await client.completions.create(**asked, stream=True, stream_options={"include_usage": True})
        chunks = [chunk async for chunk in stream]
        assert chunks[-1].usage is not None
        return "".join(c.choices[0].text for c in chunks if c.choices), chunks[-1].usage.completion_tokens

    async def crowd() -> list[tuple[str, int]]:
        async with running.async_client as client:
            return await asyncio.gather(*(ask(client, number) for number in range(64)))

    answers = asyncio.run(crowd())
    assert [count for _, count in answers] == [10 + number % 7 for number in range(64)]
    engine = Engine(tiny.model(dtype=torch.float32), tiny.tokenizer(), ServeConfig())
    params = [SamplingParams(temperature=0, max_tokens=10 + i % 7, ignore_eos=True) for i in range(64)]
    assert [text for text, _ in answers] == [c.text for c in engine.generate(prompts, params)]
    settle(running)
    assert metric(running, "num_preemptions_total") > 0


@pytest.mark.sample(1)
@pytest.mark.parametrize("stream", [True, False])
def test_disconnected_client_frees_its_pages(running: Running, stream: bool):
    before = metric(running, "request_success_total")
    body = json.dumps({"prompt": "The quick", "max_tokens": 115, "ignore_eos": True, "stream": stream}).encode()
    host, port = running.url.removeprefix("http://").split(":")
    lines = [socket.create_connection((host, int(port))) for _ in range(20)]
    for line in lines:
        head = f"host: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        line.sendall(b"POST /v1/completions HTTP/1.1\r\n" + head.encode() + body)
    lines[0].recv(1)  # the request is running
    for line in lines:
        line.close()
    settle(running)
    text = httpx.get(f"{running.url}/metrics").text
    assert 'finished_reason="cancelled"' in text
    assert metric(running, "request_success_total") == before + 20


def test_metrics_match_responses(running: Running, client: openai.OpenAI):
    names = ("prompt_tokens_total", "generation_tokens_total", "e2e_request_latency_seconds_count")
    before = [metric(running, name) for name in names]
    usage = client.completions.create(model="tiny", prompt="The quick", max_tokens=9, **GREEDY).usage
    assert usage is not None
    after = [metric(running, name) for name in names]
    assert [b - a for a, b in zip(before, after, strict=True)] == [usage.prompt_tokens, 9, 1]
    assert metric(running, "shared_keys_read_total") == metric(running, "shared_keys_spared_total") == 0
