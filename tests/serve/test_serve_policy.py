"""Which requests come first, and which are refused or end early: clients in turn, priorities, timeouts."""

import asyncio
import json

import httpx
import pytest

from tests.serve.serving import Running, server


@pytest.fixture(scope="module")
def slow():
    """Two requests at a time, 20 ms per step."""
    with server({"slow_s": 0.02}, max_requests=2, pages=64) as it:
        yield it


def client_at(running: Running, address: str = "127.0.0.1") -> httpx.AsyncClient:
    return httpx.AsyncClient(
        base_url=running.url, transport=httpx.AsyncHTTPTransport(local_address=address), timeout=120
    )


def body(prompt: object = "The quick", tokens: int = 4, **more: object) -> dict[str, object]:
    return {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, **more}


async def metric(http: httpx.AsyncClient, name: str) -> float:
    lines = (await http.get("/metrics")).text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(f"colonnade:{name}{{"))


async def until_waiting(http: httpx.AsyncClient, least: int) -> None:
    while await metric(http, "num_requests_waiting") < least:
        await asyncio.sleep(0.01)


async def flooded(running: Running, check, prompts: int = 1000) -> None:
    """Run ``check(http)`` while a client at another address has many prompts in the queue."""
    async with client_at(running, "127.0.0.2") as flood, client_at(running) as http:
        async with flood.stream("POST", "/v1/completions", json=body(["x"] * prompts, stream=True)) as reply:
            assert reply.status_code == 200
            await until_waiting(http, prompts - 20)
            await check(http)
        while await metric(http, "num_requests_waiting") or await metric(http, "num_requests_running"):
            await asyncio.sleep(0.01)


def test_fair_queue(slow: Running):
    """1,000 waiting prompts of one client delay another client's request by a few requests, not by 1,000."""

    async def check(http: httpx.AsyncClient) -> None:
        for _ in range(3):
            assert (await http.post("/v1/completions", json=body())).status_code == 200
        assert await metric(http, "num_requests_waiting") > 900

    asyncio.run(flooded(slow, check))


@pytest.mark.slow
def test_a_full_queue_has_room_for_other_clients():
    """Of 8 places one client takes all, until others come: each gets its share, also with several prompts at once."""
    with server({"slow_s": 0.05}, max_requests=1, max_waiting=8, pages=64) as running:

        async def ask(http: httpx.AsyncClient, prompt: object = "x", tokens: int = 2) -> httpx.Response:
            return await http.post("/v1/completions", json=body(prompt, tokens))

        async def run() -> None:
            async with client_at(running, "127.0.0.2") as hog, client_at(running) as http:
                running_one = asyncio.create_task(ask(hog, tokens=100))
                while await metric(http, "num_requests_running") < 1:
                    await asyncio.sleep(0.01)
                queued = [asyncio.create_task(ask(hog, f"{i}")) for i in range(8)]
                await until_waiting(http, 8)
                refused = await ask(hog)
                assert refused.status_code == 429 and "8 requests are already waiting" in refused.text
                several = asyncio.create_task(ask(http, ["a", "b", "c", "d"]))
                displaced, _ = await asyncio.wait(queued, return_when=asyncio.FIRST_COMPLETED)
                assert {each.result().status_code for each in displaced} == {429}
                assert "dropped in favour of another client's" in displaced.pop().result().text
                too_many = await ask(http, "e")
                assert too_many.status_code == 429
                assert (await several).status_code == 200 and (await running_one).status_code == 200
                codes = [(await each).status_code for each in queued]
                assert sorted(codes) == [200] * 4 + [429] * 4

        asyncio.run(run())


def test_a_better_priority_comes_first(slow: Running):
    async def check(http: httpx.AsyncClient) -> None:
        order: list[int] = []

        async def ask(priority: int) -> None:
            assert (await http.post("/v1/completions", json=body(priority=priority))).status_code == 200
            order.append(priority)

        waiting = await metric(http, "num_requests_waiting")
        late = [asyncio.create_task(ask(2)) for _ in range(2)]
        await until_waiting(http, int(waiting) - 10)
        await asyncio.gather(*(ask(-1) for _ in range(6)))
        assert order == [-1] * 6, "a worse class overtook the flood's, or a better one"
        for task in late:
            task.cancel()

    asyncio.run(flooded(slow, check, prompts=300))


def test_a_request_that_would_wait_too_long_is_refused_at_once(slow: Running):
    async def check(http: httpx.AsyncClient) -> None:
        refused = await http.post("/v1/completions", json=body(priority=3, timeout_s=1.5))
        assert refused.status_code == 429, refused.text
        error = refused.json()["error"]
        assert (error["code"], error["param"]) == ("timeout_expected", "timeout_s")
        assert int(refused.headers["retry-after"]) >= 2
        accepted = await http.post("/v1/completions", json=body(timeout_s=100))
        assert accepted.status_code == 200

    asyncio.run(flooded(slow, check))


@pytest.mark.slow
def test_a_request_that_takes_too_long_ends_with_504(slow: Running):
    asked = body(tokens=110, timeout_s=1.5)
    whole = httpx.post(f"{slow.url}/v1/completions", json=asked, timeout=120)
    assert whole.status_code == 504, whole.text
    error = whole.json()["error"]
    assert (error["code"], error["param"], error["type"]) == ("timeout", "timeout_s", "timeout_error")
    assert "timeout_s of 1.5 s" in error["message"]
    stream = httpx.post(f"{slow.url}/v1/completions", json={**asked, "stream": True}, timeout=120)
    assert stream.status_code == 200 and "[DONE]" not in stream.text
    *chunks, last = [json.loads(line.removeprefix("data: ")) for line in stream.text.split("\n\n") if line]
    assert chunks and last["error"]["code"] == "timeout"

    async def idle() -> None:
        async with client_at(slow) as http:
            while await metric(http, "num_requests_running") or await metric(http, "kv_cache_usage_perc"):
                await asyncio.sleep(0.01)

    asyncio.run(idle())


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"priority": 101}, "priority"), ({"priority": 1.5}, "priority"), ({"priority": True}, "priority"),
        ({"timeout_s": 0}, "timeout_s"), ({"timeout_s": -1}, "timeout_s"), ({"timeout_s": 1e9}, "timeout_s"),
        ({"timeout_s": "1"}, "timeout_s"),
    ],
)  # fmt: skip
def test_bad_priority_and_timeout_are_refused(slow: Running, more: dict[str, object], param: str):
    reply = httpx.post(f"{slow.url}/v1/completions", json=body(**more))
    assert reply.status_code == 400 and reply.json()["error"]["param"] == param, reply.text
