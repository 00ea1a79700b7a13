"""Log-probabilities and echo over HTTP, from a server on two tensor-parallel ranks, read with the openai client."""

import httpx
import openai
import pytest
import torch
from pydantic import TypeAdapter

from colonnade.config import ServeConfig
from colonnade.serve import Completion, Engine, SamplingParams
from colonnade.serve.api import replies
from tests.serve import tiny
from tests.serve.serving import Running, server

PROMPT = "größer 🙂 fox"
GREEDY = {"temperature": 0, "max_tokens": 12}
IGNORE_EOS = {"ignore_eos": True}


@pytest.fixture(scope="module")
def running():
    with server(plan={"tp": 2}, page_tokens=4, pages=96, token_budget=16) as it:
        yield it


@pytest.fixture(scope="module")
def client(running: Running):
    with running.client as it:
        yield it


def engine_answer(prompt: str | list[int], **params: object) -> Completion:
    engine = Engine(tiny.model(dtype=torch.float32), tiny.tokenizer(), ServeConfig())
    return engine.generate([prompt], SamplingParams(**{**GREEDY, **IGNORE_EOS, **params}))[0]  # type: ignore[arg-type]


def _bytes_of(token: str) -> bytes:
    """The inverse of a completion's spelling of a token."""
    return bytes.fromhex(token[6:].replace("\\x", "")) if token.startswith("bytes:") else token.encode()


@pytest.mark.slow
def test_completion_logprobs_with_echo(client: openai.OpenAI):
    answer = client.completions.create(
        model="tiny", prompt=PROMPT, logprobs=3, echo=True, extra_body=IGNORE_EOS, **GREEDY
    )
    expected = engine_answer(PROMPT, logprobs=3, prompt_logprobs=3, echo=True)
    assert expected.prompt_logprobs and expected.logprobs
    entries = [*expected.prompt_logprobs, *expected.logprobs]
    choice = answer.choices[0]
    assert choice.text == expected.text and choice.text.startswith(PROMPT)
    told = choice.logprobs
    assert told is not None and told.tokens and told.token_logprobs and told.top_logprobs and told.text_offset
    assert told.token_logprobs[0] is None and told.top_logprobs[0] is None
    assert told.token_logprobs[1:] == pytest.approx([each.logprob for each in entries[1:]], abs=1e-4)
    assert told.text_offset == [each.offset for each in entries]
    assert len(told.tokens) == len(told.top_logprobs) == len(entries)
    spelled = [
        t.encode() if not t.startswith("bytes:") else bytes.fromhex(t[6:].replace("\\x", "")) for t in told.tokens
    ]
    assert spelled == [each.data for each in entries]
    for token, logprob, best, each in zip(
        told.tokens[1:], told.token_logprobs[1:], told.top_logprobs[1:], entries[1:], strict=True
    ):
        assert best[token] == logprob and 3 <= len(best) <= 4
        assert (max(best, key=lambda other: best[other]) == token) == each.greedy
    assert all(
        token == next(iter(best)) for token, best in list(zip(told.tokens, told.top_logprobs, strict=True))[-12:]
    )


def test_log_likelihood_of_a_continuation(client: openai.OpenAI):
    """lm-eval's local-completions: token ids, echo, logprobs 1, one token that it drops."""
    ids = [5, 9, 100, 7, 20, 31, 44, 2, 250, 17, 3]
    answer = client.completions.create(model="tiny", prompt=ids, echo=True, logprobs=1, max_tokens=1, temperature=0)
    only_prompt = client.completions.create(model="tiny", prompt=ids, echo=True, logprobs=1, max_tokens=0)
    told, prompt = answer.choices[0].logprobs, only_prompt.choices[0].logprobs
    assert told and prompt and told.token_logprobs and prompt.token_logprobs
    assert told.token_logprobs[:-1] == prompt.token_logprobs
    assert only_prompt.choices[0].finish_reason == "length" and only_prompt.usage
    assert (only_prompt.usage.prompt_tokens, only_prompt.usage.completion_tokens) == (11, 0)
    logp_TV = tiny.logits(tiny.model(), ids).log_softmax(-1)
    expected = [logp_TV[i, token].item() for i, token in enumerate(ids[1:])]
    assert prompt.token_logprobs[1:] == pytest.approx(expected, abs=1e-4)


def test_scoring_more_than_the_context_is_refused_with_numbers(running: Running):
    for count, wanted in ((128, 1), (200, 0)):
        asked = {"prompt": [5] * count, "echo": True, "logprobs": 1, "max_tokens": wanted}
        reply = httpx.post(f"{running.url}/v1/completions", json=asked)
        error = reply.json()["error"]
        assert reply.status_code == 400 and str(count) in error["message"] and "128" in error["message"], error


def test_streamed_logprobs_join_to_the_whole(client: openai.OpenAI):
    asked = {"model": "tiny", "prompt": [PROMPT, "The quick"], "logprobs": 2, "echo": True, "extra_body": IGNORE_EOS}
    whole = client.completions.create(**asked, **GREEDY)
    tokens: dict[int, list[str]] = {0: [], 1: []}
    logprobs: dict[int, list[float | None]] = {0: [], 1: []}
    texts = {0: "", 1: ""}
    for chunk in client.completions.create(**asked, **GREEDY, stream=True):
        choice = chunk.choices[0]
        assert choice.logprobs is not None
        texts[choice.index] += choice.text
        tokens[choice.index] += choice.logprobs.tokens or []
        logprobs[choice.index] += choice.logprobs.token_logprobs or []
    for choice in whole.choices:
        assert choice.logprobs is not None
        assert texts[choice.index] == choice.text and tokens[choice.index] == choice.logprobs.tokens
        assert logprobs[choice.index][1:] == pytest.approx(choice.logprobs.token_logprobs[1:], abs=1e-4)


def test_chat_logprobs(client: openai.OpenAI):
    messages = [{"role": "user", "content": "hi"}]
    asked = {"model": "tiny", "messages": messages, "logprobs": True, "top_logprobs": 4, "extra_body": IGNORE_EOS}
    whole = client.chat.completions.create(**asked, **GREEDY).choices[0]
    expected = engine_answer(tiny.tokenizer().encode_chat(messages), logprobs=4)
    assert expected.logprobs and whole.logprobs and whole.logprobs.content
    assert whole.message.content == expected.text
    for told, each in zip(whole.logprobs.content, expected.logprobs, strict=True):
        assert told.logprob == pytest.approx(each.logprob, abs=1e-4)
        assert bytes(told.bytes or ()) == each.data and told.token == each.data.decode(errors="replace")
        assert [bytes(other.bytes or ()) for other in told.top_logprobs] == [other.data for other in each.top]
    streamed = []
    for chunk in client.chat.completions.create(**asked, **GREEDY, stream=True):
        streamed += (chunk.choices[0].logprobs and chunk.choices[0].logprobs.content) or []
    assert [each.bytes for each in streamed] == [each.bytes for each in whole.logprobs.content]
    plain = client.chat.completions.create(**{**asked, "logprobs": False, "top_logprobs": None}, **GREEDY)
    assert plain.choices[0].logprobs is None and plain.choices[0].message.content == whole.message.content


def test_prompt_logprobs(running: Running):
    ids = [5, 9, 100, 7]
    logp_TV = tiny.logits(tiny.model(), ids).log_softmax(-1)
    body = {"prompt": ids, "prompt_logprobs": 2, "max_tokens": 1}
    entries = httpx.post(f"{running.url}/v1/completions", json=body).json()["choices"][0]["prompt_logprobs"]
    assert entries[0] is None and len(entries) == 4
    for entry, token, logp_V in zip(entries[1:], ids[1:], logp_TV, strict=False):
        assert set(entry) == {str(token), *map(str, logp_V.topk(2).indices.tolist())}
        assert entry[str(token)]["logprob"] == pytest.approx(logp_V[token].item(), abs=1e-4)
        assert entry[str(token)]["decoded_token"] == tiny.tokenizer().token_bytes(token).decode(errors="replace")
    talk = {"messages": [{"role": "user", "content": "x"}], "prompt_logprobs": 0, "max_tokens": 1}
    reply = httpx.post(f"{running.url}/v1/chat/completions", json=talk).json()
    assert reply["usage"]["prompt_tokens"] == len(reply["prompt_logprobs"])


def test_replies_match_the_schema(running: Running):
    with httpx.Client(base_url=running.url) as http:
        text = {"prompt": "x", "logprobs": 2, "echo": True, "max_tokens": 5}
        talk = {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "max_tokens": 5}
        for path, body, whole, chunk in (
            ("completions", text, replies.CompletionReply, replies.CompletionChunk),
            ("chat/completions", talk, replies.ChatReply, replies.ChatChunk),
        ):
            for more in ({}, {"prompt_logprobs": 1}):
                TypeAdapter(whole).validate_json(http.post(f"/v1/{path}", json={**body, **more}).content)
            events = http.post(f"/v1/{path}", json={**body, "stream": True}).text.split("\n\n")[:-2]
            assert len([TypeAdapter(chunk).validate_json(event.removeprefix("data: ")) for event in events]) > 2


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "top_logprobs is 21; it must be from 0 to 20"),
        ({"top_logprobs": 2}, "top_logprobs", "needs logprobs=true"),
        ({"logprobs": 3}, "logprobs", "valid boolean"),
        ({"prompt_logprobs": 21}, "prompt_logprobs", "from 0 to 20"),
        ({"echo": True}, "echo", "not supported"),
        ({"max_tokens": 0}, "max_tokens", "1 or more (0 only with echo or prompt_logprobs)"),
    ],
)
def test_bad_chats_are_refused(running: Running, body: dict, param: str, words: str):
    talk = {"messages": [{"role": "user", "content": "x"}], **body}
    reply = httpx.post(f"{running.url}/v1/chat/completions", json=talk)
    error = reply.json()["error"]
    assert reply.status_code == 400 and error["param"] == param and words in error["message"], error
