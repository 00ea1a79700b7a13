"""A server in front of others: it forwards what they can answer, and goes on without those that fail."""

import json
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import openai
import pytest

from colonnade.config import ServeConfig
from colonnade.errors import ConfigError
from colonnade.serve.api.forward import prompt_of
from colonnade.serve.server import serve
from tests.serve.serving import Running, server

CHUNK = b'data: {"id": "x", "object": "text_completion", "created": 1, "model": "tiny", "choices": []}\n\n'


class Upstream(ThreadingHTTPServer):
    """A server that answers as ``behaviour`` says: "answer", "stream", "reset", "cut", "busy" or "hang"."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, port: int = 0):
        super().__init__(("127.0.0.1", port), Handler)
        self.behaviour, self.seen, self.free = "answer", list[tuple[str, dict[str, str], bytes]](), threading.Event()
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def close(self) -> None:
        self.free.set()
        self.shutdown()
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    server: Upstream

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        self._send(200, b'{"status": "ready"}')

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.seen.append((self.path, dict(self.headers), body))
        how = self.server.behaviour
        if how == "hang":
            self.server.free.wait()
        if how in ("reset", "hang"):
            return
        if how in ("stream", "cut"):
            self.send_response(200)
            self.send_header("content-type", "text/event-stream")
            self.send_header("content-length", "100000" if how == "cut" else str(2 * len(CHUNK)))
            self.end_headers()
            self.wfile.write(CHUNK + (CHUNK[:40] if how == "cut" else CHUNK))
        elif how == "busy":
            self._send(503, b'{"error": {"code": "shutting_down"}}')
        else:
            self._send(200, json.dumps({"port": self.server.server_port}).encode())

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def upstreams(count: int) -> Iterator[list[Upstream]]:
    found = [Upstream() for _ in range(count)]
    try:
        yield found
    finally:
        for each in found:
            each.close()


@pytest.fixture(scope="module")
def gateway() -> Iterator[tuple[Running, list[Upstream]]]:
    with (
        upstreams(2) as found,
        server(upstreams=[each.url for each in found], upstream_key="theirs", api_key="ours", admin_key="boss") as it,
    ):
        assert it.greeting.endswith("; 2 upstreams\n")
        yield it, found


def ask(running: Running, path: str = "/v1/completions", **body: object) -> httpx.Response:
    headers = {"authorization": "Bearer ours", "x-request-id": "mine"}
    return httpx.post(running.url + path, json={"prompt": "a", **body}, headers=headers, timeout=120)


def behave(found: list[Upstream], *how: str) -> None:
    for each, behaviour in zip(found, how, strict=True):
        each.behaviour, each.seen = behaviour, []


def test_requests_pass_unchanged(gateway: tuple[Running, list[Upstream]]):
    running, found = gateway
    behave(found, "answer", "answer")
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/v1/rerank", "/tokenize"):
        reply = ask(running, path, strange=[1, None])
        assert reply.status_code == 200 and reply.headers["x-request-id"] == "mine"
    seen = [each for upstream in found for each in upstream.seen]
    assert {json.dumps(json.loads(body)) for _, _, body in seen} == {'{"prompt": "a", "strange": [1, null]}'}
    headers = [{name.lower(): value for name, value in each.items()} for _, each, _ in seen]
    assert {each["authorization"] for each in headers} == {"Bearer theirs"}, "not the client's"
    assert {(each["x-request-id"], each["x-forwarded-for"]) for each in headers} == {("mine", "127.0.0.1")}
    assert len(found[0].seen) in (2, 3), "without a known prefix they take turns"


def test_own_addresses_and_refusals(gateway: tuple[Running, list[Upstream]]):
    running, found = gateway
    behave(found, "answer", "answer")
    assert httpx.get(f"{running.url}/ready").json() == {"status": "ready", "replicas": {"up": 2, "all": 2}}
    assert httpx.post(f"{running.url}/v1/completions", json={}).status_code == 401
    headers = {"authorization": "Bearer ours"}
    metrics = httpx.get(f"{running.url}/metrics", headers=headers).text
    assert f'colonnade:replica_up{{model_name="tiny",replica="{found[0].url}"}} 1.0' in metrics
    assert 'http_requests_total{route="/v1/completions",status="200"}' in metrics
    assert httpx.get(f"{running.url}/v1/completions", headers=headers).status_code == 405
    assert httpx.post(f"{running.url}/unknown", headers=headers).status_code == 404
    assert httpx.get(f"{running.url}/v1/models/tiny", headers=headers).json() == {"status": "ready"}
    boss = {"authorization": "Bearer boss"}
    assert httpx.post(f"{running.url}/admin/cache/reset", headers=boss).status_code == 404
    assert not any(upstream.seen for upstream in found)


@pytest.mark.parametrize("how", ["reset", "busy"])
def test_another_upstream_answers(gateway: tuple[Running, list[Upstream]], how: str):
    running, found = gateway
    behave(found, how, "answer")
    for _ in range(4):
        assert ask(running).json() == {"port": found[1].server_port}
    assert found[0].seen, "it was asked too"


def test_refusals_of_all_reach_the_client(gateway: tuple[Running, list[Upstream]]):
    running, found = gateway
    behave(found, "busy", "busy")
    assert (ask(running).status_code, ask(running).json()["error"]["code"]) == (503, "shutting_down")
    behave(found, "reset", "reset")
    lost = ask(running)
    assert lost.status_code == 503 and lost.json()["error"]["code"] == "engine_failed" and lost.headers["retry-after"]


def test_streams(gateway: tuple[Running, list[Upstream]]):
    """A broken one ends with an error event after its last whole line."""
    running, found = gateway
    behave(found, "stream", "stream")
    whole = ask(running, stream=True)
    assert whole.headers["content-type"] == "text/event-stream" and whole.content == CHUNK * 2
    behave(found, "cut", "cut")
    client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="ours", max_retries=0)
    chunks = client.completions.create(model="tiny", prompt="a", stream=True)
    next(chunks)
    with pytest.raises(openai.APIError, match="the server that generated this response failed"):
        list(chunks)


def test_prompts_with_a_known_prefix_return_to_their_upstream(gateway: tuple[Running, list[Upstream]]):
    running, found = gateway
    behave(found, "answer", "answer")
    texts = [f"{i}" * 600 for i in range(4)]
    first = [ask(running, prompt=text).json() for text in texts]
    assert [ask(running, prompt=text + "more").json() for text in reversed(texts)] == first[::-1]
    assert prompt_of(b"nonsense") == prompt_of(b"[]") == prompt_of(b'{"prompt": "') == b""
    assert prompt_of(b'{"messages": [1], "prompt": "a"}') == b"[1]"


def test_a_lost_upstream_is_taken_out_and_comes_back(gateway: tuple[Running, list[Upstream]]):
    """Last: what it had under way goes on elsewhere."""
    running, found = gateway
    behave(found, "hang", "answer")
    with ThreadPoolExecutor(2) as pool:
        replies = [pool.submit(ask, running) for _ in range(2)]
        while not found[0].seen:
            time.sleep(0.01)
        port = found[0].server_port
        found[0].close()
        assert [reply.result().status_code for reply in replies] == [200, 200]
    while httpx.get(f"{running.url}/ready").json()["replicas"]["up"] != 1:
        time.sleep(0.05)
    assert httpx.get(f"{running.url}/ready").status_code == 200 and ask(running).status_code == 200
    found[0] = Upstream(port)
    while httpx.get(f"{running.url}/ready").json()["replicas"]["up"] != 2:
        time.sleep(0.05)
    behave(found, "hang", "hang")
    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(ask, running)
        while not any(upstream.seen for upstream in found):
            time.sleep(0.01)
        running.process.send_signal(signal.SIGTERM)
        time.sleep(0.1)
        for upstream in found:
            upstream.free.set()
        assert late.result().status_code == 503
    code, out, err = running.stop(0)
    assert (code, err) == (0, "") and f"upstream {found[0].url} is down, 1 upstream left: GET /ready failed" in out
    assert f"upstream {found[0].url} is up\n" in out


def test_configurations_that_are_refused(tmp_path: Path):
    keys = tmp_path / "keys.toml"
    keys.write_text(f'[[keys]]\nname = "a"\nsha256 = "{"0" * 64}"\ntokens_per_minute = 5\n')
    with upstreams(1) as (taken,):
        port = taken.server_port
    for config, message in [
        ({"upstreams": ("http://localhost:1",), "replicas": 2}, "set one of the two"),
        ({"upstreams": ("http://localhost:1",), "keys": str(keys)}, "limits tokens_per_minute"),
        ({"upstreams": ("http://localhost:1", f"http://localhost:{port}"), "port": port}, "is this server itself"),
    ]:
        with pytest.raises(ConfigError, match=message):
            serve({"tiny": None}, config=ServeConfig(**{"port": 0, **config}), device="cpu", announce=lambda _: None)
    assert ServeConfig(upstreams=("http://a,http://b:1/", "https://c")).upstreams == (
        "http://a",
        "http://b:1/",
        "https://c",
    )
    with pytest.raises(ConfigError, match=r"serve.upstreams has 'a'; it must be http://HOST"):
        ServeConfig(upstreams=("a",))
