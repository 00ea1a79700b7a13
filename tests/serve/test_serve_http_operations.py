"""Request ids, the JSON log, CORS, tokenising, and metrics under vLLM's prefix: one server for all of them."""

import json
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import TypeAdapter

from colonnade.serve.api.tokenize import TokenizerInfo
from tests.serve import tiny
from tests.serve.serving import Running, server

ORIGIN = "https://chat.example.com"


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with server(log="json", origins=[ORIGIN], metrics_prefix="vllm", pages=32) as it:
        yield it


def post(at: Running, path: str, body: dict[str, Any], **headers: str) -> httpx.Response:
    headers = {"content-type": "application/json", **headers}
    return httpx.post(f"{at.url}{path}", content=json.dumps(body), headers=headers, timeout=120)


def body(**more: object) -> dict[str, Any]:
    return {"prompt": "a secret", "max_tokens": 4, "temperature": 0, "ignore_eos": True, **more}


@pytest.mark.sample(1)
@pytest.mark.parametrize("given", ["a", "Trace_1.2-3", "x" * 128])
def test_a_good_request_id_is_returned(running: Running, given: str):
    assert post(running, "/v1/completions", body(), **{"x-request-id": given}).headers["x-request-id"] == given


@pytest.mark.parametrize("given", [None, "", "a b", "x" * 129, "ä", "a;b", '"'])
def test_a_bad_request_id_is_replaced(running: Running, given: str | None):
    headers = {} if given is None else {"x-request-id": given.encode()}
    for path in ("/v1/models", "/nowhere", "/health"):
        reply = httpx.get(f"{running.url}{path}", headers=headers)
        assert re.fullmatch(r"[0-9a-f]{32}", reply.headers["x-request-id"])


def test_pages_of_the_origin_may_use_the_server(running: Running):
    url, asked = f"{running.url}/v1/completions", {"access-control-request-method": "POST"}
    asked["access-control-request-headers"] = "authorization,content-type"
    allowed = httpx.options(url, headers={"origin": ORIGIN, **asked})
    assert allowed.status_code == 200 and allowed.headers["access-control-allow-origin"] == ORIGIN
    refused = httpx.options(url, headers={"origin": "https://evil.example", **asked})
    assert refused.status_code == 400 and "access-control-allow-origin" not in refused.headers
    reply = post(running, "/v1/completions", body(), origin=ORIGIN)
    assert reply.headers["access-control-allow-origin"] == ORIGIN
    assert "x-request-id" in reply.headers["access-control-expose-headers"]
    assert "access-control-allow-origin" not in post(running, "/v1/completions", body(), origin="null").headers


# -- tokenising --------------------------------------------------------------------------------------------------------


def test_tokenize_and_detokenize_are_inverse(running: Running):
    text, tokenizer = "Äpfel 🙂 the quick brown fox <|end|>", tiny.tokenizer()
    reply = post(running, "/tokenize", {"prompt": text, "return_token_strs": True}).json()
    assert reply == {
        "count": len(reply["tokens"]), "max_model_len": 128, "tokens": tokenizer.encode(text),
        "token_strs": [tokenizer.token(i) for i in tokenizer.encode(text)],
    }  # fmt: skip
    assert post(running, "/detokenize", {"tokens": reply["tokens"]}).json() == {"prompt": text}
    assert post(running, "/tokenize", {"prompt": "x"}).json()["token_strs"] is None
    assert post(running, "/tokenize", {"prompt": "", "model": "tiny"}).json()["tokens"] == []
    assert post(running, "/detokenize", {"tokens": []}).json() == {"prompt": ""}


def test_tokenizer_info(running: Running):
    """lm-eval's remote tokenizer reads it."""
    info = httpx.get(f"{running.url}/tokenizer_info").json()
    assert info == tiny.tokenizer().info and info["chat_template"] == tiny.TEMPLATE
    assert post(running, "/tokenize", {"prompt": info["eos_token"], "add_special_tokens": False}).json()["tokens"] == [
        0
    ]
    assert httpx.get(f"{running.url}/tokenizer_info?model=other").status_code == 404
    TypeAdapter(TokenizerInfo).validate_python(info)


def test_messages_are_tokenised_with_the_template(running: Running):
    messages = [{"role": "user", "content": "Hello <|end|>"}]
    with_prompt = post(running, "/tokenize", {"messages": messages}).json()["tokens"]
    assert with_prompt == tiny.tokenizer().encode_chat(messages)
    without = post(running, "/tokenize", {"messages": messages, "add_generation_prompt": False}).json()["tokens"]
    text = post(running, "/detokenize", {"tokens": without}).json()["prompt"]
    assert text == "<|user|>Hello <|end|>\n" and with_prompt[: len(without)] == without != with_prompt
    asked = {"model": "tiny", "messages": messages, "max_tokens": 1}
    assert post(running, "/v1/chat/completions", asked).json()["usage"]["prompt_tokens"] == len(with_prompt)


@pytest.mark.parametrize(
    ("path", "sent", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": [{"role": "developer", "content": "x"}]}, "messages"),
        ("/tokenize", {"prompt": ["x"]}, "prompt"),
        ("/tokenize", {"prompt": "\ud83d"}, "prompt"),
        ("/tokenize", {"prompt": "x" * ((1 << 20) + 1)}, "prompt"),
        ("/tokenize", {"prompt": "x", "add_generation_prompt": True}, "add_generation_prompt"),
        ("/tokenize", {"messages": [{"role": "user", "content": "x"}], "add_special_tokens": True},
            "add_special_tokens"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
        ("/detokenize", {"tokens": [1.5]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [2**70]}, "tokens"),
        ("/detokenize", {"tokens": [100_000]}, "tokens"),
        ("/detokenize", {"tokens": [1] * 300_000}, "tokens"),
    ],
)  # fmt: skip
def test_bad_bodies_are_refused(running: Running, path: str, sent: dict[str, Any], param: str):
    reply = post(running, path, sent)
    assert reply.status_code == 400 and reply.json()["error"]["param"] == param, reply.text
    assert post(running, path, {**sent, "model": "other"}).status_code in (400, 404)


@pytest.mark.slow
def test_other_requests_go_on_beside_a_large_text(running: Running):
    with ThreadPoolExecutor(2) as pool:
        large = [pool.submit(post, running, "/tokenize", {"prompt": "the fox " * 120_000}) for _ in range(2)]
        assert all(post(running, "/v1/completions", body()).status_code == 200 for _ in range(3))
        assert all(reply.result().json()["count"] > 120_000 for reply in large)


def test_version(running: Running):
    from importlib.metadata import version

    assert httpx.get(f"{running.url}/version").json() == {"version": version("colonnade")}


# -- metrics and the log -----------------------------------------------------------------------------------------------


def test_metrics_have_the_prefix_and_count_answers(running: Running):
    post(running, "/v1/completions", body())
    text = httpx.get(f"{running.url}/metrics").text
    assert "colonnade:" not in text
    before = float(re.search(r'vllm:request_prompt_tokens_count\{model_name="tiny"\} (\S+)', text)[1])
    post(running, "/v1/completions", body(prompt=["a", "b"]))
    post(running, "/nowhere", {})
    post(running, "/admin/drain", {})
    text = httpx.get(f"{running.url}/metrics").text
    after = float(re.search(r'vllm:request_prompt_tokens_count\{model_name="tiny"\} (\S+)', text)[1])
    assert after == before + 2
    assert re.search(r'vllm:request_generation_tokens_bucket\{le="5.0",model_name="tiny"\} [1-9]', text)
    assert re.search(r'vllm:http_requests_total\{route="/v1/completions",status="200"\} [1-9]', text)
    assert re.search(r'vllm:http_requests_total\{route="",status="404"\} [1-9]', text)
    assert re.search(r'vllm:http_requests_total\{route="/admin/drain",status="403"\} [1-9]', text)
    assert "/nowhere" not in text, "clients could add labels without end"
    for name in ("process_resident_memory_bytes ", 'vllm:engine_resident_memory_bytes{model_name="tiny"} '):
        assert float(text[text.index(f"\n{name}") + 1 + len(name) :].split()[0]) > 1 << 20


def test_every_metric_of_the_dashboard_exists(running: Running):
    file = Path(__file__).parents[2] / "examples" / "grafana" / "colonnade.json"
    dashboard = json.loads(file.read_text())
    post(running, "/v1/completions", body())
    scraped = {line.split("{")[0].split()[0] for line in httpx.get(f"{running.url}/metrics").text.splitlines()}
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    queries += [variable["definition"] for variable in dashboard["templating"]["list"] if "definition" in variable]
    names = {name for query in queries for name in re.findall(r"\b(?:\w+:\w+|process_\w+)", query)}
    assert len(names) > 15
    assert {name.replace("colonnade:", "vllm:") for name in names} <= scraped


def test_every_metric_of_vllms_dashboard_exists(running: Running):
    """Those that vLLM's own dashboard queries (examples/observability/prometheus_grafana)."""
    post(running, "/v1/completions", body(n=2))
    text = httpx.get(f"{running.url}/metrics").text
    seconds = ("e2e_request_latency", "inter_token_latency", "time_to_first_token")
    names = [f"{name}_seconds_{part}" for name in seconds for part in ("bucket", "sum", "count")]
    names += [f"request_{name}_time_seconds_sum" for name in ("queue", "prefill", "decode")]
    names += ["prompt_tokens_total", "generation_tokens_total", "num_requests_running", "num_requests_waiting"]
    names += ["kv_cache_usage_perc", "request_prompt_tokens_bucket", "request_generation_tokens_bucket"]
    names += ["request_success_total", "request_max_num_generation_tokens_sum"]
    assert not [name for name in names if not re.search(rf'^vllm:{name}{{.*model_name="tiny"', text, re.MULTILINE)]
    assert re.search(r'^vllm:request_success_total{finished_reason="\w+"', text, re.MULTILINE)


def test_each_request_is_one_json_line_without_text(running: Running):
    """The last test of the server: it ends."""
    post(running, "/v1/completions", body(), **{"x-request-id": "mine"})
    post(running, "/v1/completions", body(stream=True), **{"x-request-id": "streamed"})
    post(running, "/v1/completions", body(secret=1), **{"x-request-id": "refused"})
    httpx.get(f"{running.url}/secret?secret=1", headers={"x-request-id": "lost"})
    httpx.get(f"{running.url}/health", headers={"x-request-id": "probe"})
    code, out, err = running.stop(signal.SIGTERM)
    assert (code, out) == (0, "stopping\n") and "secret" not in err
    lines = {line["id"]: line for line in map(json.loads, err.splitlines())}
    assert "probe" not in lines
    for name in ("mine", "streamed"):
        mine = lines[name]
        assert (mine["client"], mine["key"], mine["method"]) == ("127.0.0.1", None, "POST")
        assert (mine["route"], mine["model"], mine["status"]) == ("/v1/completions", "tiny", 200)
        assert mine["prompt_tokens"] == len(tiny.tokenizer().encode("a secret")) and mine["generated_tokens"] == 4
        assert mine["finish_reason"] == "length" and re.fullmatch(r"\d{4}-\d\d-\d\dT[\d:]{8}\.\d{3}Z", mine["time"])
        assert 0 <= mine["queue_s"] + mine["prefill_s"] + mine["decode_s"] <= mine["total_s"] + 1e-3
    refused = lines["refused"]
    assert (refused["status"], refused["generated_tokens"], refused["finish_reason"]) == (400, 0, None)
    assert refused["queue_s"] is None and (lines["lost"]["status"], lines["lost"]["route"]) == (404, "")
