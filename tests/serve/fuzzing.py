"""Mutated request bodies: valid ones whose values, fields or bytes are changed at random, but reproducibly."""

import copy
import http.client
import json
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

from tests.serve.serving import Running

CLIENTS = 8
"""Connections at a time."""

_TALK = [{"role": "user", "content": "Hello"}]
_TOOL = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}}
_CALL = {"id": "123456789", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
_SCHEMA = {
    "$defs": {"node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}}},
    "type": "object",
    "properties": {
        "a": {"type": "integer", "minimum": 0, "maximum": 9},
        "b": {"type": "array", "items": {"enum": ["x", 1, None]}, "minItems": 1, "maxItems": 2},
        "c": {"anyOf": [{"type": "string", "pattern": "^[a-z]{1,3}$"}, {"$ref": "#/$defs/node"}]},
        "d": {"type": "string", "format": "date", "minLength": 1},
    },
    "required": ["a"],
    "additionalProperties": False,
}
_SHORT: dict[str, Any] = {"model": "tiny", "max_tokens": 3}
_SAMPLING = {"temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 1, "n": 2, "min_tokens": 1}
_CONTROLS = {
    "stop": ["x", "yz"], "stop_token_ids": [5], "logit_bias": {"7": 3.5}, "bad_words": ["the"], "ignore_eos": True,
    "frequency_penalty": 1, "presence_penalty": -1, "repetition_penalty": 1.1, "skip_special_tokens": False,
}  # fmt: skip
_STREAM = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
_FORMAT = {"type": "json_schema", "json_schema": {"name": "s", "schema": _SCHEMA, "strict": True}}
_TEXTS = ["we the people", "a dog"]

BODIES: dict[str, list[Any]] = {
    "/v1/completions": [
        {**_SHORT, "prompt": "The quick", **_SAMPLING, **_CONTROLS, "priority": 1, "timeout_s": 60},
        {**_SHORT, "prompt": ["a", "b"], "logprobs": 2, "echo": True, "best_of": 1, "user": "me"},
        {**_SHORT, "prompt": [[1, 2, 3], [4]], "prompt_logprobs": 1, "structured_outputs": {"choice": ["a", "b"]}},
        {**_SHORT, "prompt": "a", **_STREAM, "structured_outputs": {"regex": "[a-z]{3}-?(x|y)*"}},
        {**_SHORT, "prompt": "a", "guided_grammar": 'root ::= "<" i ">"\ni ::= [xy]+ | "(" i ")"', "suffix": ""},
        {**_SHORT, "prompt": "a", "structured_outputs": {"grammar": 'start: "<" a ">"\na: /[xy]+/ | "(" a ")"'}},
        {**_SHORT, "prompt": "a", "guided_json": json.dumps(_SCHEMA)},
        {**_SHORT, "prompt": "a", "response_format": _FORMAT, "logprobs": 1, "n": 2},
    ],
    "/v1/chat/completions": [
        {**_SHORT, "messages": _TALK, **_SAMPLING, **_CONTROLS},
        {**_SHORT, "messages": _TALK, "logprobs": True, "top_logprobs": 2, "response_format": {"type": "json_object"}},
        {**_SHORT, "messages": _TALK, "tools": [{"type": "function", "function": _TOOL}], "tool_choice": "required"},
        {**_SHORT, "messages": _TALK, "tools": [{"type": "function", "function": _TOOL}], **_STREAM},
        {
            **_SHORT,
            "messages": [{"role": "system", "content": [{"type": "text", "text": "x"}]}, *_TALK,
                         {"role": "assistant", "content": None, "tool_calls": [_CALL]},
                         {"role": "tool", "tool_call_id": "123456789", "content": "1"}],
            "tools": [{"type": "function", "function": {**_TOOL, "description": "d", "strict": True}}],
            "tool_choice": {"type": "function", "function": {"name": "f"}}, "parallel_tool_calls": False,
        },
        {**_SHORT, "messages": [*_TALK, {"role": "assistant", "content": "A"}], "continue_final_message": True,
         "add_generation_prompt": False, "chat_template_kwargs": {"mood": "calm"}},
        {**_SHORT, "messages": _TALK, "response_format": _FORMAT, **_STREAM},
    ],
    "/tokenize": [
        {"model": "tiny", "prompt": "The quick", "add_special_tokens": True, "return_token_strs": True},
        {"messages": _TALK, "add_generation_prompt": False},
    ],
    "/detokenize": [{"model": "tiny", "tokens": [1, 2, 3, 299]}],
    "/v1/embeddings": [
        {"model": "tiny", "input": _TEXTS, "encoding_format": "float", "dimensions": 4, "user": "me"},
        {"input": [[1, 2, 3], [4]], "encoding_format": "base64", "truncate_prompt_tokens": 5},
        {"input": "a dog", "add_special_tokens": False, "truncate_prompt_tokens": -1},
    ],
    "/classify": [{"model": "judge", "input": _TEXTS, "truncate_prompt_tokens": 5}, {"input": [[5, 6], [7]]}],
    "/v1/score": [{"text_1": "we", "text_2": _TEXTS, "truncate_prompt_tokens": 9},
                  {"text_1": _TEXTS, "text_2": _TEXTS}],
    "/v1/rerank": [
        {"query": "we", "documents": _TEXTS, "top_n": 1, "return_documents": False, "truncate_prompt_tokens": -1},
        {"query": "we", "documents": [{"text": "a"}, "b"]},
    ],
}  # fmt: skip
"""Valid bodies by route."""

_VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2, 3.5, -0.0, 1e-9, 1e308, float("nan"), float("inf"), 2**31, 2**63, -(2**63), 10**400,
    "", " ", "a", "\0", "\x7f", "\ud83d", "\ufffe", "🙂", "ä" * 300, "a" * 5000, "<|end|>", "[TOOL_CALLS]", "{{ 7 }}",
    "\\", '"', "(", "[", "*", "1" * 50, "null", "{}", '{"type":"string"}', "$ref", "#", "text", "user", "tool",
    [], [[]], {}, [None], [0], [[0]], ["a"], [-1], [10**6], [1.5], {"": ""}, {"type": "object"}, {"$ref": "#"},
    {"type": "string", "minLength": 10**9}, {"pattern": "(a*)*$"}, {"not": {}}, {"type": ["null", "array"]},
]  # fmt: skip
_NAMES = ["prompt", "messages", "stop", "n", "tools", "type", "enum", "const", "items", "properties", "required", "x",
          "minimum", "maxLength", "uniqueItems", "x-guidance", "__class__", "", "ä", "\ud800"]  # fmt: skip
_BYTES = [
    b"\0",
    b"\xff",
    b"{",
    b"}",
    b"[",
    b"]",
    b'"',
    b",",
    b":",
    b"\\",
    b"\\ud83d",
    b"1e999",
    b"NaN",
    b"\n",
    b"9" * 99,
]


def mutate(rng: random.Random, bodies: list[Any]) -> bytes:
    """One of ``bodies``, changed in one to four places, as JSON or nearly."""
    body = copy.deepcopy(rng.choice(bodies))
    for _ in range(rng.choice((1, 1, 1, 1, 2, 4))):
        body = _change(rng, body, bodies)
    data = json.dumps(body, ensure_ascii=rng.random() < 0.5).encode(errors="surrogatepass")
    for _ in range(rng.choice((0, 0, 0, 0, 0, 0, 1, 3))):
        at = rng.randrange(len(data) + 1)
        match rng.randrange(4):
            case 0:
                data = data[:at] + rng.choice(_BYTES) + data[at:]
            case 1:
                data = data[:at] + data[at + rng.randrange(1, 9) :]
            case 2:
                data = data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]
            case 3:
                data = data[:at] * rng.choice((0, 2)) + data[at:]
    return data


def _change(rng: random.Random, body: Any, bodies: list[Any]) -> Any:
    places = list(_places(body))
    if not places or rng.random() < 0.02:
        return copy.deepcopy(rng.choice(_VALUES))
    parent, key = rng.choice(places)
    match rng.randrange(8):
        case 0 | 1 | 2:
            parent[key] = copy.deepcopy(rng.choice(_VALUES))
        case 3:
            parent[key] = copy.deepcopy(_pick(rng, rng.choice(bodies)))
        case 4:
            del parent[key]
        case 5 if isinstance(parent, dict):
            parent[rng.choice(_NAMES)] = copy.deepcopy(rng.choice((parent[key], rng.choice(_VALUES))))
        case 6:
            value: Any = parent[key]
            for _ in range(rng.choice((1, 3, 150))):
                value = [value] if rng.random() < 0.5 else {rng.choice(_NAMES): value}
            parent[key] = value
        case _ if isinstance(parent[key], str):
            text, at = parent[key], rng.randrange(len(parent[key]) + 1)
            parent[key] = text[:at] + rng.choice([x for x in _VALUES if isinstance(x, str)]) + text[at:]
        case _ if isinstance(parent[key], int | float):
            parent[key] = -parent[key] if rng.random() < 0.5 else parent[key] * 10 ** rng.randrange(12)
        case _:
            parent[key] = [copy.deepcopy(parent[key]) for _ in range(rng.choice((2, 20, 700)))]
    return body


def _places(value: Any) -> Any:
    """(parent, key) of every value inside ``value``."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in items:
        yield value, key
        yield from _places(each)


def _pick(rng: random.Random, body: Any) -> Any:
    parent, key = rng.choice(list(_places(body)))
    return parent[key]


def send_mutated(running: Running, path: str, count: int) -> dict[int, int]:
    """Send ``count`` mutated bodies to ``path``; returns how often each status came.

    Fails for a status of 500 or more, an answer that is no JSON, and a broken connection.
    """
    shares = [range(first, count, CLIENTS) for first in range(CLIENTS)]
    with ThreadPoolExecutor(CLIENTS) as pool:
        statuses = [
            status for share in pool.map(lambda seeds: _send_all(running, path, seeds), shares) for status in share
        ]
    return {status: statuses.count(status) for status in sorted(set(statuses))}


def _send_all(running: Running, path: str, seeds: range) -> list[int]:
    address = urlsplit(running.url)
    connection, found = http.client.HTTPConnection(address.hostname or "", address.port, timeout=120), list[int]()
    for seed in seeds:
        body = mutate(random.Random(f"{path} {seed}"), BODIES[path])
        try:
            connection.request("POST", path, body, {"content-type": "application/json"})
            reply = connection.getresponse()
            content, kind = reply.read(), reply.headers["content-type"]
        except (OSError, http.client.HTTPException) as error:
            raise AssertionError(f"{path}, seed {seed}: {error!r} for {body[:3000]!r}") from error
        what = f"{path}, seed {seed}: {reply.status} {content[:500]!r} for {body[:3000]!r}"
        assert reply.status < 500 or b'"timeout"' in content, what
        if kind.startswith("text/event-stream"):
            assert b'"server_error"' not in content and b'"engine_failed"' not in content, what
        else:
            values = json.loads(content)
            assert reply.status == 200 or isinstance(values["error"]["message"], str), what
        found.append(reply.status)
    connection.close()
    return found
