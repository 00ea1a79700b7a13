"""Token ids in replies, the prompt's special tokens, and the tokens that the prefix cache had."""

import json
from typing import Any

import httpx
import openai
import tokenizers
import torch

from colonnade.config import ServeConfig
from colonnade.data.tokenizer import Tokenizer
from colonnade.serve import Engine, SamplingParams
from colonnade.serve.generation_request import GenerationRequest
from colonnade.serve.message_reader import prepare
from tests.serve import tiny
from tests.serve.serving import Running

GREEDY = {"max_tokens": 9, "temperature": 0, "ignore_eos": True}
MESSAGES: list[Any] = [{"role": "user", "content": "hello"}]


def post(at: Running, path: str, **body: Any) -> Any:
    reply = httpx.post(f"{at.url}/v1/{path}", json={**GREEDY, **body}, timeout=120)
    assert reply.status_code == 200, reply.text
    return reply.json()


def chunks(at: Running, path: str, **body: Any) -> list[Any]:
    reply = httpx.post(f"{at.url}/v1/{path}", json={**GREEDY, **body, "stream": True}, timeout=120)
    lines = [line[6:] for line in reply.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines[:-1]]


def expected(prompt: list[int]) -> list[int]:
    return tiny.greedy_tokens(tiny.model(dtype=torch.float32, context=1024), prompt, 9)


def test_completions_have_token_ids(tool_server: Running):
    prompts = [[5, 3, 5], [7]]
    reply = post(tool_server, "completions", prompt=prompts, n=2, return_token_ids=True)
    assert [choice["prompt_token_ids"] for choice in reply["choices"]] == [prompts[0]] * 2 + [prompts[1]] * 2
    assert [choice["token_ids"] for choice in reply["choices"][::2]] == [expected(prompt) for prompt in prompts]
    parts = chunks(tool_server, "completions", prompt=prompts, return_token_ids=True)
    for index, prompt in enumerate(prompts):
        mine = [choice for chunk in parts for choice in chunk["choices"] if choice["index"] == index]
        assert [choice["prompt_token_ids"] for choice in mine] == [prompt] + [None] * 8
        assert [choice["token_ids"] for choice in mine] == [[token] for token in expected(prompt)], "also without text"
    only = post(tool_server, "completions", prompt="hello", max_tokens=0, echo=True, return_token_ids=True)["choices"][
        0
    ]
    assert (only["prompt_token_ids"], only["token_ids"]) == (tiny.tokenizer(tools=True).encode("hello"), [])
    plain = post(tool_server, "completions", prompt="hello")["choices"][0]
    assert "token_ids" not in plain and "prompt_token_ids" not in plain


def test_chats_have_token_ids(tool_server: Running):
    prompt = tiny.tokenizer(tools=True).encode_chat(MESSAGES)
    reply = post(tool_server, "chat/completions", messages=MESSAGES, return_token_ids=True)
    assert reply["prompt_token_ids"] == prompt and reply["choices"][0]["token_ids"] == expected(prompt)
    parts = chunks(tool_server, "chat/completions", messages=MESSAGES, return_token_ids=True)
    ids = [chunk["prompt_token_ids"] for chunk in parts if "prompt_token_ids" in chunk]
    assert ids == [prompt]
    tokens = [token for chunk in parts for token in chunk["choices"][0].get("token_ids", ())]
    assert tokens == expected(prompt)


def test_usage_has_the_tokens_of_the_prefix_cache(tool_server: Running):
    prompt = [(11 * i) % 290 + 1 for i in range(23)]
    body = {"prompt": prompt, "n": 2}
    first, again = (post(tool_server, "completions", **body)["usage"] for _ in range(2))
    assert first["prompt_tokens_details"] == {"cached_tokens": 0} and first["prompt_tokens"] == 23
    assert again["prompt_tokens_details"] == {"cached_tokens": 20}, "whole pages of 4, and the last token is run"
    two = post(tool_server, "completions", prompt=[prompt, prompt], n=2)["usage"]
    assert two["prompt_tokens_details"] == {"cached_tokens": 40}
    options = {"include_usage": True, "continuous_usage_stats": True}
    usages = [chunk["usage"] for chunk in chunks(tool_server, "completions", prompt=prompt, stream_options=options)]
    assert [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages] == [20] * len(usages)
    with tool_server.client as client:
        client.responses.create(model="tiny", input="a longer text", max_output_tokens=2)
        response = client.responses.create(model="tiny", input="a longer text", max_output_tokens=2)
    assert isinstance(response, openai.types.responses.Response)
    assert response.usage and response.usage.input_tokens_details.cached_tokens > 0


def test_a_preempted_request_counts_its_first_admission():
    limits = ServeConfig(pages=13, page_tokens=4, token_budget=64, max_requests=2)
    engine = Engine(tiny.model(dtype=torch.float32), tiny.tokenizer(), limits)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    outputs = [output for prompt in ([1] * 12, [2] * 12) for output in engine.stream(prompt, params)]
    for prompt in ([3] * 12, [4] * 12):
        engine.add(prompt, params)
    while engine.busy:
        outputs += engine.step()
    assert engine.stats.preemptions and {output.cached_tokens for output in outputs} == {0}


def test_special_tokens_are_added_to_texts_only_if_wanted(tool_server: Running):
    core = tokenizers.Tokenizer.from_str(tiny.tokenizer()._json)
    core.post_processor = tokenizers.processors.TemplateProcessing("<|end|> $A", special_tokens=[("<|end|>", 0)])
    tokenizer = Tokenizer(core, 0, (0,))
    engine = Engine(tiny.model(dtype=torch.float32), tokenizer, ServeConfig(pages=8, page_tokens=4))
    bare = tokenizer.encode("hello", special=False)
    for special, ids in ((True, [0, *bare]), (False, bare)):
        message = GenerationRequest(prompts=["hello", [3]], special=special).message(["a"])
        assert prepare(message, engine)["tokens"] == [ids, [3]]
    for given in (True, False, None):
        reply = post(tool_server, "completions", prompt="hello", add_special_tokens=given, return_token_ids=True)
        assert reply["choices"][0]["prompt_token_ids"] == tiny.tokenizer(tools=True).encode("hello")
    bad = httpx.post(f"{tool_server.url}/v1/completions", json={"prompt": "a", "add_special_tokens": "yes"})
    assert (bad.status_code, bad.json()["error"]["param"]) == (400, "add_special_tokens")
