"""One Chromium for all tests of the viewer; a page that may ask its own server only."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = [
    "--no-sandbox", "--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-component-update",
    "--disable-sync", "--disable-default-apps", "--use-angle=swiftshader", "--enable-unsafe-swiftshader",
    "--force-color-profile=srgb", "--hide-scrollbars",
]  # fmt: skip
TIMEOUT_MS = 120_000


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
    """A page of the viewer at ``url``."""

    def __init__(self, page: Any, url: str):
        self.page, self.url = page, url

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

    def open(self, fragment: str = "") -> None:
        self.page.goto("about:blank")
        self.page.goto(f"{self.url}{'#' if fragment else ''}{fragment}", timeout=TIMEOUT_MS)
        self.ready()

    def run(self, script: str, *args: Any) -> Any:
        return self.page.evaluate(script, *args)

    @property
    def error(self) -> str:
        return self.page.text_content("#error") if self.page.is_visible("#error") else ""

    @property
    def state(self) -> dict[str, Any]:
        return self.run("colonnade.state()")


@pytest.fixture
def open_viewer(browser: Any) -> Iterator[Callable[..., Viewer]]:
    """Opens a page at an address; at the end no request has gone elsewhere, and no script has failed."""
    contexts, elsewhere, failures = [], [], []

    def make(url: str, fragment: str = "", **options: Any) -> Viewer:
        size = {"viewport": {"width": 1000, "height": 640}, "reduced_motion": "reduce", "color_scheme": "light"}
        context = browser.new_context(**(size | options))
        context.set_default_timeout(TIMEOUT_MS)
        contexts.append(context)
        page = context.new_page()
        host = urlsplit(url).netloc

        def check(route: Any) -> None:
            if urlsplit(route.request.url).netloc == host or route.request.url.startswith("data:"):
                route.continue_()
            else:
                elsewhere.append(route.request.url)
                route.abort()

        context.route("**/*", check)
        page.on("pageerror", lambda error: failures.append(str(error)))
        page.on("console", lambda it: failures.append(it.text) if "Content Security Policy" in it.text else None)
        viewer = Viewer(page, url)
        viewer.open(fragment)
        return viewer

    yield make
    for context in contexts:
        context.close()
    assert elsewhere == []
    assert failures == []


@pytest.fixture(scope="session")
def references() -> Path:
    return Path(__file__).parent / "references"
