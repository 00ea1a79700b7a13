"""One Chromium, one page and one server for all tests of the viewer; the page may ask its own server only."""

import shutil
from base64 import b64decode
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import numpy as np
import pytest

from colonnade.look.app import Answer, LookApp, error_answer, json_answer
from colonnade.look.server import running

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = [
    "--no-sandbox", "--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-component-update",
    "--disable-sync", "--disable-default-apps", "--use-angle=swiftshader", "--enable-unsafe-swiftshader",
    "--disable-gpu-compositing",  # software draws the page's other parts quicker without it
    "--force-color-profile=srgb", "--hide-scrollbars",
]  # fmt: skip
TIMEOUT_MS = 120_000
VIEWPORT = {"width": 800, "height": 480}
"""Software draws each pixel, so that a small page is a quick one."""
SHOT = {"x": 0, "y": 0, "width": 480, "height": 480}


@pytest.fixture(scope="package")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("needs chromium: apt-get install chromium")
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install playwright")
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS, timeout=TIMEOUT_MS)
        yield chromium
        chromium.close()


class Viewer:
    """A page of the viewer at ``url``; it may ask the servers that it was sent to."""

    def __init__(self, context: Any, failures: list[str]):
        self.page, self.url, self._hosts = context.new_page(), "", set[str]()
        self.failures = failures
        context.route("**/*", partial(self._check, failures))
        self.page.on("pageerror", lambda error: failures.append(str(error)))
        self.page.on("console", lambda it: failures.append(it.text) if "Content Security Policy" in it.text else None)

    def _check(self, failures: list[str], route: Any) -> None:
        if urlsplit(route.request.url).netloc in self._hosts or route.request.url.startswith("data:"):
            route.continue_()
        else:
            failures.append(f"a request to {route.request.url}")
            route.abort()

    def wait(self, condition: str) -> None:
        """Wait until a JavaScript expression holds; Playwright's own waiting needs eval, which the page forbids."""
        for _ in range(TIMEOUT_MS // 50):
            if self.page.evaluate(condition):
                return
            self.page.wait_for_timeout(50)
        raise AssertionError(f"not within {TIMEOUT_MS / 1000:g} s: {condition}; the page says {self.error!r}")

    def ready(self) -> None:
        self.wait("Boolean(document.documentElement.dataset.ready)")

    def go(self, link: str) -> None:
        """Open a link in the page as it is, which is quicker than a new one."""
        self.page.evaluate("async (link) => await colonnade.open(link)", link)

    def open(self, fragment: str = "", url: str = "") -> None:
        """Open a new page, perhaps of another server."""
        self.url = url or self.url
        self._hosts.add(urlsplit(self.url).netloc)
        self.page.goto("about:blank")
        self.page.goto(f"{self.url}{'#' if fragment else ''}{fragment}", timeout=TIMEOUT_MS)
        self.ready()

    def run(self, script: str, *args: Any) -> Any:
        return self.page.evaluate(script, *args)

    def faces(self) -> dict[str, np.ndarray]:
        """What the page has computed, by name or key."""
        return {
            key: np.frombuffer(b64decode(it["data"]), np.float32).reshape(it["rows"], it["cols"])
            for key, it in self.run("colonnade.faces()").items()
        }

    def shot(self) -> bytes:
        """The drawing, as it is compared with a reference."""
        return self.page.screenshot(clip=SHOT)

    @property
    def error(self) -> str:
        return self.page.text_content("#error") if self.page.is_visible("#error") else ""

    @property
    def state(self) -> dict[str, Any]:
        return self.run("colonnade.state()")


@contextmanager
def viewers(browser: Any) -> Iterator[Callable[..., Viewer]]:
    """Opens viewers at addresses; at the end no request has gone elsewhere, and no script has failed."""
    contexts, failures = [], []

    def make(url: str, fragment: str = "", **options: Any) -> Viewer:
        size = {"viewport": VIEWPORT, "reduced_motion": "reduce", "color_scheme": "light", "has_touch": True}
        context = browser.new_context(**(size | options))
        context.set_default_timeout(TIMEOUT_MS)
        contexts.append(context)
        viewer = Viewer(context, failures)
        viewer.open(fragment, url)
        return viewer

    try:
        yield make
    finally:
        for context in contexts:
            context.close()
    assert failures == []


@pytest.fixture
def open_viewer(browser: Any) -> Iterator[Callable[..., Viewer]]:
    """A function that opens a viewer of its own: (url, fragment="", **options of the browser's context)."""
    with viewers(browser) as make:
        yield make


class Site:
    """One server for all tests: it answers for the model of the test that runs, or has no model."""

    def __init__(self) -> None:
        self.app: LookApp | None = None
        self.url = ""

    def answer(self, method: str, path: str, query: str = "", body: bytes = b"") -> Answer:
        """What the model's own server would answer."""
        if self.app is not None:
            return self.app.answer(method, path, query, body)
        return json_answer(None) if path == "model" else error_answer("there is no such page", 404)


@pytest.fixture(scope="session")
def site() -> Iterator[Site]:
    made = Site()
    with running(cast("LookApp", made)) as made.url:
        yield made


@pytest.fixture(scope="package")
def _page(browser: Any, site: Site) -> Iterator[tuple[Viewer, list[str]]]:
    """The page that tests share, and what went wrong in it: a page of its own costs a test more than a second."""
    with viewers(browser) as make:
        viewer = make(site.url)
        yield viewer, viewer.failures


@pytest.fixture
def viewer(_page: tuple[Viewer, list[str]], site: Site) -> Iterator[Viewer]:
    """The shared page, without a model; what went wrong in it is the fault of the test that runs."""
    shared, failures = _page
    yield shared
    site.app = None
    found, failures[:] = [*failures], []
    assert found == []


@pytest.fixture
def model_viewer(viewer: Viewer, site: Site) -> Callable[[LookApp, str], Viewer]:
    """A function that shows a link of a model's server in the shared page."""

    def show(app: LookApp, fragment: str) -> Viewer:
        site.app = app
        viewer.go(fragment)
        return viewer

    return show


@pytest.fixture(scope="session")
def references() -> Path:
    return Path(__file__).parent / "references"
