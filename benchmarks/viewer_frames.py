"""The matrix viewer in headless Chromium: CPU time of a frame, time to the first picture, size of the bundle.

    python benchmarks/viewer_frames.py            # software rendering
    python benchmarks/viewer_frames.py --gpu      # the machine's graphics driver

A frame is a turn of the camera and a draw call, timed on the page's main thread; with software rendering the
rasterising itself happens in another process and is counted in the frames per second.
"""

import argparse
import gzip
import shutil
import statistics
import time
from pathlib import Path

from colonnade.look.notebook import encode_state
from colonnade.look.server import running
from harness.report import RESULTS, Cell, report

SIZES = [(96, 96), (256, 768)]
FRAMES = 100
SOFTWARE = ["--use-angle=swiftshader", "--enable-unsafe-swiftshader"]
STATIC = Path(__file__).parents[1] / "colonnade/look/static"
READY = "Boolean(document.documentElement.dataset.ready)"


def measure(gpu: bool) -> dict[str, Cell]:
    """All figures, as one row."""
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium")
    assert chromium is not None, "needs chromium: apt-get install chromium"
    row: dict[str, Cell] = {
        "bundle_bytes_gzipped": sum(len(gzip.compress(path.read_bytes())) for path in STATIC.iterdir()),
        "rendering": "graphics driver" if gpu else "software (SwiftShader)",
    }
    with running(None) as url, sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox", *([] if gpu else SOFTWARE)])
        page = browser.new_page(viewport={"width": 1280, "height": 800}, reduced_motion="reduce")
        start_s = time.monotonic()
        page.goto(url)
        while not page.evaluate(READY):
            page.wait_for_timeout(5)
        row["first_interactive_s"] = round(time.monotonic() - start_s, 2)
        for rows, cols in SIZES:
            leaves = {"A": {"rows": rows, "cols": cols}, "B": {"rows": cols, "cols": rows}}
            page.evaluate(
                "async link => await colonnade.open(link)", encode_state({"expr": "C = A @ B", "leaves": leaves})
            )
            page.wait_for_timeout(500)
            times_ms = page.evaluate("count => colonnade.frames(count)", FRAMES)
            row[f"frame_cpu_ms_{rows}x{cols}"] = round(statistics.median(times_ms), 2)
            row[f"frames_per_s_{rows}x{cols}"] = round(page.evaluate(TURN, 20), 1)
        browser.close()
    return row


TURN = """async count => {
  const start = performance.now();
  for (let i = 0; i < count; i++) { colonnade.frames(1); await new Promise(requestAnimationFrame); }
  return count / (performance.now() - start) * 1000;
}"""


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpu", action="store_true", help="use the graphics driver")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the record")
    options = parser.parse_args()
    report(
        "viewer_frames_gpu" if options.gpu else "viewer_frames",
        [measure(options.gpu)],
        __doc__ or "",
        folder=options.out,
    )
