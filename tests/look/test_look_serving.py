"""The viewer under a running server: behind its flag and the admin key, with the served weights and the live cache."""

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from colonnade.cli import main
from colonnade.config import ServeConfig
from colonnade.look.notebook import encode_state
from colonnade.look.recorder import record
from colonnade.look.tensors import Names
from colonnade.look.tiles import decode_tile
from colonnade.serve import Engine, SamplingParams
from colonnade.serve.look import EngineLook, answer_of, question
from tests.look.pictures import check_references
from tests.look.test_look_pages import TEXT
from tests.serve import tiny
from tests.serve.serving import Running, server

KEY = {"authorization": "Bearer secret"}


def ask(look: EngineLook, method: str, path: str, query: str = "", body: Any = None) -> tuple[int, Any]:
    raw = b"" if body is None else json.dumps(body).encode()
    wire = json.loads(json.dumps({"do": "look", "ids": ["1"], **question("tiny", method, path, query, raw)}))
    answer = answer_of(json.loads(json.dumps(look.reply(wire))))
    return answer.status, json.loads(answer.body) if answer.content_type == "application/json" else answer.body


def test_an_engine_answers_between_steps() -> None:
    """Recording in the middle of a generation changes nothing; the board is that of the pool."""
    model = tiny.model(dtype=torch.float32)
    config = ServeConfig(page_tokens=4, pages=64, token_budget=32)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    alone = Engine(model, tiny.tokenizer(), config).generate([TEXT], params)[0]
    engine = Engine(model, tiny.tokenizer(), config)
    look, tokens = EngineLook(engine, "tiny"), []
    key = engine.add(tiny.tokenizer().encode(TEXT), params)
    run = ""
    while engine.busy:
        tokens += [output.token for output in engine.step() if output.token is not None]
        run = ask(look, "POST", "record", body={"text": "The lazy dog sleeps on."})[1]["run"]
        status, board = ask(look, "GET", "scene", "page=cache")
        assert status == 200 and board["used"] == engine.scheduler.pool.used and board["pages"] == 64
        pages = [page for each in board["requests"] for page in each["pages"]]
        assert len(set(pages)) == len(pages) == board["used"] and not set(pages) & set(board["cached"])
    assert tokens == list(alone.token_ids) and key
    status, tile = ask(look, "GET", "tensor", f"run={run}&layer=1&head=2&name=out&parts=2")
    expected = record(model, tiny.tokenizer().encode("The lazy dog sleeps on."), [])
    assert np.abs(decode_tile(tile) - Names(expected, 1, 2).get("out")).max() < 1e-4
    model = ask(look, "GET", "model")[1]
    assert model["pages"][-1] == "cache" and model["model"] == "tiny"


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with server(page_tokens=4, pages=96, token_budget=64, look=True, admin_key="secret", api_key="user") as it:
        yield it


@pytest.mark.slow
def test_only_the_admin_key_opens_it(running: Running) -> None:
    for key in ({}, {"authorization": "Bearer user"}, {"authorization": "Bearer wrong"}):
        for path in ("model", "tensor?run=1&name=input", "scene?page=cache"):
            assert httpx.get(f"{running.url}/v1/look/{path}", headers=key, timeout=120).status_code == 403
    assert httpx.get(f"{running.url}/v1/look/model", headers=KEY, timeout=120).json()["layers"] == 2
    page = httpx.get(f"{running.url}/look/", timeout=120)
    assert page.status_code == 200 and "default-src 'none'" in page.headers["content-security-policy"]
    assert httpx.get(f"{running.url}/look", timeout=120).headers["location"] == "look/"
    assert httpx.get(f"{running.url}/look/../v1/models", timeout=120).status_code == 401
    bad = httpx.post(f"{running.url}/v1/look/record", headers=KEY, content=b"{", timeout=120)
    assert bad.status_code == 400 and "not JSON" in bad.json()["error"]["message"]


@pytest.mark.slow
def test_page_under_a_running_server(open_viewer: Callable[..., Any], running: Running, references: Path) -> None:
    viewer = open_viewer(f"{running.url}/look/")
    viewer.wait("Boolean(document.querySelector('#group-model input[type=password]'))")
    viewer.page.fill("#group-model input", "wrong")
    viewer.page.click("#group-model button")
    viewer.wait("document.querySelector('#group-model input').value === ''")  # it asks again, and says why
    refused = viewer.page.locator("#group-model [role=alert]")
    assert refused.inner_text() == "This is not the server's admin key. Try again."
    viewer.page.fill("#group-model input", "secret")
    viewer.page.click("#group-model button")
    viewer.wait("Boolean(document.getElementById('model-page'))")
    viewer.go(encode_state({"model": {"page": "head", "text": TEXT, "layer": 1, "head": 3}}))
    assert viewer.error == ""
    out = viewer.faces()["out"]
    names = Names(record(tiny.model(dtype=torch.float32), tiny.tokenizer().encode(TEXT), []), 1, 3)
    theirs = names.get("out")
    assert np.abs(out - theirs).max() <= 1e-3 * np.abs(theirs).max()

    def generate() -> None:
        body = {"model": "tiny", "prompt": TEXT, "max_tokens": 60, "ignore_eos": True}
        httpx.post(f"{running.url}/v1/completions", json=body, headers={"authorization": "Bearer user"}, timeout=120)

    requests = threading.Thread(target=generate)
    requests.start()
    viewer.go(encode_state({"model": {"page": "cache"}}))
    requests.join()
    assert viewer.error == "" and "pages of 4 tokens" in viewer.page.text_content("#board")
    assert viewer.page.inner_text("#group-model .quiet").startswith("tiny: 2 layers")
    viewer.page.click("#group-model button.main")  # reads the cache again: the request has ended
    viewer.wait("document.getElementById('board').textContent.includes('No request runs now')")
    check_references({"server_cache_light": viewer.shot()}, references)


@pytest.mark.long
def test_without_the_flag_there_is_nothing() -> None:
    with server(page_tokens=4, pages=96, admin_key="secret") as plain:
        assert httpx.get(f"{plain.url}/look/", timeout=120).status_code == 404
        assert httpx.get(f"{plain.url}/v1/look/model", headers=KEY, timeout=120).status_code == 404


def test_the_flag_needs_an_admin_key(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLONNADE_ADMIN_KEY", raising=False)
    with pytest.raises(SystemExit):
        main(["serve", "smollm2", "--serve.look"])
    assert "COLONNADE_ADMIN_KEY" in capsys.readouterr().err
