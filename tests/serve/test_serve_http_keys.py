"""A server with API keys: who is let in, how often, and what the operator may do."""

import hashlib
import json
import signal
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from colonnade.config import ServeConfig
from colonnade.errors import ConfigError
from colonnade.serve.server import serve
from tests.serve.serving import Running, server

KEYS = {
    "free": {},
    "other-model": {"models": ["another"]},
    "few": {"requests_per_minute": 3},
    "tokens": {"tokens_per_minute": 30, "requests_per_minute": 1000},
    "single": {"concurrent_requests": 1},
    "batch": {"priority": 5},
    "ü": {},
}


def write_keys(file: Path, keys: dict[str, dict[str, Any]]) -> None:
    """The key of each name is the name itself."""
    lines = [
        json.dumps({"name": name, "sha256": hashlib.sha256(name.encode()).hexdigest(), **limits})
        for name, limits in keys.items()
    ]
    file.write_text("\n".join(lines), encoding="utf-8")


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("keys") / "keys.jsonl"
    write_keys(file, KEYS)
    return file


@pytest.fixture(scope="module")
def guarded(key_file: Path):
    with server(
        {"slow_s": 0.01}, keys=str(key_file), api_key="plain", admin_key="root", page_tokens=4, max_body_bytes=20_000
    ) as it:
        yield it


def request(at: Running, method: str, path: str, key: str | None = None, **more: Any) -> httpx.Response:
    headers = {} if key is None else {"authorization": f"Bearer {key}".encode()}
    return httpx.request(method, f"{at.url}{path}", headers=headers, timeout=120, **more)


def ask(at: Running, key: str | None, **more: Any) -> httpx.Response:
    body = {"prompt": "The quick", "max_tokens": 2, "temperature": 0, "ignore_eos": True, **more}
    return request(at, "POST", "/v1/completions", key, json=body)


def test_every_path_but_probes_needs_a_key(guarded: Running):
    for path in ("/v1/models", "/metrics", "/openapi.json", "/nowhere", "/health/"):
        refused = request(guarded, "GET", path)
        assert refused.status_code == 401, path
        assert refused.headers["www-authenticate"] == "Bearer"
        assert refused.json()["error"]["type"] == "authentication_error"
        assert refused.json()["error"]["code"] == "invalid_api_key"
    assert request(guarded, "GET", "/health").status_code == request(guarded, "GET", "/ready").status_code == 200
    for wrong in ("fre", "free2", "x" * 10_000, "\x80"):
        assert ask(guarded, wrong).status_code == 401
    basic = httpx.get(f"{guarded.url}/v1/models", headers={"authorization": "Basic free"})
    assert basic.status_code == 401
    for right in ("free", "plain", "ü"):
        assert ask(guarded, right).status_code == 200
    with pytest.raises(openai.AuthenticationError):
        guarded.client.models.list()
    large = request(guarded, "POST", "/v1/completions", content=b"x" * 19_000)
    assert large.status_code == 401


def test_another_model_is_forbidden(guarded: Running):
    refused = ask(guarded, "other-model")
    assert refused.status_code == 403
    error = refused.json()["error"]
    assert (error["type"], error["param"], error["code"]) == ("permission_error", "model", "model_not_allowed")


def test_requests_a_minute(guarded: Running):
    replies = [ask(guarded, "few") for _ in range(4)]
    assert [reply.status_code for reply in replies] == [200, 200, 200, 429]
    left = [reply.headers["x-ratelimit-remaining-requests"] for reply in replies]
    assert left == ["2", "1", "0", "0"] and "x-ratelimit-limit-tokens" not in replies[0].headers
    assert {reply.headers["x-ratelimit-limit-requests"] for reply in replies} == {"3"}
    assert all(0 < float(reply.headers["x-ratelimit-reset-requests"].removesuffix("s")) <= 60 for reply in replies)
    assert 1 <= int(replies[-1].headers["retry-after"]) <= 20
    error = replies[-1].json()["error"]
    assert error["code"] == "rate_limit_exceeded" and "3 requests per minute" in error["message"]


def test_tokens_a_minute(guarded: Running):
    first = ask(guarded, "tokens", max_tokens=30)
    assert first.status_code == 200 and first.headers["x-ratelimit-limit-tokens"] == "30"
    used = first.json()["usage"]["total_tokens"]
    refused = ask(guarded, "tokens")
    assert refused.status_code == 429 and refused.headers["x-ratelimit-remaining-tokens"] == "0"
    assert 0 < int(refused.headers["retry-after"]) <= (used - 30 + 1) * 2 + 1
    assert int(refused.headers["x-ratelimit-remaining-requests"]) >= 998, "a refused request was counted"


def test_concurrent_requests(guarded: Running):
    body = {"prompt": "The quick", "max_tokens": 100, "ignore_eos": True, "stream": True}
    headers = {"authorization": "Bearer single"}
    with httpx.stream("POST", f"{guarded.url}/v1/completions", json=body, headers=headers, timeout=120) as stream:
        assert stream.status_code == 200
        refused = ask(guarded, "single")
        assert "[DONE]" in stream.read().decode()
    assert refused.status_code == 429 and refused.headers["retry-after"] == "1"
    assert refused.json()["error"]["message"].startswith("1 requests of this API key are already running")
    assert ask(guarded, "single").status_code == 200


def test_a_key_sets_the_best_priority(guarded: Running):
    assert ask(guarded, "batch").status_code == ask(guarded, "batch", priority=6).status_code == 200
    refused = ask(guarded, "batch", priority=4)
    assert refused.status_code == 403 and refused.json()["error"]["param"] == "priority"
    assert ask(guarded, "plain", priority=-100).status_code == 200


def test_the_prefix_cache_is_reset(guarded: Running):
    def hits() -> float:
        text = request(guarded, "GET", "/metrics", "free").text
        return float(
            next(x for x in text.splitlines() if x.startswith("colonnade:prefix_cache_hits_total{")).split()[1]
        )

    prompt = "My fellow citizens: we the people"
    ask(guarded, "free", prompt=prompt)
    before = hits()
    ask(guarded, "free", prompt=prompt)
    cached = hits()
    assert cached > before
    for key in (None, "free", "plain"):
        refused = request(guarded, "POST", "/admin/cache/reset", key)
        assert refused.status_code == 403 and refused.json()["error"]["code"] == "admin_key_required"
    reset = request(guarded, "POST", "/admin/cache/reset", "root")
    assert (reset.status_code, reset.json()) == (200, {"status": "reset"})
    ask(guarded, "free", prompt=prompt)
    assert hits() == cached
    assert request(guarded, "GET", "/v1/models", "root").status_code == 401


@pytest.mark.slow
def test_keys_are_read_again_and_the_server_drains(guarded: Running, key_file: Path):
    """A broken file keeps the old keys; a drain by the operator ends the server like SIGTERM. The last test of it."""

    def reload_until(line: str) -> None:
        guarded.process.send_signal(signal.SIGHUP)
        assert guarded.process.stdout is not None
        assert line in guarded.process.stdout.readline()

    key_file.write_text("{broken")
    reload_until("is malformed: ")
    assert ask(guarded, "free").status_code == 200
    write_keys(key_file, {"new": {}})
    reload_until("read 1 key from ")
    assert ask(guarded, "free").status_code == 401 and ask(guarded, "new").status_code == 200
    body = {"prompt": "The quick", "max_tokens": 100, "ignore_eos": True, "stream": True}
    headers = {"authorization": "Bearer new"}
    with httpx.stream("POST", f"{guarded.url}/v1/completions", json=body, headers=headers, timeout=120) as stream:
        drain = request(guarded, "POST", "/admin/drain", "root")
        assert (drain.status_code, drain.json()) == (202, {"status": "draining", "running": 1})
        assert "[DONE]" in stream.read().decode()
    assert guarded.stop(0) == (0, "stopping: 1 request has 25 s to finish; press Ctrl-C again to exit now\n", "")


def test_a_missing_key_file_is_refused_before_loading(tmp_path: Path):
    model = {"tiny": lambda: pytest.fail("a model was loaded")}
    with pytest.raises(ConfigError, match=r"cannot read the key file .*none\.toml: no such file"):
        serve(model, config=ServeConfig(port=0, keys=str(tmp_path / "none.toml")))
