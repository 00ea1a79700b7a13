"""Two replicas behind one address: killed ones lose nothing, prefixes find their replica, and all stop in the end."""

import asyncio
import errno
import os
import re
import signal
import subprocess
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from colonnade.config import Plan, ServeConfig
from colonnade.errors import WorkerError
from colonnade.serve import Engine, SamplingParams
from colonnade.serve.engine_client import EngineClient
from colonnade.serve.replica_placement import ANYWHERE
from colonnade.serve.replica_processes import ReplicaProcesses
from colonnade.serve.replicas import Replicas
from colonnade.serve.sampling_params import choice_seed
from colonnade.serve.start_order import start_turns
from colonnade.serve.structured_outputs import StructuredOutputs
from tests.serve import tiny
from tests.serve.serving import Running, server
from tests.serve.test_serve_life import gone, until_requests

KINDS: list[dict[str, Any]] = [
    {"ignore_eos": True},
    {"ignore_eos": True, "temperature": 0.5, "repetition_penalty": 1.2, "presence_penalty": 0.4},
    {"ignore_eos": True, "stop": ["zq", "e e"], "min_tokens": 20},
    {"structured_outputs": {"regex": "([a-f]{3}-){9}[0-9]{5}"}},
    {"ignore_eos": True, "logprobs": 1},
]


@contextmanager
def two_replicas(gate: Path) -> Iterator[Running]:
    """A server whose engines load once the file ``gate`` exists."""
    gate.touch()
    with server({"slow_s": 0.02, "wait_for": str(gate)}, replicas=2, admin_key="boss") as running:
        assert running.greeting.endswith("; 2 replicas\n")
        yield running


@pytest.fixture(scope="module")
def gate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("replicas") / "go"


@pytest.fixture(scope="module")
def running(gate: Path) -> Iterator[Running]:
    with two_replicas(gate) as it:
        yield it


def body(number: int, tokens: int) -> dict[str, Any]:
    """Request ``number`` of many kinds; every seventh has two choices."""
    kind = KINDS[number % len(KINDS)]
    return {
        "prompt": f"{number} The quick brown", "max_tokens": tokens, "seed": number, "n": 1 + (number % 7 == 0), **kind
    }  # fmt: skip


def expected(bodies: list[dict[str, Any]]) -> list[list[tuple[str, str, int]]]:
    """(text, finish reason, tokens) of each choice by an engine that nothing disturbs."""
    engine = Engine(tiny.model(dtype=torch.float32), tiny.tokenizer(), ServeConfig())
    prompts, params = [], []
    for each in bodies:
        options = {name: value for name, value in each.items() if name not in ("prompt", "n", "seed")}
        if "structured_outputs" in options:
            options["structured_outputs"] = StructuredOutputs(**options["structured_outputs"])
        for i in range(each["n"]):
            prompts.append(each["prompt"])
            params.append(SamplingParams(**options, seed=choice_seed(each["seed"], i)))
    done = iter(engine.generate(prompts, params))
    choices = [[next(done) for _ in range(each["n"])] for each in bodies]
    return [[(each.text, each.finish_reason, len(each.token_ids)) for each in several] for several in choices]


@dataclass
class Answer:
    """What a client has received of a stream."""

    texts: list[str]
    finish: list[str | None]
    tokens: list[list[str]]
    offsets: list[list[int]]
    usage: dict[str, int] = field(default_factory=dict)


async def stream(http: httpx.AsyncClient, url: str, asked: dict[str, Any], chunks: list[int]) -> Answer:
    """Read a stream; ``chunks[0]`` counts those of all streams."""
    n = asked["n"]
    answer = Answer([""] * n, [None] * n, [[] for _ in range(n)], [[] for _ in range(n)])
    options = {"stream": True, "stream_options": {"include_usage": True}}
    async with http.stream("POST", f"{url}/v1/completions", json={**asked, **options}) as reply:
        assert reply.status_code == 200, await reply.aread()
        async for line in reply.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = httpx.Response(200, content=line[6:]).json()
            assert "error" not in event, event
            chunks[0] += 1
            answer.usage = event["usage"] or answer.usage
            for choice in event["choices"]:
                i = choice["index"]
                answer.texts[i] += choice["text"]
                answer.finish[i] = choice["finish_reason"] or answer.finish[i]
                if choice["logprobs"]:
                    answer.tokens[i] += choice["logprobs"]["tokens"]
                    answer.offsets[i] += choice["logprobs"]["text_offset"]
    return answer


async def run_streams(url: str, bodies: list[dict[str, Any]], disturb: Any) -> list[Answer]:
    """All streams at once; ``disturb`` is called when a quarter of their tokens has arrived."""
    chunks, limits = [0], httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=120, limits=limits) as http:
        streams = [asyncio.create_task(stream(http, url, each, chunks)) for each in bodies]
        quarter = sum(each["max_tokens"] for each in bodies) // 4
        while chunks[0] < quarter and not all(each.done() for each in streams):
            await asyncio.sleep(0.01)
        assert not all(each.done() for each in streams), "the replica must be killed while streams run"
        disturb()
        return await asyncio.gather(*streams)


def engines(running: Running) -> list[int]:
    return sorted(running.engine_pids())


def grammar_pids(running: Running) -> list[int]:
    """Processes that compile grammars, each a child of an engine."""
    rows = subprocess.run(["ps", "-ww", "-eo", "pid=,ppid=,args="], capture_output=True, text=True, check=True).stdout
    table = [row.split(maxsplit=2) for row in rows.splitlines()]
    parents = set(engines(running))
    return [int(pid) for pid, ppid, args in table if int(ppid) in parents and "colonnade.serve.grammar_check" in args]


def until_up(running: Running, count: int) -> None:
    while httpx.get(f"{running.url}/ready").json()["replicas"]["up"] != count:
        time.sleep(0.02)


def check(answers: list[Answer], bodies: list[dict[str, Any]]) -> None:
    for number, (answer, choices) in enumerate(zip(answers, expected(bodies), strict=True)):
        assert list(zip(answer.texts, answer.finish, strict=True)) == [(text, end) for text, end, _ in choices], number
        assert answer.usage["completion_tokens"] == sum(tokens for _, _, tokens in choices), number
        for i, (_, _, tokens) in enumerate(choices):
            if "logprobs" in bodies[number]:
                assert len(answer.tokens[i]) == len(answer.offsets[i]) == tokens
                assert answer.offsets[i] == sorted(answer.offsets[i]) and answer.offsets[i][0] == 0


def killed_replica(running: Running, streams: int, tokens: int) -> None:
    until_up(running, 2)
    bodies = [body(number, tokens) for number in range(streams)]
    before = engines(running)

    def kill() -> None:
        os.kill(before[0], signal.SIGKILL)

    check(asyncio.run(run_streams(running.url, bodies, kill)), bodies)
    assert gone(before[:1])
    until_up(running, 2)
    after = engines(running)
    assert len(after) == 2 and before[0] not in after and before[1] in after


def test_killed_replica_loses_nothing(running: Running):
    """Streams of all kinds end with the text that an undisturbed engine gives, and the replica comes back."""
    killed_replica(running, 30, 60)
    metrics = httpx.get(f"{running.url}/metrics").text
    assert all(f'colonnade:replica_up{{model_name="tiny",replica="{i}"}} 1.0' in metrics for i in (0, 1))
    finished = [line for line in metrics.splitlines() if line.startswith("colonnade:request_success_total")]
    assert sum(float(line.split()[-1]) for line in finished) == sum(body(i, 60)["n"] for i in range(30))


@pytest.mark.long
def test_200_streams_survive_a_killed_replica(tmp_path: Path):
    with two_replicas(tmp_path / "go") as running:
        killed_replica(running, 200, 60)


def successor(running: Running, killed: int, *others: int) -> int:
    """The engine that takes the place of ``killed``, once it is up."""
    while not (new := set(engines(running)) - {killed, *others}):
        time.sleep(0.02)
    until_up(running, 1 + len(others))
    return new.pop()


@pytest.mark.long
def test_replicas_that_die_too_often_are_left_out(tmp_path: Path):
    """The fourth death of a replica is its last one, and the server fails with the last replica."""
    with two_replicas(tmp_path / "go") as running:
        first, other = engines(running)
        for last in (False, False, False, True):
            os.kill(first, signal.SIGKILL)
            if not last:
                first = successor(running, first, other)
        assert gone([first])
        until_up(running, 1)
        assert httpx.get(f"{running.url}/ready").json() == {"status": "ready", "replicas": {"up": 1, "all": 2}}
        assert httpx.post(f"{running.url}/v1/completions", json={"prompt": "a"}).status_code == 200
        assert engines(running) == [other]
        for last in (False, False, False, True):
            os.kill(other, signal.SIGKILL)
            if not last:
                other = successor(running, other)
        code, out, err = running.stop(0)
    assert code == 1 and re.fullmatch(r"WorkerError: the engine process was killed by SIGKILL .*\n", err), err
    assert "died 4 times and was removed, 1 of 2 are left: the engine process was killed by SIGKILL" in out


def test_a_process_that_cannot_be_started_ends_no_other_replica(monkeypatch: pytest.MonkeyPatch):
    """Without memory for a process, as after the kernel has killed one, it is tried again."""
    replicas, starts, lines = Replicas(2), Counter[int](), list[str]()

    @asynccontextmanager
    async def start(*args: Any) -> AsyncIterator[EngineClient]:
        client = args[6]
        number = replicas.clients.index(client)
        starts[number] += 1
        if number == 0 and starts[0] in (2, 3):
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        client.ready.set()
        yield client

    async def run() -> None:
        processes = ReplicaProcesses(
            replicas, lambda: pytest.fail("a model was opened"), Plan(), ServeConfig(), "cpu", [ANYWHERE] * 2,
            start_turns(["cpu", "cpu"]), ["replica 0", "replica 1"], lines.append, lambda *_: None,
        )  # fmt: skip
        async with processes.running(asyncio.Event()):
            await asyncio.wait_for(replicas.ready.wait(), 10)
            killed = replicas.clients[0]
            killed.fail(WorkerError("killed"))
            killed.exited.set()
            while starts[0] < 4 and not replicas.failure:
                await asyncio.sleep(0.001)
            assert replicas.failure is None
            await asyncio.sleep(0.01)
            assert replicas.up == [0, 1]

    monkeypatch.setattr("colonnade.serve.replica_processes.engine_process", start)
    monkeypatch.setattr("colonnade.serve.replica_processes.PAUSE_S", 0.0, raising=False)
    asyncio.run(run())
    assert starts == {0: 4, 1: 1}
    assert [line for line in lines if "Cannot allocate memory" in line] == lines[1:3]
    assert lines[-1] == "replica 0 is up again"


@pytest.mark.slow
def test_streams_wait_if_all_replicas_die(running: Running, gate: Path):
    until_up(running, 2)
    gate.unlink()
    bodies = [body(number, 60) for number in range(6)]
    codes: list[tuple[int, str]] = []

    def kill_all() -> None:
        pids = engines(running)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        assert gone(pids)
        until_up(running, 0)
        ready = httpx.get(f"{running.url}/ready")
        assert (ready.status_code, ready.json()) == (503, {"status": "loading", "replicas": {"up": 0, "all": 2}})
        assert httpx.get(f"{running.url}/health").status_code == 200
        late = httpx.post(f"{running.url}/v1/completions", json={"prompt": "a"})
        codes.append((late.status_code, late.json()["error"]["code"]))
        gate.touch()

    check(asyncio.run(run_streams(running.url, bodies, kill_all)), bodies)
    assert codes == [(503, "loading")]


@pytest.mark.slow
def test_prefixes_find_their_replica(running: Running):
    """Prompts of 96 ids (3 blocks) that are sent again start from the cache, whichever replica has them."""
    until_up(running, 2)

    def hits() -> float:
        lines = httpx.get(f"{running.url}/metrics").text.splitlines()
        return float(next(line for line in lines if line.startswith("colonnade:prefix_cache_hits_total")).split()[-1])

    def ask(first: int, last: int) -> None:
        prompt = [first] * 96 + [last]
        reply = httpx.post(f"{running.url}/v1/completions", json={"prompt": prompt, "max_tokens": 1})
        assert reply.status_code == 200

    for i in range(5):
        ask(20 + i, 7)
    before = hits()
    for i in (3, 0, 4, 1, 2):
        ask(20 + i, 8)
    assert hits() - before == 5 * 96
    headers = {"authorization": "Bearer boss"}
    assert httpx.post(f"{running.url}/admin/cache/reset", headers=headers).status_code == 200
    before = hits()
    for i in range(5):
        ask(20 + i, 9)
    assert hits() == before


def test_other_requests_go_to_a_replica(running: Running):
    until_up(running, 2)
    tokens = httpx.post(f"{running.url}/tokenize", json={"prompt": "The quick"}).json()["tokens"]
    assert httpx.post(f"{running.url}/detokenize", json={"tokens": tokens}).json() == {"prompt": "The quick"}
    assert httpx.get(f"{running.url}/v1/models").json()["data"][0]["max_model_len"] == 128
    over = httpx.post(f"{running.url}/v1/completions", json={"prompt": [1] * 200}).json()["error"]
    assert over["code"] == "context_length_exceeded"


@pytest.mark.slow
def test_a_server_in_front_of_another_answers_the_same(running: Running):
    until_up(running, 2)
    asked = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 40, "seed": 3}
    with server(upstreams=[running.url]) as front:
        direct, forwarded = (each.client.chat.completions.create(**asked) for each in (running, front))
        assert direct.choices[0].message.content == forwarded.choices[0].message.content
        stream = front.client.chat.completions.create(**asked, stream=True)
        assert "".join(each.choices[0].delta.content or "" for each in stream) == direct.choices[0].message.content
        assert front.client.models.list().data[0].id == "tiny"
        left = front.client.completions.create(model="tiny", prompt="a", max_tokens=100, stream=True)
        next(left)
        left.close()  # the client leaves: so does the request
        until_requests(running, running=0)
        assert front.stop(signal.SIGTERM) == (0, "stopping\n", "")


def test_replicas_stop_on_a_signal(running: Running):
    """Last: it stops the module's server."""
    until_up(running, 2)
    pids = [*engines(running), *grammar_pids(running)]
    code, out, err = running.stop(signal.SIGTERM)
    assert (code, err) == (0, "") and out.endswith("\nstopping\n")
    deaths = out.count("died and is being restarted: the engine process was killed by SIGKILL")
    assert deaths == out.count("is up again\n") in (0, 1, 3)  # three with the slow tests
    assert gone(pids) and not list(running.folder.iterdir())
