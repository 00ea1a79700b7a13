"""One Chromium for all tests of the viewer; a page that may ask its own server only."""

import shutil
from base64 import b64decode
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = [
    "--no-sandbox", "--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-component-update",
    "--disable-sync", "--disable-default-apps", "--use-angle=swiftshader", "--enable-unsafe-swiftshader",
    "--force-color-profile=srgb", "--hide-scrollbars",
]  # fmt: skip
TIMEOUT_MS = 120_000
VIEWPORT = {"width": 800, "height": 480}
"""Software draws each pixel, so that a small page is a quick one."""
SHOT = {"x": 0, "y": 0, "width": 480, "height": 480}


@pytest.fixture(scope="session")
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
        size = {"viewport": VIEWPORT, "reduced_motion": "reduce", "color_scheme": "light"}
        context = browser.new_context(**(size | options))
        context.set_default_timeout(TIMEOUT_MS)
        contexts.append(context)
        viewer = Viewer(context, failures)
        viewer.open(fragment, url)
        return viewer

    yield make
    for context in contexts:
        context.close()
    assert failures == []


@pytest.fixture
def open_viewer(browser: Any) -> Iterator[Callable[..., Viewer]]:
    """A function that opens a viewer of its own: (url, fragment="", **options of the browser's context)."""
    with viewers(browser) as make:
        yield make


@pytest.fixture(scope="module")
def shared_viewer(browser: Any) -> Iterator[Callable[..., Viewer]]:
    """A function that opens an address in one page that the tests of a module share: a page costs a second."""
    made: list[Viewer] = []
    with viewers(browser) as make:

        def open_shared(url: str, fragment: str = "") -> Viewer:
            if not made:
                made.append(make(url, fragment))
            elif made[0].url == url:
                made[0].go(fragment)
            else:
                made[0].open(fragment, url)
            return made[0]

        yield open_shared


@pytest.fixture(scope="session")
def references() -> Path:
    return Path(__file__).parent / "references"
