"""Several models at one address: each has its own engine, and a request's ``model`` chooses it."""

import asyncio
import os
import re
import signal
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch

from colonnade.config import Plan, ServeConfig
from colonnade.errors import ConfigError
from colonnade.serve import Engine, SamplingParams
from colonnade.serve.replica_placement import Placement, place_engines, share_gpus
from colonnade.serve.served_models import model_names
from colonnade.serve.server import serve
from colonnade.serve.start_order import start_turns
from tests.serve import encoders, tiny
from tests.serve.serving import Running, server, start
from tests.serve.test_serve_http_keys import write_keys
from tests.serve.test_serve_life import gone

ADMIN = {"authorization": "Bearer boss"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def running(folder: Path) -> Iterator[Running]:
    """A model that chats, one with another context that does not, and an encoder; keys for some of them."""
    write_keys(folder / "keys.jsonl", {"all": {}, "first": {"models": ["tiny"]}, "slow": {"requests_per_minute": 1}})
    encoder = encoders.write(folder / "encoder", encoders.config())
    models = {
        "tiny": {"slow_s": 0.01, "wait_for": str(folder / "go")},
        "wide": {"chat": False, "length": 256},
        "encoder": {"path": str(encoder)},
    }
    (folder / "go").touch()
    with server(models=models, keys=str(folder / "keys.jsonl"), admin_key="boss") as it:
        yield it


def client(running: Running, key: str = "all") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{running.url}/v1", api_key=key, max_retries=0, timeout=120)


def post(running: Running, path: str, key: str = "all", **body: Any) -> httpx.Response:
    return httpx.post(f"{running.url}{path}", json=body, headers={"authorization": f"Bearer {key}"}, timeout=120)


def get(running: Running, path: str) -> httpx.Response:
    return httpx.get(f"{running.url}{path}", headers={"authorization": "Bearer all"}, timeout=120)


def until_ready(running: Running) -> None:
    while get(running, "/ready").status_code != 200:
        time.sleep(0.02)


def alone(name: str, prompt: str, tokens: int) -> str:
    """The text of the model ``name``, from an engine of its own."""
    model = tiny.model(dtype=torch.float32, context=256 if name == "wide" else 128)
    params = SamplingParams(temperature=0.7, seed=4, max_tokens=tokens, ignore_eos=True)
    return Engine(model, tiny.tokenizer(), ServeConfig()).generate([prompt], params)[0].text


def test_models_are_listed(running: Running):
    assert re.search(r"tokens in the caches, equal shares of the memory: tiny [\d,]+, wide [\d,]+\n", running.greeting)
    cards = {card.id: card.model_dump() for card in client(running).models.list()}
    assert list(cards) == ["tiny", "wide", "encoder"]
    assert cards["tiny"]["capabilities"] == ["completions", "chat"] and cards["tiny"]["max_model_len"] == 128
    assert cards["wide"]["capabilities"] == ["completions"] and cards["wide"]["max_model_len"] == 256
    assert client(running).models.retrieve("encoder").id == "encoder"
    status = dict.fromkeys(cards, "ready")
    assert get(running, "/ready").json() == {"status": "ready", "models": status}
    assert get(running, "/health").json() == {"status": "ok"}


def test_two_models_stream_at_the_same_time(running: Running):
    """Each stream has its own model's text, and their chunks arrive interleaved."""
    order: list[str] = []

    async def stream(name: str) -> str:
        asked = {"model": name, "prompt": "The quick", "temperature": 0.7, "seed": 4, "max_tokens": 60}
        text = ""
        async with openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key="all", max_retries=0, timeout=120) as it:
            async for chunk in await it.completions.create(**asked, stream=True, extra_body={"ignore_eos": True}):
                assert chunk.model == name
                text += chunk.choices[0].text
                order.append(name)
        return text

    async def both() -> list[str]:
        return list(await asyncio.gather(stream("tiny"), stream("wide")))

    assert asyncio.run(both()) == [alone("tiny", "The quick", 60), alone("wide", "The quick", 60)]
    assert sum(one != other for one, other in pairwise(order)) >= 3, order


def test_the_wrong_name_or_endpoint_is_refused(running: Running):
    chat = [{"role": "user", "content": "x"}]
    for path, body in (
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": chat}),
        ("/v1/responses", {"input": "a"}),
        ("/v1/embeddings", {"input": "a"}),
        ("/tokenize", {"prompt": "a"}),
        ("/detokenize", {"tokens": [1]}),
    ):
        unknown, missing = post(running, path, model="other", **body), post(running, path, **body)
        assert unknown.status_code == 404, path
        error = unknown.json()["error"]
        assert error["message"] == "there is no model 'other' here; use 'tiny', 'wide' or 'encoder'"
        assert (error["param"], error["code"]) == ("model", "model_not_found")
        assert missing.status_code == 400 and missing.json()["error"]["param"] == "model", path
    with pytest.raises(openai.BadRequestError, match="'encoder' is served for embeddings; use /v1/embeddings"):
        client(running).completions.create(model="encoder", prompt="a")
    with pytest.raises(openai.BadRequestError, match="'tiny' generates text; use /v1/chat/completions"):
        client(running).embeddings.create(model="tiny", input="a")
    with pytest.raises(openai.BadRequestError, match="no chat template"):
        client(running).chat.completions.create(model="wide", messages=chat)
    assert client(running).chat.completions.create(model="tiny", messages=chat, max_tokens=2).model == "tiny"
    vector = client(running).embeddings.create(model="encoder", input="a dog").data[0].embedding
    assert len(vector) == encoders.config().width
    assert post(running, "/tokenize", model="wide", prompt="The quick").json()["max_model_len"] == 256


def test_a_key_allows_models(running: Running):
    assert client(running, "first").completions.create(model="tiny", prompt="a", max_tokens=1).model == "tiny"
    for name, path, body in (
        ("wide", "/v1/completions", {"prompt": "a"}),
        ("encoder", "/v1/embeddings", {"input": "a"}),
    ):
        refused = post(running, path, "first", model=name, **body)
        assert refused.status_code == 403
        assert refused.json()["error"]["message"] == f"this API key may not use the model '{name}'; use another key"
    assert [model.id for model in client(running, "first").models.list()] == ["tiny"]
    unknown = post(running, "/v1/completions", "first", model="gpt-4", prompt="a").json()["error"]
    assert unknown["message"] == "there is no model 'gpt-4' here; use 'tiny'"
    hidden = httpx.get(f"{running.url}/v1/models/wide", headers={"authorization": "Bearer first"})
    assert hidden.status_code == 403
    assert post(running, "/v1/completions", "slow", model="wide", prompt="a", max_tokens=1).status_code == 200
    limited = post(running, "/v1/completions", "slow", model="tiny", prompt="a")
    assert limited.status_code == 429, "a key's limits hold over all models"


def test_metrics_name_the_model(running: Running):
    post(running, "/v1/completions", model="wide", prompt="a b c", max_tokens=3)
    lines = get(running, "/metrics").text.splitlines()
    for metric in ("generation_tokens_total", "e2e_request_latency_seconds_count", "num_requests_running"):
        values = {
            line.split('"')[1]: float(line.split()[-1]) for line in lines if line.startswith(f"colonnade:{metric}{{")
        }
        assert list(values) == ["tiny", "wide", "encoder"] and (values["wide"] > 0 or metric == "num_requests_running")
    assert len([line for line in lines if line.startswith("# TYPE colonnade:generation_tokens_total")]) == 1


def test_operators_name_the_model(running: Running, folder: Path):
    """The cache of one model, or of all, is emptied; the weights of the named one are replaced."""

    def hits(name: str) -> float:
        text = get(running, "/metrics").text
        return float(re.search(rf'prefix_cache_hits_total{{model_name="{name}"}} (\S+)', text)[1])  # type: ignore[index]

    def hit(name: str) -> bool:
        before = hits(name)
        post(running, "/v1/completions", model=name, prompt=[5] * 90, max_tokens=1)
        return hits(name) > before

    post(running, "/v1/completions", model="tiny", prompt=[5] * 90, max_tokens=1)
    post(running, "/v1/completions", model="wide", prompt=[5] * 90, max_tokens=1)
    assert [hit("tiny"), hit("wide")] == [True, True]
    reset = f"{running.url}/admin/cache/reset"
    assert httpx.post(reset, headers=ADMIN, json={"model": "wide"}).status_code == 200
    assert [hit("tiny"), hit("wide")] == [True, False]
    assert httpx.post(reset, headers=ADMIN).status_code == 200
    assert [hit("tiny"), hit("wide")] == [False, False]
    assert httpx.post(reset, headers=ADMIN, json={"model": "other"}).status_code == 404
    swap = f"{running.url}/admin/weights"
    assert httpx.post(swap, headers=ADMIN, json={"path": "x"}).json()["error"]["code"] == "model_missing"
    new = encoders.write(folder / "new", encoders.config(), seed=5)
    before = client(running).embeddings.create(model="encoder", input="a dog").data[0].embedding
    assert httpx.post(swap, headers=ADMIN, json={"model": "encoder", "path": str(new)}, timeout=120).status_code == 200
    after = client(running).embeddings.create(model="encoder", input="a dog").data[0].embedding
    assert before != after
    kill(running, 2)
    until_ready(running)
    again = client(running).embeddings.create(model="encoder", input="a dog").data[0].embedding
    assert again == after, "an engine that is started again has the weights that were swapped in"


def kill(running: Running, number: int) -> None:
    """Kill the engine that was started as this one."""
    pid = sorted(running.engine_pids())[number]
    os.kill(pid, signal.SIGKILL)
    assert gone([pid])
    while get(running, "/ready").status_code == 200:
        time.sleep(0.01)


def test_the_death_of_an_engine_ends_nothing_else(running: Running, folder: Path):
    """While it is started again its model gets 503, and what it had goes on afterwards; others do not notice."""
    until_ready(running)
    (folder / "go").unlink()
    asked = {"prompt": "The quick", "temperature": 0.7, "seed": 4, "max_tokens": 60, "stream": True}

    def texts(stream: openai.Stream) -> Iterator[str]:
        for chunk in stream:
            yield chunk.choices[0].text

    streams = {
        name: texts(client(running).completions.create(model=name, **asked, extra_body={"ignore_eos": True}))
        for name in ("tiny", "wide")
    }
    begun = {name: next(stream) for name, stream in streams.items()}
    kill(running, 0)
    states = get(running, "/ready").json()
    assert states == {"status": "loading", "models": {"tiny": "loading", "wide": "ready", "encoder": "ready"}}
    assert get(running, "/health").status_code == 200
    refused = post(running, "/v1/completions", model="tiny", prompt="a")
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "loading")
    assert post(running, "/v1/completions", model="wide", prompt="a", max_tokens=2).status_code == 200
    assert [card.id for card in client(running).models.list()] == ["wide", "encoder"]
    assert begun["wide"] + "".join(streams["wide"]) == alone("wide", "The quick", 60)
    (folder / "go").touch()
    assert begun["tiny"] + "".join(streams["tiny"]) == alone("tiny", "The quick", 60)
    until_ready(running)


@pytest.mark.slow
def test_a_signal_ends_all_engines(running: Running):
    """Last: it stops the module's server. Streams of both models end first."""
    until_ready(running)
    pids = running.engine_pids()
    assert len(pids) == 3
    asked = {"prompt": "The quick", "max_tokens": 60, "stream": True, "extra_body": {"ignore_eos": True}}
    streams = [client(running).completions.create(model=name, **asked) for name in ("tiny", "wide")]
    for stream in streams:
        next(stream)
    running.process.send_signal(signal.SIGTERM)
    assert [list(stream)[-1].choices[0].finish_reason for stream in streams] == ["length", "length"]
    code, out, err = running.stop(0)
    assert (code, err) == (0, "") and "requests have 25 s to finish" in out
    assert "the engine of tiny died and is being restarted: the engine process was killed by SIGKILL" in out
    assert gone(pids) and not list(running.folder.iterdir())


def test_a_model_that_cannot_be_loaded_ends_the_start(folder: Path):
    with start(models={"tiny": {}, "none": {"path": str(folder / "none")}}) as starting:
        code, out, err = starting.stop(0)
    assert (code, out) == (1, "loading tiny, none\n") and err.startswith("CheckpointError: "), err


# -- without processes -------------------------------------------------------------------------------------------------


def test_names_are_the_last_parts_of_paths():
    assert model_names(["runs/a", "smollm2"], None) == ["a", "smollm2"]
    assert model_names(["runs/a", "runs/b"], "one,two") == ["one", "two"]
    assert model_names(["runs/a"], "one,two") == ["one,two"]
    with pytest.raises(
        ConfigError, match=r"runs/x/step-5 and runs/y/step-5 would both be called 'step-5'; .*step-5-1,"
    ):
        model_names(["runs/x/step-5", "runs/y/step-5"], None)
    with pytest.raises(ConfigError, match="has 1 name for 2 models"):
        model_names(["a", "b"], "one")


def test_upstreams_have_one_model():
    config = ServeConfig(port=0, upstreams=("http://127.0.0.1:1",))
    with pytest.raises(ConfigError, match="forwards requests for one model, not for 2"):
        serve({"a": None, "b": None}, config=config, device="cpu", announce=lambda _: None)


def test_engines_divide_what_their_device_has():
    """4 GPUs for 3 models of 1 rank; 2 GPUs for 3 models; 4 cores for 3 models of 2 replicas."""
    assert share_gpus([("0",), ("1",), ("2",), ("3",)], 3, 1) == [[Placement(gpus=(gpu,))] for gpu in "012"]
    first, second, third = share_gpus([("0",), ("1",)], 3, 1)
    assert first == [Placement(gpus=("0",), engines=2)] and third == [Placement(gpus=("0",), engines=1)]
    assert second == [Placement(gpus=("1",), engines=1)]
    two = share_gpus([("0", "1"), ("2", "3")], 2, 2)
    assert [[each.engines for each in model] for model in two] == [[2, 2], [1, 1]]
    placements, _ = place_engines(3, 1, Plan(), "cpu")
    assert [each.engines for model in placements for each in model] == [3, 3, 3]


def test_caches_are_allocated_in_turn_once_all_have_loaded():
    events: list[str] = []

    async def start(name: str, turn: Any, load_s: float) -> None:
        await asyncio.sleep(load_s)
        events.append(f"{name} loaded")
        await turn.wait()
        events.append(f"{name} allocates")
        await asyncio.sleep(0.01)
        events.append(f"{name} is ready")
        turn.end()

    async def run() -> None:
        turns = start_turns(["gpu 0", "gpu 1", "gpu 0"])
        names = zip("abc", turns, (0.0, 0.0, 0.05), strict=True)
        await asyncio.gather(*(start(*each) for each in names))
        await asyncio.wait_for(turns[0].wait(), 1)  # an engine that is started again

    asyncio.run(run())
    own = [event for event in events if not event.startswith("b")]
    assert own == ["a loaded", "c loaded", "a allocates", "a is ready", "c allocates", "c is ready"]
    assert events.index("b is ready") < events.index("c loaded"), "another device does not wait"
