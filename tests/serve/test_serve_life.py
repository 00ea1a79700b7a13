"""Server start, drain, stop and crash: clear client errors, one line on the terminal, no leftover processes."""

import itertools
import os
import re
import signal
import socket
import time
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from pathlib import Path

import httpx
import openai
import pytest
import torch

from colonnade.config import ServeConfig
from colonnade.serve import Engine, SamplingParams
from tests.serve import tiny
from tests.serve.serving import Running, server, start


def gone(pids: list[int]) -> bool:
    """Wait for all ``pids`` to exit; False after 20 s."""
    limit_s = time.monotonic() + 20
    while alive := [pid for pid in pids if Path(f"/proc/{pid}/stat").exists() and _state(pid) != "Z"]:
        if time.monotonic() > limit_s:
            return False
        assert alive
        time.sleep(0.05)
    return True


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return "Z"


def long_stream(running: Running, tokens: int = 100) -> openai.Stream:
    """A stream whose first chunk has arrived."""
    asked = {"model": "tiny", "prompt": "The quick", "max_tokens": tokens, "temperature": 0}
    stream = running.client.completions.create(**asked, extra_body={"ignore_eos": True}, stream=True)
    next(stream)
    return stream


def until_requests(at: Running, **counts: int) -> None:
    """Wait until these numbers of requests are running or waiting."""
    lines = [f'num_requests_{state}{{model_name="tiny"}} {count}.0' for state, count in counts.items()]
    with httpx.Client() as http:
        while not all(line in http.get(f"{at.url}/metrics").text for line in lines):
            time.sleep(0.02)


@pytest.mark.slow
def test_slow_model_full_queue_and_graceful_stop():
    """A server slowed down to 0.15 s per step, with one running and one waiting request at most."""
    with server({"chat": False, "poison": 300, "slow_s": 0.15}, max_requests=1, max_waiting=1, drain_s=20) as running:
        assert list(running.folder.iterdir()), "the engine's socket must be in the temporary folder"
        client, pids = running.client, running.engine_pids()
        with pytest.raises(
            openai.BadRequestError, match="no chat template; send a prompt to /v1/completions"
        ) as refusal:
            client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x"}])
        assert refusal.value.param == "messages"
        with pytest.raises(openai.InternalServerError, match="logits were not finite") as failure:
            client.completions.create(model="tiny", prompt=[300], max_tokens=3)
        assert failure.value.status_code == 500

        stream = long_stream(running, 40)
        with ThreadPoolExecutor(4) as pool, httpx.Client() as http:
            others = [pool.submit(_ask, running.url) for _ in range(4)]
            until_requests(running, waiting=1)
            full = http.get(f"{running.url}/ready")
            assert (full.status_code, full.json()) == (503, {"status": "queue full"})
            start_s = time.monotonic()
            for _ in range(5):
                assert http.get(f"{running.url}/health").status_code == 200
            assert time.monotonic() - start_s < 5 * 0.15, "the event loop was blocked by the model"
            list(itertools.islice(as_completed(others), 3))  # one waits; the others find the queue full
            stream.close()  # frees the slot for the waiting request
            replies = [other.result() for other in others]
        assert sorted(reply.status_code for reply in replies) == [200, 429, 429, 429]
        refused = next(reply for reply in replies if reply.status_code == 429)
        assert refused.headers["retry-after"] and refused.json()["error"]["code"] == "queue_full"

        stream = long_stream(running, 30)
        running.process.send_signal(signal.SIGTERM)
        with httpx.Client() as http:  # new connections during the drain get an error
            while http.get(f"{running.url}/ready").json() != {"status": "draining"}:
                time.sleep(0.01)
            assert http.head(f"{running.url}/ready").status_code == 503
            assert (
                http.get(f"{running.url}/health").status_code == http.head(f"{running.url}/health").status_code == 200
            )
        late = _ask(running.url)
        assert late.status_code == 503 and late.json()["error"]["code"] == "shutting_down"
        assert late.headers["retry-after"]
        chunks = list(stream)  # the drain lets the stream finish
        assert chunks[-1].choices[0].finish_reason == "length"
        assert running.stop(0) == (0, "stopping: 1 request has 20 s to finish; press Ctrl-C again to exit now\n", "")
        assert gone(pids) and not list(running.folder.iterdir())


def _ask(url: str, **more: object) -> httpx.Response:
    body = {"prompt": "The quick", "max_tokens": 2, "temperature": 0, "ignore_eos": True, **more}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=120)


def test_requests_cut_off_by_shutdown_get_an_error():
    with server({"slow_s": 0.1}, drain_s=0) as running, ThreadPoolExecutor(1) as pool:
        stream, pids = long_stream(running), running.engine_pids()
        whole: Future[httpx.Response] = pool.submit(_ask, running.url, max_tokens=100)
        until_requests(running, running=2)
        running.process.send_signal(signal.SIGINT)
        with pytest.raises(openai.APIError, match="the server is shutting down"):
            list(stream)
        assert whole.result().status_code == 503
        assert whole.result().json()["error"]["type"] == "service_unavailable_error"
        assert running.stop(0) == (0, "stopping: 2 requests have 0 s to finish; press Ctrl-C again to exit now\n", "")
        assert gone(pids)


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.long)])
def test_second_signal_stops_at_once(number: signal.Signals):
    """The drain limit is an hour and each step takes a minute."""
    with server({"slow_s": 60, "quick_steps": 3}, drain_s=3600) as running:
        stream, pids = long_stream(running), running.engine_pids()
        running.process.send_signal(number)
        assert running.process.stdout is not None
        assert (
            running.process.stdout.readline()
            == "stopping: 1 request has 3600 s to finish; press Ctrl-C again to exit now\n"
        )
        running.process.send_signal(number)
        with pytest.raises(openai.APIError, match="the server is shutting down"):
            list(stream)
        assert running.stop(0) == (128 + number, "", "")
        assert gone(pids) and not list(running.folder.iterdir())


@pytest.mark.sample(1)
@pytest.mark.parametrize("plan", [{}, {"tp": 2}, pytest.param({"cp": 2}, marks=pytest.mark.long)], ids=str)
def test_killed_engine_gives_a_clear_error(plan: dict[str, int]):
    """Killed mid-stream: the stream reports it, other clients get 503, the server exits with one line."""
    with server({"slow_s": 0.05}, plan) as running, ThreadPoolExecutor(1) as pool:
        expected = Engine(tiny.model(dtype=torch.float32), tiny.tokenizer(), ServeConfig()).generate(
            ["The quick"], SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
        )
        assert _ask(running.url).json()["choices"][0]["text"] == expected[0].text
        stream, pids = long_stream(running), running.engine_pids()
        whole = pool.submit(_ask, running.url, max_tokens=100)
        until_requests(running, running=2)
        os.kill(_ranks(pids)[-1], signal.SIGKILL)
        with pytest.raises(openai.APIError, match=r"the engine failed: .*killed by SIGKILL"):
            list(stream)
        assert whole.result().status_code == 503
        code, out, err = running.stop(0)
        assert code != 0 and out == ""
        who = "rank 1" if plan else "the engine process"
        assert re.fullmatch(rf"WorkerError: {who} was killed by SIGKILL .*\n", err), err
        assert gone(pids)


def _ranks(pids: list[int]) -> list[int]:
    """Processes with a model: the supervisor itself, or the children spawned by torch's launcher."""
    commands = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids}
    children = [pid for pid in pids[1:] if b"spawn_main" in commands[pid]]
    return children or pids[:1]


def test_killed_server_leaves_no_engine():
    with server({"slow_s": 0.05}) as running:
        pids = running.engine_pids()
        assert pids
        long_stream(running)
        running.process.kill()
        running.process.communicate()
        assert gone(pids)


def test_a_loading_server_is_alive_but_not_ready(tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    url, file = f"http://127.0.0.1:{port}", tmp_path / "go"
    with start({"wait_for": str(file)}, port=port) as starting, httpx.Client() as http:
        while True:
            try:
                health = http.get(f"{url}/health")
                break
            except httpx.ConnectError:
                assert starting.process.poll() is None
                time.sleep(0.02)
        assert (health.status_code, health.json()) == (200, {"status": "ok"})
        ready = http.get(f"{url}/ready")
        assert (ready.status_code, ready.json()) == (503, {"status": "loading"})
        assert http.head(f"{url}/health").status_code == 200 and http.head(f"{url}/ready").status_code == 503
        for early in (_ask(url), http.get(f"{url}/v1/models")):
            assert early.status_code == 503 and early.json()["error"]["code"] == "loading"
            assert early.headers["retry-after"]
        file.touch()
        assert starting.process.stdout is not None
        assert starting.process.stdout.readline() == "loading tiny\n"
        assert starting.process.stdout.readline().startswith(f"serving tiny at {url} ")
        assert http.get(f"{url}/ready").json() == {"status": "ready"} and _ask(url).status_code == 200
        assert starting.stop() == (0, "stopping\n", "")


def test_a_large_body_does_not_delay_others(tmp_path: Path):
    """The first request's prompts cannot be tokenised before the others have their answers."""
    gate = tmp_path / "go"
    with server({"gate": str(gate)}) as running, ThreadPoolExecutor(1) as pool:
        large = pool.submit(_ask, running.url, prompt=["a" * 600] * 600)
        for _ in range(5):
            assert _ask(running.url).status_code == 200
        assert not large.done()
        gate.touch()
        reply = large.result()
        assert reply.status_code == 400 and reply.json()["error"]["code"] == "context_length_exceeded"
        ids = _ask(running.url, prompt=[1] * 1_000_000)
        assert "the prompt has 1,000,000, and max_tokens 2 make them 1,000,002" in ids.json()["error"]["message"]
        text = _ask(running.url, prompt="a" * 1_000_000)
        assert text.status_code == 400 and "the text has 1000000 bytes" in text.json()["error"]["message"]


def test_port_in_use_gives_a_one_line_error():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with start(port=port) as starting:
            code, out, err = starting.stop(0)
    assert code != 0 and out == ""
    assert err == (
        f"ConfigError: cannot listen on 127.0.0.1:{port}: address already in use; "
        "choose another --serve.port, or 0 for any free one\n"
    )


def test_engine_that_cannot_start_gives_a_one_line_error():
    with start(cache_bytes=7) as starting:
        code, out, err = starting.stop(0)
        assert not list(starting.folder.iterdir())
    assert code != 0 and out == "loading tiny\n" and err.count("\n") == 1, err
    assert err.startswith("CapacityError: --serve.cache_bytes 7 is less than one page of 16 tokens")


@pytest.mark.slow
@pytest.mark.exec  # a forked engine is ready in less than the delay
@pytest.mark.parametrize(("number", "delay_s"), [(signal.SIGINT, 0), (signal.SIGTERM, 0.1)])
def test_signal_while_loading_stops_the_server(number: signal.Signals, delay_s: float):
    with start() as starting:
        # The folder appears when the engine is started; before that tempfile tries whether it can write a file.
        while starting.process.poll() is None and not list(starting.folder.glob("colonnade-*")):
            time.sleep(0.001)
        time.sleep(delay_s)
        assert starting.stop(number) == (128 + number, "loading tiny\nstopped before tiny was loaded\n", "")
        assert not list(starting.folder.iterdir())


def test_cache_limit_is_advertised_and_log_omits_prompts():
    with server(log="text", pages=3) as running:
        assert "; the cache limits a request to 49 tokens of the model's 128: raise --serve.pages" in running.greeting
        model = httpx.get(f"{running.url}/v1/models").json()["data"][0]
        assert model["max_model_len"] == 49
        whole = _ask(running.url, prompt=[1] * 40, max_tokens=model["max_model_len"] - 40)
        assert whole.json()["usage"]["total_tokens"] == 49
        over = _ask(running.url, prompt=[1] * 40, max_tokens=10)
        assert over.status_code == 400 and over.json()["error"]["code"] == "cache_too_small"
        assert over.json()["error"]["message"] == (
            "the prompt's 40 tokens and 10 to generate make 50; this server holds 49 for a request: ask for at most 9"
        )
        assert _ask(running.url, prompt=[1] * 40, max_tokens=11).status_code == 400
        assert _ask(running.url, prompt=[1] * 128).json()["error"]["message"].endswith("the prompt to at most 48")
        assert _ask(running.url, prompt="a secret").status_code == 200
        assert _ask(running.url, prompt="a secret", top_p=7).status_code == 400
        assert httpx.get(f"{running.url}/health").status_code == 200
        assert httpx.get(f"{running.url}/metrics").status_code == 200
        code, out, err = running.stop(signal.SIGTERM)
    assert (code, out) == (0, "stopping\n")
    when = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+ 127\.0\.0\.1:\d+"
    asked = [
        *('"GET /v1/models HTTP/1.1" 200 OK', '"POST /v1/completions HTTP/1.1" 200 OK'),
        r"refused \(cache_too_small, logged once\): the prompt's 40 .* at most 9; set --serve.pages to 4 or more",
        *['"POST /v1/completions HTTP/1.1" 400 Bad Request'] * 3,
        *('"POST /v1/completions HTTP/1.1" 200 OK', '"POST /v1/completions HTTP/1.1" 400 Bad Request'),
    ]
    when = {'"': rf"{when} ", "r": r"\S+ \S+ "}
    assert re.fullmatch("".join(rf"{when[line[0]]}{line}\n" for line in asked), err), err


def test_foreign_address_gives_a_one_line_error():
    with start(host="192.0.2.1") as starting:  # reserved for documentation (RFC 5737)
        code, out, err = starting.stop(0)
    assert code != 0 and out == ""
    assert re.fullmatch(
        r"ConfigError: cannot listen on 192\.0\.2\.1:0: .*; this machine does not have this address; "
        r"choose another --serve\.host\n",
        err,
    ), err
