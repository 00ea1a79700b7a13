"""Several HTTP processes in front of the same engines: one queue, one set of limits, one set of metrics."""

import asyncio
import os
import re
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import torch

from colonnade.config import ServeConfig
from colonnade.errors import ConfigError
from colonnade.serve import Engine, SamplingParams
from colonnade.serve.server import serve
from tests.serve import encoders, tiny
from tests.serve.serving import Running, server, start
from tests.serve.streams import stream, stream_all
from tests.serve.test_serve_http_keys import write_keys
from tests.serve.test_serve_life import gone, until_requests

KEYS = {
    "free": {},
    "few": {"requests_per_minute": 10},
    "tokens": {"tokens_per_minute": 60},
    "single": {"concurrent_requests": 1},
    "one-more": {"concurrent_requests": 1},
}


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("fronts") / "keys.jsonl"
    write_keys(file, KEYS)
    return file


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with server({"slow_s": 0.01}, fronts=2, admin_key="boss", page_tokens=4) as it:
        yield it


@pytest.fixture(scope="module")
def guarded(key_file: Path) -> Iterator[Running]:
    with server({"slow_s": 0.01}, fronts=3, keys=str(key_file), admin_key="boss") as it:
        yield it


def fronts(running: Running) -> list[int]:
    """The HTTP processes: children of the server that listen at its port."""

    def files(process: Path) -> set[str]:
        return {str(each.readlink()) for each in (process / "fd").iterdir()}

    port = f"{int(running.url.rsplit(':', 1)[1]):04X}"
    inodes = {
        row.split()[9] for row in Path("/proc/net/tcp").read_text().splitlines()[1:]
        if row.split()[1].endswith(f":{port}") and row.split()[3] == "0A"
    }  # fmt: skip
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1])
            links = files(folder) if parent == running.process.pid else set[str]()
        except FileNotFoundError:
            continue
        if any(f"socket:[{inode}]" in links for inode in inodes):
            found.append(int(folder.name))
    return sorted(found)


def until_fronts(running: Running, count: int) -> list[int]:
    while len(found := fronts(running)) != count:
        time.sleep(0.02)
    return found


def metric(running: Running, name: str, key: str = "none") -> float:
    """The sum of a metric's values."""
    text = httpx.get(f"{running.url}/metrics", headers={"authorization": f"Bearer {key}"}).text
    return sum(float(value) for value in re.findall(rf"^colonnade:{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE))


def ask(running: Running, key: str = "none", **more: object) -> httpx.Response:
    """A request on a connection of its own."""
    body = {"prompt": "The quick", "max_tokens": 2, "temperature": 0, "ignore_eos": True, **more}
    return httpx.post(
        f"{running.url}/v1/completions", json=body, headers={"authorization": f"Bearer {key}"}, timeout=60
    )


def test_streams_of_all_fronts_have_the_models_text(running: Running):
    assert len(fronts(running)) == 2

    async def both() -> list[str]:
        asked = {"model": "tiny", "prompt": "The quick", "temperature": 0.7, "seed": 4, "max_tokens": 40}
        async with running.async_client as client:

            async def one() -> str:
                it = await client.completions.create(**asked, stream=True, extra_body={"ignore_eos": True})
                return "".join([chunk.choices[0].text async for chunk in it])

            return await asyncio.gather(*(one() for _ in range(16)))

    params = SamplingParams(temperature=0.7, seed=4, max_tokens=40, ignore_eos=True)
    engine = Engine(tiny.model(dtype=torch.float32), tiny.tokenizer(), ServeConfig())
    assert set(asyncio.run(both())) == {engine.generate(["The quick"], params)[0].text}


def test_a_scrape_shows_the_sum_of_all_fronts(running: Running):
    """Whichever front answers: requests, latencies, tokens; and the memory of all processes."""
    before = metric(running, "http_requests_total"), metric(running, "e2e_request_latency_seconds_count")
    assert asyncio.run(stream_all(running, 24, max_tokens=4))[0].finish_reason == "length"
    for _ in range(6):
        assert metric(running, "http_requests_total") - before[0] >= 24
        assert metric(running, "e2e_request_latency_seconds_count") - before[1] == 24
    assert metric(running, "inter_token_latency_seconds_count") == metric(running, "generation_tokens_total") - metric(
        running, "time_to_first_token_seconds_count"
    )
    text = httpx.get(f"{running.url}/metrics").text
    pids = (*fronts(running), running.process.pid)
    rss = sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096 for pid in pids)
    shown = float(re.search(r"^process_resident_memory_bytes (\S+)$", text, re.MULTILINE)[1])  # type: ignore[index]
    assert 0.8 * rss < shown < 1.2 * rss
    names = re.findall(r"^# TYPE (\S+)", text, re.MULTILINE)
    assert len(names) == len(set(names))


@pytest.mark.slow
def test_a_killed_front_is_started_again(running: Running):
    """Its requests end in the engine, whose pages are free again; those of the other front go on."""
    first = until_fronts(running, 2)
    counted = metric(running, "http_requests_total")

    async def run() -> list[object]:
        streams = [asyncio.create_task(stream(running, prompt=[i + 1, 7], max_tokens=110)) for i in range(24)]
        while metric(running, "num_requests_running") < 24:
            await asyncio.sleep(0.02)
        os.kill(first[0], signal.SIGKILL)
        return await asyncio.gather(*streams, return_exceptions=True)

    ended = [it for it in asyncio.run(run()) if getattr(it, "finish_reason", None) == "length"]
    assert 0 < len(ended) < 24, "each front has some of the streams"
    until_requests(running, running=0, waiting=0)
    while metric(running, "kv_cache_usage_perc"):
        time.sleep(0.02)
    second = until_fronts(running, 2)
    assert first[1] in second and first[0] not in second and gone(first[:1])
    assert metric(running, "http_requests_total") >= counted, "counters of a front that has died are kept"
    replies = asyncio.run(stream_all(running, 16, max_tokens=3))
    assert all(reply.finish_reason == "length" for reply in replies)


def test_a_front_that_hangs_delays_no_other(running: Running):
    pids = until_fronts(running, 2)

    async def run() -> list[bool]:
        streams = [asyncio.create_task(stream(running, prompt=[i + 1, 7], max_tokens=100)) for i in range(16)]
        while metric(running, "num_requests_running") < 16:
            await asyncio.sleep(0.02)
        os.kill(pids[0], signal.SIGSTOP)
        try:
            await asyncio.wait(streams, timeout=120, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.sleep(1)
            return [each.done() for each in streams]
        finally:
            os.kill(pids[0], signal.SIGCONT)
            await asyncio.gather(*streams)

    done = asyncio.run(run())
    assert any(done) and not all(done)


def test_the_port_belongs_to_one_server(running: Running):
    port = int(running.url.rsplit(":", 1)[1])
    for count in (1, 2):
        config = ServeConfig(port=port, fronts=count)
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}: address already in use"):
            serve({"tiny": None}, config=config, device="cpu", announce=lambda _: None)


@pytest.mark.slow
def test_limits_hold_over_all_fronts(guarded: Running):
    """The buckets are in one process: each connection may reach another front."""
    assert len(fronts(guarded)) == 3
    replies = [ask(guarded, "few") for _ in range(14)]
    assert [reply.status_code for reply in replies] == [200] * 10 + [429] * 4
    left = [int(reply.headers["x-ratelimit-remaining-requests"]) for reply in replies[:10]]
    assert left == sorted(left, reverse=True) and left[0] == 9 and left[-1] <= 2
    assert 1 <= int(replies[-1].headers["retry-after"]) <= 6
    assert [ask(guarded, "tokens", max_tokens=70).status_code for _ in range(3)] == [200, 429, 429]
    with ThreadPoolExecutor(8) as pool:
        codes = list(pool.map(lambda _: ask(guarded, "single", max_tokens=60).status_code, range(8)))
    assert sorted(codes) == [200] + [429] * 7
    assert ask(guarded, "single").status_code == 200
    assert ask(guarded, "free").status_code == 200 and ask(guarded, "unknown").status_code == 401


@pytest.mark.slow
def test_requests_of_a_killed_front_no_longer_count(guarded: Running):
    pids = until_fronts(guarded, 3)
    headers = {"authorization": "Bearer one-more"}
    body = {"prompt": "a", "max_tokens": 110, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{guarded.url}/v1/completions", json=body, headers=headers, timeout=120) as reply:
        assert reply.status_code == 200
        lines = reply.iter_lines()
        next(lines)
        assert ask(guarded, "one-more").status_code == 429
        for pid in pids:  # which has it is not known
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(httpx.HTTPError):
            list(lines)
    until_fronts(guarded, 3)
    assert ask(guarded, "one-more").status_code == 200


@pytest.mark.slow
def test_all_fronts_read_the_keys_again(guarded: Running, key_file: Path):
    until_fronts(guarded, 3)
    write_keys(key_file, {**KEYS, "new": {}})
    guarded.process.send_signal(signal.SIGHUP)
    while ask(guarded, "new").status_code != 200:
        time.sleep(0.02)
    time.sleep(0.2)
    assert {ask(guarded, "new").status_code for _ in range(12)} == {200}
    write_keys(key_file, KEYS)
    guarded.process.send_signal(signal.SIGHUP)
    while ask(guarded, "new").status_code != 401:
        time.sleep(0.02)
    time.sleep(0.2)
    assert {ask(guarded, "new").status_code for _ in range(12)} == {401}
    # SIGTERM to every process, as systemd sends it, is one SIGTERM.
    pids = [*fronts(guarded), *guarded.engine_pids()]
    for pid in fronts(guarded):
        os.kill(pid, signal.SIGTERM)
    code, out, err = guarded.stop(signal.SIGTERM)
    assert (code, err) == (0, "") and out.count("is being restarted") == 3 and gone(pids)


@pytest.mark.slow
def test_the_queue_is_one_for_all_fronts():
    """One running and two waiting requests at most, whichever fronts they came through."""
    with server({"slow_s": 0.05}, fronts=2, max_requests=1, max_waiting=2) as running, ThreadPoolExecutor(8) as pool:
        first = pool.submit(ask, running, max_tokens=60)
        until_requests(running, running=1)
        codes = sorted(reply.status_code for reply in pool.map(lambda _: ask(running), range(6)))
        assert codes == [200, 200, 429, 429, 429, 429] and first.result().status_code == 200
        assert httpx.get(f"{running.url}/ready").status_code == 200


@pytest.mark.slow
def test_a_weight_swap_through_a_front_outlives_its_engine(tmp_path: Path):
    models = {"a": {}, "b": {"path": str(encoders.write(tmp_path / "old", encoders.config()))}}
    new = encoders.write(tmp_path / "new", encoders.config(), seed=5)

    def embed(running: Running) -> list[float]:
        body = {"model": "b", "input": "a dog"}
        return httpx.post(f"{running.url}/v1/embeddings", json=body, timeout=120).json()["data"][0]["embedding"]

    with server(models=models, fronts=2, admin_key="boss") as running:
        before = embed(running)
        swap = {"model": "b", "path": str(new)}
        headers = {"authorization": "Bearer boss"}
        reply = httpx.post(f"{running.url}/admin/weights", json=swap, headers=headers, timeout=120)
        assert reply.status_code == 200, reply.text
        after = embed(running)
        assert after != before
        pid = running.engine_pids()[-1]
        os.kill(pid, signal.SIGKILL)
        assert gone([pid])
        while httpx.get(f"{running.url}/ready").status_code == 200:
            time.sleep(0.01)
        while not all(httpx.get(f"{running.url}/ready").status_code == 200 for _ in range(12)):
            time.sleep(0.05)
        assert {tuple(embed(running)) for _ in range(8)} == {tuple(after)}
        assert ask(running, model="a").status_code == 200


@pytest.mark.slow
def test_an_operator_drains_all_fronts_under_streams(running: Running):
    """Last: it stops the module's server."""
    pids = [*until_fronts(running, 2), *running.engine_pids()]

    async def run() -> list[object]:
        streams = [asyncio.create_task(stream(running, prompt=[i + 1, 7], max_tokens=60)) for i in range(32)]
        while metric(running, "num_requests_running") < 32:
            await asyncio.sleep(0.02)
        reply = httpx.post(f"{running.url}/admin/drain", headers={"authorization": "Bearer boss"})
        assert reply.json() == {"status": "draining", "running": 32}
        assert ask(running).status_code == 503
        return await asyncio.gather(*streams)

    assert all(getattr(it, "finish_reason", None) == "length" for it in asyncio.run(run()))
    code, out, err = running.stop(0)
    assert (code, err) == (0, "") and "stopping: 32 requests have 25 s to finish" in out
    assert gone(pids) and not list(running.folder.iterdir())


@pytest.mark.slow
def test_the_engines_death_ends_the_server():
    with server({"slow_s": 0.02}, fronts=2) as running, ThreadPoolExecutor(4) as pool:
        replies = [pool.submit(ask, running, max_tokens=110) for _ in range(4)]
        until_requests(running, running=4)
        os.kill(running.engine_pids()[0], signal.SIGKILL)
        codes = [reply.result().status_code for reply in replies]
        code, _, err = running.stop(0)
    assert codes == [503] * 4 and code == 1 and err.startswith("WorkerError: the engine process was killed by SIGKILL")


@pytest.mark.slow
def test_a_signal_while_loading_ends_all(tmp_path: Path):
    with start({"wait_for": str(tmp_path / "never")}, fronts=2) as starting:
        assert starting.process.stdout is not None
        assert starting.process.stdout.readline() == "loading tiny\n"
        time.sleep(1)
        code, out, err = starting.stop(signal.SIGTERM)
    assert (code, err) == (143, "") and out == "stopped before tiny was loaded\n"


@pytest.mark.slow
def test_fronts_need_engines():
    config = ServeConfig(port=0, fronts=2, upstreams=("http://127.0.0.1:1",))
    with pytest.raises(ConfigError, match="set one of the two"):
        serve({"tiny": None}, config=config, device="cpu", announce=lambda _: None)
