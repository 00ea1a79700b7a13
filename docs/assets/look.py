"""Makes the pictures of the matrix viewer in this folder, from SmolLM2 and headless Chromium.

python docs/assets/look.py
"""

import io
import shutil
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import sync_playwright

import colonnade
from colonnade.look import notebook

FOLDER = Path(__file__).parent
TEXT = (FOLDER.parent / "ideas/attention-is-a-fold.md").read_text(encoding="utf-8")[:1000]
FLAGS = ["--no-sandbox", "--use-angle=swiftshader", "--enable-unsafe-swiftshader"]
HEAD = {"page": "head", "text": TEXT, "layer": 8, "head": 0}
X, UP, DOWN = {"rows": 32, "cols": 32}, {"rows": 32, "cols": 96}, {"rows": 96, "cols": 32}
PICTURES: dict[str, dict[str, Any]] = {
    "look_head": {"model": HEAD, "theme": "dark", "camera": [0.45, 0.33, 0, 0, 0, 0]},
    "look_plan": {
        "expr": "y = (h = x @ up) @ down", "leaves": {"x": X, "up": UP, "down": DOWN},
        "nodes": {"h": {"epilogue": "gelu"}}, "letters": {"x": ["T", "D"], "up": ["D", "F"], "down": ["F", "D"]},
        "plan": {"tp": 4}, "colour": "rank", "theme": "light", "title": "Column-parallel, then row-parallel",
    },
}  # fmt: skip


def main() -> None:
    """Writes each picture."""
    with colonnade.load("smollm2", device="cpu") as model, notebook.serve(model) as server, sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=FLAGS)
        page = browser.new_page(viewport={"width": 1360, "height": 760}, reduced_motion="reduce")
        for name, state in PICTURES.items():
            page.goto("about:blank")
            page.goto(server.view(state).url)
            while not page.evaluate("Boolean(document.documentElement.dataset.ready)"):
                page.wait_for_timeout(100)
            assert not page.is_visible("#error"), page.text_content("#error")
            page.wait_for_timeout(500)
            shot = Image.open(io.BytesIO(page.locator("#stage").screenshot())).convert("RGB")
            shot.quantize(96).save(FOLDER / f"{name}.png", optimize=True)
        browser.close()


if __name__ == "__main__":
    main()
