"""The viewer in headless Chromium, without a model: tour, clicks, keyboard, touch, links, looks."""

import base64
import json
import random
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from colonnade.look.expression import parse
from colonnade.look.notebook import encode_state
from colonnade.look.values import EPILOGUES, INITS, evaluate
from tests.look.accessibility import check_contrast, unnamed_controls
from tests.look.conftest import VIEWPORT, Viewer, viewers
from tests.look.pictures import check_references, difference, reduced

WIDE = {"rows": 40, "cols": 90}
FLAT = {"A": {"rows": 6, "cols": 80}, "B": {"rows": 80, "cols": 6}}
HEAD = "out = (attn = (Q = input @ wQ) @ (K_t = wK_t @ input_t)) @ (V = input @ wV) @ wO"


def check_labels(viewer: Viewer) -> None:
    """No label covers another."""
    labels = viewer.run("colonnade.labels()")
    for i, a in enumerate(labels):
        for b in labels[i + 1 :]:
            apart = any(a[x] + a[w] <= b[x] or b[x] + b[w] <= a[x] for x, w in (("x", "width"), ("y", "height")))
            assert apart, (viewer.state["title"], a, b)


@pytest.mark.slow
def test_the_tour_leads_from_a_product_to_a_sharded_head(viewer: Viewer, references: Path) -> None:
    """One click per step; each looks like its reference, and has its own words."""
    viewer.go("")
    assert viewer.page.text_content("#title") == "A product is a box"
    titles, words, shots = [], set(), {}
    for step in range(8):
        assert f"{step + 1} of 8" in viewer.page.text_content("#tour")
        titles.append(viewer.page.text_content("#title"))
        assert viewer.error == ""
        words.add(viewer.page.text_content("#description"))
        shots[f"tour{step}"] = viewer.shot()
        check_labels(viewer)
        if step < 7:
            viewer.page.click("#tour a[rel=next]")
            viewer.wait(f"colonnade.state().tour === {step + 2} && Boolean(document.documentElement.dataset.ready)")
    assert len(set(titles)) == len(words) == 8 and "experts" in titles[-1]
    viewer.page.click("#tour button")
    viewer.wait("document.getElementById('tour').hidden")
    check_references(shots, references)


SHOTS = (0, 4, 7, 8, 11, 12, 13, 15, 16, 17, 18, 19)
"""Examples with a reference, light and dark in turns."""


@pytest.mark.slow
def test_examples_equal_numpy_and_look_as_their_references(viewer: Viewer, references: Path) -> None:
    viewer.go("")
    links = viewer.run(
        "[...document.querySelectorAll('#group-examples li a')].map(a => a.getAttribute('href').slice(1))"
    )
    assert len(links) > 15
    shots = {}
    for at, link in enumerate(links):
        theme = ("light", "dark")[at in SHOTS and SHOTS.index(at) % 2]
        looks = {"theme": theme, "cursor": 10**6}
        script = "async ([at, looks]) => await colonnade.encode({...colonnade.examples[at].state, ...looks})"
        viewer.go(viewer.run(script, [at, looks]) if at in SHOTS else link)
        assert viewer.error == ""
        if at in SHOTS:
            shots[f"example{at}_{theme}"] = viewer.shot()
            check_labels(viewer)
        state, faces = viewer.state, viewer.faces()
        for key, mine in evaluate(parse(state["expr"]), state["leaves"], state["nodes"]).items():
            assert np.abs(mine - faces[key]).max() <= 1e-3 * max(1, np.abs(mine).max()), (state["title"], key)
        words = viewer.page.text_content("#description")
        assert all(name in words for name in state["leaves"] if name != "context" or name in state["expr"])
    check_references(shots, references)


def test_typing_an_expression(viewer: Viewer) -> None:
    viewer.go("")
    viewer.page.click("#group-expression summary")
    viewer.page.fill("#expression", "y = (h = x @ up) @ down")
    viewer.page.click("#group-expression button")
    viewer.wait("colonnade.state().expr.startsWith('y') && Boolean(document.documentElement.dataset.ready)")
    assert viewer.error == "" and set(viewer.faces()) == {"x", "up", "down", "h", "y"}
    viewer.page.fill("#expression", "y = x @ @ up")
    viewer.page.click("#group-expression button")
    assert "expected a name or '(', not '@'" in viewer.error and "character 8" in viewer.error
    viewer.page.click("#group-matrices summary")
    viewer.page.fill("#leaf-x-rows", "7")
    viewer.page.press("#leaf-x-rows", "Enter")
    viewer.wait("colonnade.state().leaves.x.rows === 7")
    viewer.page.click("#group-matrices summary")
    viewer.page.click("#group-expression summary")


def test_keyboard(viewer: Viewer) -> None:
    viewer.go(encode_state({"anim": "rows"}))
    viewer.page.focus("#canvas")
    before = viewer.run("colonnade.camera()")
    for key in ("ArrowLeft", "ArrowUp", "+", "d", "w"):
        viewer.page.keyboard.press(key)
    after = viewer.run("colonnade.camera()")
    assert all(abs(a - b) > 1e-3 for a, b in zip(before[:3], after[:3], strict=True))
    viewer.page.keyboard.press(".")
    viewer.page.keyboard.press(".")
    viewer.page.keyboard.press(",")
    assert viewer.run("colonnade.cursor()") == 1
    viewer.page.keyboard.press(" ")
    assert viewer.state["playing"]
    viewer.wait("colonnade.cursor() > 2")
    viewer.page.keyboard.press(" ")
    assert not viewer.state["playing"]
    viewer.page.keyboard.press("g")
    viewer.wait("!colonnade.state().guides")
    viewer.page.keyboard.press("0")
    assert np.allclose(viewer.run("colonnade.camera()"), before, atol=1e-3)


@pytest.mark.slow
def test_every_control_is_reached_with_tab(viewer: Viewer) -> None:
    viewer.go(encode_state({"anim": "rows", "tour": 1}))
    viewer.run("document.querySelectorAll('details').forEach(each => each.open = true)")
    assert unnamed_controls(viewer) == []
    assert viewer.run("document.getElementById('canvas').getAttribute('aria-describedby')") == "description"
    controls = """[...document.querySelectorAll('a, summary, button, input, select, textarea, canvas')]
        .filter(each => each.getClientRects().length)"""
    count = viewer.run(f"{controls}.length")
    viewer.run("document.activeElement.blur()")
    reached = set()
    for _ in range(count + 1):
        viewer.page.keyboard.press("Tab")
        reached.add(viewer.run(f"{controls}.indexOf(document.activeElement)"))
    assert reached >= set(range(count)) and count > 40
    viewer.run("document.querySelectorAll('#panel details details').forEach(each => each.open = false)")


def test_a_number_is_looked_up(viewer: Viewer) -> None:
    """The camera goes to it, and its caption stays with it."""
    viewer.go(encode_state({"expr": "C = L @ R", "leaves": {"L": WIDE, "R": {"rows": 90, "cols": 70}}}))
    before = viewer.run("colonnade.camera()")
    viewer.run("document.getElementById('group-inspect').open = true")
    options = viewer.run("[...document.getElementById('inspect-matrix').options].map(each => each.text)")
    assert options == ["L", "R", "C"]
    viewer.page.select_option("#inspect-matrix", "C")
    viewer.page.fill("#inspect-row", "3")
    viewer.page.fill("#inspect-col", "65")
    viewer.page.press("#inspect-col", "Enter")
    shown = float(viewer.page.text_content("#inspect-value"))
    assert shown == pytest.approx(viewer.run("colonnade.value('C', 3, 65)"), rel=1e-4)
    assert viewer.page.text_content("#value").startswith("C [3, 65] = ")

    def beside() -> None:
        x, y = viewer.run("colonnade.project('C', 3, 65)")
        box = viewer.page.locator("#value").bounding_box()
        assert abs(box["x"] - (x + 14)) < 3 and abs(box["y"] - (y - 34)) < 3

    assert viewer.run("colonnade.camera()")[2] < 0.6 * before[2]
    x, y = viewer.run("colonnade.project('C', 3, 65)")
    assert 0 < x < viewer.run("document.getElementById('stage').clientWidth") and 0 < y < VIEWPORT["height"]
    beside()
    viewer.page.focus("#canvas")
    for _ in range(3):
        viewer.page.keyboard.press("ArrowRight")
    viewer.run("new Promise(requestAnimationFrame)")
    moved = viewer.run("colonnade.project('C', 3, 65)")
    assert abs(moved[0] - x) + abs(moved[1] - y) > 5
    beside()
    viewer.page.keyboard.press("Escape")
    assert not viewer.page.is_visible("#value")
    viewer.page.fill("#inspect-row", "999")
    viewer.page.press("#inspect-row", "Enter")
    assert viewer.page.text_content("#inspect-value") == "outside of the matrix"


def test_products_without_a_name_are_shown_by_their_arguments(viewer: Viewer) -> None:
    side = {"rows": 4, "cols": 4}
    viewer.go(encode_state({"expr": "A @ B @ C", "leaves": {"A": side, "B": side, "C": side}}))
    assert viewer.run("[...document.querySelectorAll('#group-goto button')].map(each => each.textContent)") == [
        "Whole scene", "A", "B", "C", "A @ B", "A @ B @ C"
    ]  # fmt: skip
    assert "@0" not in viewer.page.inner_text("body")
    viewer.page.click("#group-goto button >> text='A @ B'")
    assert viewer.page.text_content("#near") == "A @ B, 4 × 4: A times B"


def test_pointer_and_touch(viewer: Viewer) -> None:
    link = encode_state({"expr": "C = L @ R", "leaves": {"L": {"rows": 16, "cols": 20}, "R": {"rows": 20, "cols": 16}}})
    viewer.go(link)
    x, y = viewer.run("colonnade.project('L', 5, 3)")
    viewer.page.mouse.move(x, y)
    assert viewer.page.text_content("#value").startswith("L [5, 3] = ")
    before = viewer.run("colonnade.camera()")
    viewer.page.mouse.down()
    viewer.page.mouse.move(x + 120, y + 40, steps=4)
    viewer.page.mouse.up()
    after = viewer.run("colonnade.camera()")
    assert abs(before[0] - after[0]) > 0.05
    viewer.page.mouse.wheel(0, 400)
    viewer.wait(f"Math.abs(colonnade.camera()[2] - {after[2]}) > 0.01")
    viewer.page.keyboard.press("Escape")
    x, y = viewer.run("colonnade.project('L', 9, 4)")
    viewer.page.touchscreen.tap(x, y)
    viewer.wait("document.getElementById('value').textContent.startsWith('L [9, 4] = ')")


def _random_state(random: random.Random) -> dict[str, Any]:
    def matrix() -> dict[str, Any]:
        return {
            "rows": random.randint(1, 300), "cols": random.randint(1, 300), "init": random.choice(INITS),
            "low": random.uniform(-2, 0), "sparsity": random.random(), "seed": random.randint(0, 99),
        }  # fmt: skip

    return {
        "expr": random.choice(["A @ B", HEAD, "é <b> & \" ' 𝔸 #?%", ""]),
        "leaves": {f"n{i}": matrix() for i in range(random.randint(0, 12))},
        "nodes": {
            f"@0{'L' * i}": {"epilogue": random.choice(EPILOGUES), "i": 1 + i} for i in range(random.randint(0, 5))
        },
        "places": {"Q": {name: random.randint(0, 1) for name in ("polarity", "left", "right", "result")}},
        "letters": {"A": random.choice([["T", "D"], ["", "S"]])},
        "plan": {"tp": random.randint(1, 8), "cp": random.randint(1, 8)},
        "title": random.choice(["", "T — ünï"]), "note": random.choice(["", "<script>"]),
        "model": {
            "page": random.choice(["", "head", "cache"]), "text": random.choice(["", "text\n"]),
            "layer": random.randint(0, 30), "head": random.randint(0, 30), "rank": random.randint(1, 64),
        },
        "scheme": random.choice(["blocks", "zigzag", "wheel"]), "gap": random.uniform(1, 60),
        "scatter": random.uniform(0, 50), "anim": random.choice(["none", "rows", "outer"]),
        "fuse": random.random() < 0.5, "speed": random.uniform(0.1, 50), "cursor": random.randint(0, 10**6),
        "playing": random.random() < 0.5, "sensitivity": random.choice(["local", "mixed", "global"]),
        "colour": random.choice(["sign", "rank"]), "size": random.uniform(0.2, 3), "guides": random.random() < 0.5,
        "legends": random.random() < 0.5, "theme": random.choice(["auto", "light", "dark"]),
        "camera": [random.uniform(-3, 3) for _ in range(6)], "focus": random.choice(["", "*", "attn"]),
        "tour": random.randint(0, 8),
    }  # fmt: skip


@pytest.mark.parametrize("count", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_links_of_random_states(viewer: Viewer, count: int) -> None:
    generator = random.Random(count)
    states = [_random_state(generator) for _ in range(count)]
    assert set(states[0]) == set(viewer.state)  # every setting
    different = viewer.run(
        """async (states) => {
          const same = async each => {
            const state = colonnade.checked(each);
            const back = await colonnade.decode(await colonnade.encode(state));
            return JSON.stringify(back) === JSON.stringify(state);
          };
          const all = await Promise.all(states.map(same));
          return states.filter((_, at) => !all[at]);
        }""",
        states,
    )
    assert different == []
    # Links made in Python are the same states.
    links = [encode_state(state) for state in states[:50]]
    decoded = viewer.run("async (links) => await Promise.all(links.map(link => colonnade.decode(link)))", links)
    for state, back in zip(states, decoded, strict=False):
        assert back.items() >= state.items()


def test_a_link_restores_the_exact_view(viewer: Viewer) -> None:
    state = {
        "expr": "C = A @ B",
        "leaves": {"A": {"rows": 9, "cols": 5}, "B": {"rows": 5, "cols": 8}},
        "anim": "rows",
        "cursor": 4,
        "camera": [1.1, 0.3, 3.2, 0.1, 0.05, -0.1],
        "theme": "dark",
        "sensitivity": "global",
    }
    viewer.go(encode_state(state))
    assert viewer.state.items() >= state.items()
    assert np.allclose(viewer.run("colonnade.camera()"), state["camera"], atol=2e-3)
    viewer.page.focus("#canvas")
    viewer.page.keyboard.press("ArrowLeft")
    viewer.wait("location.hash.length > 1 && Math.abs(colonnade.state().camera[0] - 1) < 0.01")
    link = viewer.run("new Promise(done => setTimeout(() => done(location.hash.slice(1)), 400))")
    viewer.run("document.activeElement.blur()")  # its outline is no part of the view
    first = viewer.shot()
    viewer.open(link)
    assert difference(reduced(first), reduced(viewer.shot())) < 0.5


def _link(value: Any) -> str:
    return "j" + base64.urlsafe_b64encode(json.dumps(value).encode()).decode().rstrip("=")


def _bomb() -> str:
    deflate = zlib.compressobj(9, wbits=-15)
    return "z" + base64.urlsafe_b64encode(deflate.compress(b" " * 10**7) + deflate.flush()).decode().rstrip("=")


HUGE = {"A": {"rows": 8192, "cols": 8192}, "B": {"rows": 8192, "cols": 8192}}
SMALL = {"rows": 4, "cols": 4}


@pytest.mark.parametrize(
    ("link", "message"),
    [
        ("x", "neither j nor z"),
        ("j!!", "base64url"),
        (_bomb(), "more than"),
        (_link([1]), "table"),
        (_link({"expr": "(" * 4000}), "nest at most 32"),
        (_link({"expr": "A @ " * 1023 + "A"}), "at most 64 products"),
        (_link({"expr": "A @ B", "leaves": HUGE}), "elements"),
        (_link({"leaves": {"A": {"rows": 10**9, "cols": 1}}}), "rows"),
        (_link({"expr": "<img src=x onerror=alert(1)>"}), "unexpected '<'"),
        (_link({"expr": "constructor @ __proto__", "leaves": {}}), "has no size"),
        (
            _link(
                {
                    "expr": "A",
                    "leaves": {"A": SMALL | {"tensor": {"run": "../../admin", "layer": 0, "head": 0, "name": "x"}}},
                }
            ),
            "no such page",
        ),
        (_link({"model": {"page": "head", "text": "hello"}}), "no such page"),
        (_link({"onload": "alert(1)"}), "known setting"),
        (_link({"camera": [None] * 6}), "number"),
        (_link({"speed": float("inf")}), "JSON"),
    ],
    ids=lambda value: value[:16],
)
def test_hostile_links(viewer: Viewer, link: str, message: str) -> None:
    """An error and no more: the page goes on."""
    viewer.go(link)
    assert message in viewer.error
    viewer.go(encode_state({"expr": "C = A @ B", "leaves": {"A": SMALL, "B": SMALL}}))
    assert viewer.error == "" and set(viewer.faces()) == {"A", "B", "C"}


@pytest.mark.slow
def test_a_hostile_link_as_the_first_page(viewer: Viewer) -> None:
    viewer.open(_link({"expr": "A @ B", "leaves": HUGE}))
    assert "elements" in viewer.error
    viewer.page.click("#start-tour")
    viewer.wait("document.getElementById('error').hidden && colonnade.state().tour === 1")
    viewer.ready()
    # What is named as markup stays text.
    viewer.go(_link({"title": "<img src=x onerror=document.title='owned'>", "note": "<script>1</script>"}))
    assert viewer.run("document.querySelectorAll('#stage img, #stage script').length") == 0
    assert "<img" in viewer.page.text_content("#title") and viewer.page.title() == "Inside the matrix"


def test_reduced_motion(viewer: Viewer) -> None:
    link = encode_state({"anim": "rows", "playing": True, "speed": 20})
    viewer.go(link)
    assert not viewer.state["playing"] and viewer.run("colonnade.cursor()") == 0
    viewer.page.emulate_media(reduced_motion="no-preference")
    try:
        viewer.go(link)
        viewer.wait("colonnade.cursor() > 0")
    finally:
        viewer.page.emulate_media(reduced_motion="reduce")
    viewer.wait("!colonnade.state().playing")  # the setting of the system stops what plays


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_has_contrast(viewer: Viewer, theme: str) -> None:
    viewer.go(encode_state({"theme": theme, "tour": 1, "note": "A note", "anim": "rows"}))
    assert check_contrast(viewer) > 20


@pytest.mark.slow
def test_a_request_elsewhere_is_a_failure(browser: Any, site: Any) -> None:
    """The page's policy blocks it, and the fixtures of these tests see it."""

    def ask_elsewhere() -> None:
        with viewers(browser) as make:
            asked = "fetch('http://192.0.2.1/').then(() => 'sent', () => 'blocked')"
            assert make(site.url).run(asked) == "blocked"

    with pytest.raises(AssertionError, match="Content Security Policy"):
        ask_elsewhere()


def test_a_scene_fills_the_free_part_of_the_window(viewer: Viewer) -> None:
    """And a double-click or F brings a matrix near and names it; 0 shows all again."""
    viewer.go(encode_state({"expr": "C = A @ B", "leaves": FLAT, "title": "T", "tour": 1}))
    corner_points = "[['A', 0, 0], ['A', 5, 79], ['B', 0, 0], ['B', 79, 5], ['C', 0, 0], ['C', 5, 5]]"
    project = f"{corner_points}.map(([key, i, j]) => colonnade.project(key, i, j))"
    top, bottom, right = viewer.run(
        """['caption', 'tour', 'stage'].map(id => document.getElementById(id).getBoundingClientRect())
        .map((box, at) => at === 0 ? box.bottom : at === 1 ? box.top : box.right)"""
    )

    def extent() -> tuple[float, float]:
        points = np.array(viewer.run(project))
        assert (points[:, 1] > top).all() and (points[:, 1] < bottom).all()
        assert (points[:, 0] > 0).all() and (points[:, 0] < right).all()
        width, height = points.max(0) - points.min(0)
        return width / right, height / (bottom - top)

    assert max(extent()) > 0.8
    before = viewer.run("colonnade.camera()")
    viewer.page.dblclick("#canvas", position=dict(zip("xy", viewer.run("colonnade.project('C', 2, 2)"), strict=True)))
    near = viewer.run("colonnade.camera()")
    assert near[2] < 0.5 * before[2]
    assert viewer.page.text_content("#near") == "C, 6 × 6: A times B"
    viewer.page.focus("#canvas")
    viewer.page.keyboard.press("f")
    assert viewer.run("colonnade.camera()") != near
    assert viewer.page.text_content("#near") == "A, 6 × 80: given" and viewer.state["focus"] == "A"
    viewer.page.keyboard.press("ArrowLeft")
    viewer.wait("colonnade.state().camera[2] > 0 && document.getElementById('near').hidden")  # moved away from it
    viewer.page.keyboard.press("0")
    assert np.allclose(viewer.run("colonnade.camera()"), before, atol=1e-3)
    viewer.wait("colonnade.state().camera[2] === 0")
    viewer.page.set_viewport_size({"width": 900, "height": 420})
    viewer.wait(f"Math.abs(colonnade.camera()[2] - {before[2]}) > 0.01")
    viewer.page.set_viewport_size(VIEWPORT)
