"""The viewer's pages of a model in Chromium: each result equals torch's."""

import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import colonnade
from colonnade.api import Model
from colonnade.config import LORA_TARGETS, Plan, ServeConfig
from colonnade.look.app import LookApp
from colonnade.look.group import Leader, follow
from colonnade.look.notebook import encode_state, make_app, serve
from colonnade.look.recorder import Recording, record
from colonnade.look.tensors import Names
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.serve import Engine, SamplingParams
from colonnade.serve.look import cache_board
from tests.look.accessibility import check_contrast, unnamed_controls
from tests.look.conftest import Site, Viewer
from tests.look.pictures import check_references
from tests.look.test_look_pages import MODELS, TEXT, adapted
from tests.models import build
from tests.serve import tiny
from tests.worlds import run as in_world

Open = Callable[..., Any]
Show = Callable[[LookApp, str], Viewer]


class Recorded:
    """An app that keeps its recording for the test."""

    def __init__(self, name: str, **options: Any):
        self.model = build(MODELS[name], dtype=torch.float32)
        self.app = LookApp(name, self.model.config, tiny.tokenizer(), self._record, **options)

    def _record(self, tokens: list[int], pieces: list[str]) -> Recording:
        self.recording = record(self.model, tokens, pieces)
        return self.recording


def close(mine: np.ndarray, theirs: np.ndarray) -> None:
    assert mine.shape == theirs.shape
    assert np.abs(mine - theirs).max() <= 1e-3 * np.abs(theirs).max()


def link(page: str, layer: int = 1, head: int = 1) -> str:
    return encode_state({"model": {"page": page, "text": TEXT, "layer": layer, "head": head, "rank": 3}})


CASES = [
    "gpt2",
    "llama_grouped_biased",
    "capacity",
    "latent",
    pytest.param("qwen3_window_tied", marks=pytest.mark.slow),
]


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", CASES)
def test_result_faces_equal_torch(model_viewer: Show, name: str) -> None:
    made = Recorded(name)
    viewer = model_viewer(made.app, link("head"))
    assert viewer.error == ""
    names, found = Names(made.recording, 1, 1), viewer.faces()
    close(found["out"], names.get("out"))
    close(found["attn"], names.attention(1).numpy())
    close(found["Q"], names.get("Q_recorded"))
    close(found["K_t"], names.get("K_t_recorded"))
    for page, key, reference in (
        ("decode", "out", names.get("out")[-1:]),
        ("layer", "mha", names.get("attention_out")),
    ):
        viewer.go(link(page))
        assert viewer.error == ""
        close(viewer.faces()[key], reference)
    if made.model.config.moe is None:
        close(viewer.faces()["ffn"], names.get("ffn_out"))
    else:
        e = int(made.recording.layers[1]["kept_ids"][0, 0])
        viewer.go(link("experts", 1, e))
        x = Names(made.recording, 1, e)
        gated = torch.nn.functional.silu(torch.tensor(x.get("expert_in") @ x.get("expert_gate"))).numpy()
        close(viewer.faces()["y"], gated * (x.get("expert_in") @ x.get("expert_up")) @ x.get("expert_down"))
    viewer.go(link("lora"))
    found = viewer.faces()
    u, s, v = np.linalg.svd(names.get("wQ").astype(float), full_matrices=False)
    close(found["wQ"], (u[:, :3] * s[:3]) @ v[:3])


@pytest.mark.slow
def test_numbers_name_their_tokens(model_viewer: Show) -> None:
    """The page starts near the attention; its numbers name both tokens, and those of weights none."""
    made = Recorded("capacity")
    viewer = model_viewer(made.app, link("head"))
    pieces = made.recording.pieces
    assert viewer.page.text_content("#near").startswith(
        "attn, 28 × 28: Q times K_t, then causal scaled softmax (keys: "
    )
    width, height = viewer.run("[document.getElementById('stage').clientWidth, innerHeight]")
    corners = viewer.run("[[0, 0], [0, 27], [27, 0], [27, 27]].map(([i, j]) => colonnade.project('attn', i, j))")
    assert all(0 < x < width and 0 < y < height for x, y in corners)
    (left, *_), *_, (right, *_) = sorted(corners)
    assert right - left > width / 4

    def said(key: str, i: int, j: int) -> str:
        viewer.run("document.getElementById('group-inspect').open = true")
        viewer.page.select_option("#inspect-matrix", key)
        viewer.page.fill("#inspect-row", str(i))
        viewer.page.fill("#inspect-col", str(j))
        viewer.page.press("#inspect-col", "Enter")
        text = viewer.page.text_content("#value")
        assert text.startswith(f"{key} [{i}, {j}] = ")
        return text.partition(" = ")[2].partition("  ")[2]

    assert said("attn", 7, 2) == f"query “{pieces[7]}” → key “{pieces[2]}”"
    assert said("input", 3, 0) == said("Q", 3, 0) == said("K_t", 0, 3) == f"token “{pieces[3]}”"
    assert said("wQ", 3, 0) == said("wO", 1, 1) == ""
    viewer.go(link("decode"))
    assert said("attn", 0, 2) == f"query “{pieces[-1]}” → key “{pieces[2]}”"
    e = int(made.recording.layers[1]["kept_ids"][-1, 0])
    viewer.go(link("experts", 1, e))
    rows = Names(made.recording, 1, e).rows_of_expert().tolist()
    assert said("h", len(rows) - 1, 0) == f"token “{pieces[rows[-1]]}”"
    assert said("up", 1, 0) == ""
    words = viewer.page.text_content("#description")
    assert "then silu" in words and "each element times that of gated" in words
    assert "dropped by the expert's capacity" in viewer.page.text_content("#note")


@pytest.mark.slow
def test_every_page_is_reachable_and_described(open_viewer: Open, site: Site) -> None:
    made = Recorded("experts")
    site.app = made.app
    try:
        viewer = open_viewer(site.url)
        viewer.wait("Boolean(document.getElementById('model-page'))")
        pages = viewer.run("[...document.getElementById('model-page').options].map(o => o.value).filter(Boolean)")
        assert pages == ["head", "heads", "layer", "experts", "decode", "lora", "routing"]
        seen = set()
        for page in pages:
            viewer.page.select_option("#model-page", page)
            viewer.wait(f"colonnade.state().model.page === '{page}' && Boolean(document.documentElement.dataset.ready)")
            assert viewer.error == "", page
            seen.add(viewer.page.text_content("#description"))
        assert len(seen) == len(pages) and all(len(words) > 20 for words in seen)
        # The board of heads: each picture is a link to the head in space.
        viewer.go(link("heads"))
        assert viewer.run("document.querySelectorAll('#board .heads a').length") == 2 * 6
        viewer.page.click("#board a[title='layer 1, head 4']")
        viewer.wait("colonnade.state().title === 'Layer 1, head 4' && Boolean(document.documentElement.dataset.ready)")
        # Hovering names both tokens of a score.
        x, y = viewer.run("colonnade.project('attn', 12, 3)")
        viewer.page.mouse.move(x, y)
        pieces = made.recording.pieces
        assert viewer.page.text_content("#value").endswith(f"query “{pieces[12]}” → key “{pieces[3]}”")
        # The link is short, and restores the page.
        link_of_head = viewer.run("location.hash.slice(1)")
        assert len(link_of_head) < 500
        viewer.open(link_of_head)
        assert viewer.state["title"] == "Layer 1, head 4"
        assert viewer.page.inner_text("#group-model .quiet").startswith("experts: 2 layers, 6 heads, 4 experts")
    finally:
        site.app = None


@pytest.mark.slow
def test_routing_page(model_viewer: Show) -> None:
    """Loads, drops by capacity, ranks of a plan, and the steps of a run."""
    history = {
        "1": {"step": [10, 20], "load": [[4, 4, 0, 0], [2, 2, 2, 2]], "dropped": [2, 0], "entropy": [0.69, 1.39]}
    }
    made = Recorded("capacity", history=history)
    page = encode_state({"model": {"page": "routing", "text": TEXT}, "plan": {"ep": 2}})
    viewer = model_viewer(made.app, page)
    tables = viewer.run(
        """[...document.querySelectorAll('#board table')].map(table =>
          [...table.rows].slice(1).map(row => [...row.cells].map(cell => Number.parseFloat(cell.textContent))))"""
    )
    words = viewer.page.text_content("#description")
    for layer, rows in enumerate(tables):
        ids, kept = (made.recording.layers[layer][name] for name in ("choice_ids", "kept_ids"))
        load = ids.flatten().bincount(minlength=4).tolist()
        assert [row[:3] for row in rows] == [[e, e // 2, load[e]] for e in range(4)]
        assert [row[4] for row in rows] == kept[kept < 4].bincount(minlength=4).tolist()
        dropped = int((ids != kept).sum())
        assert dropped > 0 and f"{dropped} of {ids.numel()} choices dropped" in words
        assert f"load by rank: 0: {100 * sum(load[:2]) / sum(load):.1f}%" in words
    titles = viewer.run("[...document.querySelectorAll('#board h3')].map(it => it.textContent)")
    assert [title.startswith("Over training, steps 10 to 20") for title in titles] == [False] * 4 + [True]
    captions = viewer.page.text_content("#board")
    assert "dropped, at most 25.0% of the choices" in captions and "entropy 0.69 to 1.39 of 1.39 nats" in captions
    below, above = (viewer.page.locator(each).bounding_box() for each in ("#board", "#caption"))
    assert below["y"] >= above["y"] + above["height"]
    note = viewer.page.text_content("#note")
    assert "an expert takes at most 2 x int(1 x 7) = 14 choices, where 7 is 28 tokens / 4 experts, rounded up" in note


@pytest.mark.slow
def test_an_adapter_in_the_page(model_viewer: Show, tmp_path: Path) -> None:
    with adapted(tmp_path, "llama_grouped_biased", LORA_TARGETS) as model:
        viewer = model_viewer(make_app(model), link("lora", 1, 7))
        found = viewer.faces()
        names = Names(record(model.transformer, tiny.tokenizer().encode(TEXT), []), 1, 7)
        close(found["out"], names.get("out"))
        close(found["ffn"], names.get("ffn_out"))
        close(found["wQ"], names.get("wQ"))
        assert found["wQ_A"].shape == (24, 3) and "adapter of rank 3" in viewer.page.text_content("#title")
        words = viewer.page.text_content("#description")
        assert re.search(r"wQ \(24 × \d+\) is wQ_A \(24 × 3\) times wQ_B \(3 × \d+\), plus wQ_base \(24 × \d+\)", words)


def busy_engine() -> Engine:
    """An engine with three requests, two of which share pages, and cached pages of a request that has ended."""
    engine = Engine(tiny.model(), tiny.tokenizer(), ServeConfig(page_tokens=4, pages=64, token_budget=64))
    engine.generate(["Now is the time for all good men."], SamplingParams(max_tokens=4, ignore_eos=True))
    for text in (TEXT, TEXT[:20], "We the people of the United States"):
        engine.add(tiny.tokenizer().encode(text), SamplingParams(max_tokens=40, ignore_eos=True))
    for _ in range(12):
        engine.step()
    return engine


@pytest.mark.slow
def test_model_pages_look_as_their_references(model_viewer: Show, references: Path, tmp_path: Path) -> None:
    """Each page in both themes, with texts that contrast and controls that have names."""
    engine = busy_engine()
    made = Recorded("capacity", cache=lambda: cache_board(engine))
    shots: dict[str, bytes] = {}
    for page in ("head", "heads", "layer", "experts", "decode", "lora", "routing", "cache"):
        for theme in ("light", "dark"):
            model = {"page": page, "text": TEXT, "layer": 1, "head": 1, "rank": 3}
            viewer = model_viewer(made.app, encode_state({"model": model, "theme": theme}))
            assert viewer.error == ""
            shots[f"model_{page}_{theme}"] = viewer.shot()
            assert check_contrast(viewer) > 10 and unnamed_controls(viewer) == []
    used = f"{engine.scheduler.pool.used} of 64 pages of 4 tokens are in use"
    assert used in viewer.page.text_content("#description")
    rows = viewer.run("[...document.querySelectorAll('#board tbody tr')].map(row => row.cells[2].textContent)")
    assert [int(row) for row in rows] == [len(each.pages) for each in engine.scheduler.running] and len(rows) == 3
    with adapted(tmp_path, "llama_grouped_biased", ("q", "v")) as model:
        viewer = model_viewer(make_app(model), link("lora", 1, 1))
        shots["model_adapter_light"] = viewer.shot()
    check_references(shots, references)


def test_bad_texts_show_an_error(model_viewer: Show) -> None:
    app = Recorded("llama").app
    for model, message in (
        ({"page": "head", "text": "fox " * 4000}, "send 2 to"), ({"page": "head", "layer": 99}, "no layer 99"),
        ({"page": "routing"}, "no experts"), ({"page": "cache"}, "running server"),
    ):  # fmt: skip
        assert message in model_viewer(app, encode_state({"model": model})).error


def _lead(path: str, texts: list[str]) -> list[Recording] | None:
    plan = Plan(tp=2)
    with DistributedContext.build(plan) as context, colonnade.load(path, context=context) as loaded:
        if loaded.context.rank:
            follow(loaded.transformer, plan)
            return None
        leader = Leader(loaded.transformer, plan)
        leader.heartbeat()
        encoded = [loaded.tokenizer.encode(text) for text in texts]
        found = [leader.record(tokens, [loaded.tokenizer.decode([t]) for t in tokens]) for tokens in encoded]
        leader.stop()
        return found


TEXTS = [TEXT, "My fellow citizens, " * 3]


def on_two_ranks(name: str, folder: Path) -> list[Recording]:
    model = build(MODELS[name], dtype=torch.float32)
    colonnade.save(Model(model, tiny.tokenizer(), DistributedContext.solo(), name), folder / "model")
    return in_world(2, _lead, str(folder / "model"), TEXTS)[0]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Recording]:
    return on_two_ranks("llama_grouped_biased", tmp_path_factory.mktemp("ranks"))


def check_gathered(name: str, both: list[Recording]) -> None:
    model = build(MODELS[name], dtype=torch.float32)
    for text, theirs in zip(TEXTS, both, strict=True):
        alone = record(model, tiny.tokenizer().encode(text), [])
        for layer in range(model.config.layers):
            for head in (0, model.config.heads - 1):
                a, b = Names(alone, layer, head), Names(theirs, layer, head)
                assert set(a._makers) == set(b._makers)
                for each in a._makers:
                    close(b.get(each), a.get(each))


@pytest.mark.slow
def test_two_ranks_gather_heads_and_hidden_units(two_ranks: list[Recording]) -> None:
    check_gathered("llama_grouped_biased", two_ranks)


@pytest.mark.long
@pytest.mark.parametrize("name", ["gpt2", "latent", "qwen3_window_tied", "capacity"])
def test_two_ranks_of_other_models(tmp_path: Path, name: str) -> None:
    check_gathered(name, on_two_ranks(name, tmp_path))


@pytest.mark.slow
def test_two_ranks_in_the_page(model_viewer: Show, two_ranks: list[Recording]) -> None:
    model = build(MODELS["llama_grouped_biased"], dtype=torch.float32)
    app = LookApp("two ranks", model.config, tiny.tokenizer(), lambda tokens, pieces: two_ranks[0], plan="tp=2")
    alone = Names(record(model, tiny.tokenizer().encode(TEXT), []), 1, 23)
    viewer = model_viewer(app, link("head", 1, 23))
    close(viewer.faces()["out"], alone.get("out"))
    assert "tensor-parallel rank 1" in viewer.page.text_content("#note")
    assert viewer.state["plan"] == {"tp": 2}
    viewer.go(link("head", 1, 0))  # a head of the other rank
    close(viewer.faces()["out"], Names(record(model, tiny.tokenizer().encode(TEXT), []), 1, 0).get("out"))
    assert "tensor-parallel rank 0" in viewer.page.text_content("#note")
    viewer.go(link("layer", 1, 0))
    close(viewer.faces()["ffn"], alone.get("ffn_out"))
    assert "summed over 2 ranks" in viewer.page.text_content("#description")


@contextmanager
def notebook_page(text: str) -> Iterator[str]:
    """A page of another server on this machine, as Jupyter's is."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as other:
        thread = threading.Thread(target=other.serve_forever)
        thread.start()
        yield f"http://localhost:{other.server_address[1]}/"
        other.shutdown()
        thread.join()


@pytest.mark.slow
def test_look_notebook(open_viewer: Open) -> None:
    model = Model(build(MODELS["llama"], dtype=torch.float32), tiny.tokenizer(), DistributedContext.solo(), "tiny")
    with serve(model) as server:
        frame = server.head(TEXT, layer=1, head=2)
        assert f'src="{frame.url}"' in frame._repr_html_()
        viewer = open_viewer(server.url, frame.url.partition("#")[2])
        assert viewer.error == "" and viewer.state["title"] == "Layer 1, head 2"
        plain = server.expression(
            "C = A @ B", A=(3, 4), B={"rows": 4, "cols": 5, "init": "identity"}, state={"anim": "rows"}
        )
        viewer.go(plain.url.partition("#")[2])
        assert viewer.error == "" and viewer.faces()["C"].shape == (3, 5)
        whole = f"<!doctype html><p>notebook</p>{frame._repr_html_()}"
        viewer.page.route("**/*", lambda route: route.continue_())
        with notebook_page(whole) as notebook:
            viewer.page.goto(notebook)
            frames = viewer.page.frames
            assert len(frames) == 2
            for _ in range(2400):
                if frames[1].evaluate("document.getElementById('title')?.textContent") == "Layer 1, head 2":
                    break
                viewer.page.wait_for_timeout(50)
            else:
                raise AssertionError("the frame does not show the head")


def test_notebook_refuses_what_does_not_fit() -> None:
    with serve() as server:
        with pytest.raises(colonnade.errors.ConfigError, match="no matrix 'D'"):
            server.expression("A @ B", A=(2, 3), B=(3, 4), D=(1, 1))
        with pytest.raises(colonnade.errors.ConfigError, match="3 columns need 3 rows"):
            server.expression("A @ B", A=(2, 3), B=(4, 4))
        with pytest.raises(colonnade.errors.ConfigError, match="has no model"):
            server.head("text")
        state = {"expr": "A @ B", "leaves": {f"n{i}": {"rows": 1, "cols": 1} for i in range(90)}}
        assert server.view(state).url.partition("#")[2].startswith("z")
        assert json.dumps(state) not in server.view(state).url
