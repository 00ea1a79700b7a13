"""Headless Chromium for tests, driven over its debugging pipe (Chrome DevTools Protocol); needs no package."""

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
PATH = next(filter(None, map(shutil.which, NAMES)), None)
MISSING = "no Chromium or Chrome is installed: apt-get install chromium"
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage", "--hide-scrollbars",
    "--remote-debugging-pipe",
)  # fmt: skip
LIMIT_S = 120
KEYS = {"Enter": 13, "Escape": 27}


class Browser:
    """One page; commands go to fd 3 of the browser and replies come from its fd 4, each ended by a zero byte."""

    def __init__(self, commands: int, replies: int):
        self._commands, self._replies = commands, replies
        self._buffer, self._count, self._session = b"", 0, None
        self.problems: list[str] = []
        """Errors of the console: exceptions and violations of the page's policy."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """The result of one command."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while (reply := self._read()).get("id") != self._count:
            self._note(reply)
        if "error" in reply:
            raise AssertionError(f"{method}: {reply['error']}")
        return reply["result"]

    def open(self, url: str) -> None:
        """Load a page."""
        self.call("Page.navigate", url=url)
        self.wait(f"document.readyState === 'complete' && location.href.startsWith({json.dumps(url)})")

    def evaluate(self, script: str) -> Any:
        """The value of an expression in the page."""
        result = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, (script, result["exceptionDetails"])
        return result["result"].get("value")

    def wait(self, script: str) -> None:
        """Wait until an expression is true."""
        limit_s = time.monotonic() + LIMIT_S
        while not self.evaluate(script):
            assert time.monotonic() < limit_s, (script, self.evaluate("document.body.innerText"), self.problems)
            time.sleep(0.02)

    def type(self, text: str) -> None:
        """Type into the focused element; no key is a newline."""
        self.call("Input.insertText", text=text)

    def press(self, key: str, *, shift: bool = False) -> None:
        """Press and release a key."""
        about = {"key": key, "code": key, "windowsVirtualKeyCode": KEYS[key], "modifiers": 8 if shift else 0}
        text = {"text": "\r"} if key == "Enter" else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", **about, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **about)

    def click(self, words: str) -> None:
        """Click the visible button with this text, the last one if there are several."""
        self.evaluate(
            "[...document.querySelectorAll('button')].filter((it) => it.checkVisibility() && !it.disabled && "
            f"it.textContent.trim().startsWith({json.dumps(words)})).at(-1).click()"
        )

    def screenshot(self, path: Path, *, width: int, height: int, dark: bool) -> None:
        """Write a PNG of the page in a window of this size."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._replies], [], [], LIMIT_S)
            assert ready, "the browser does not answer"
            more = os.read(self._replies, 1 << 16)
            assert more, "the browser has exited"
            self._buffer += more
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def _note(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(params["exceptionDetails"]))
        elif event.get("method") == "Log.entryAdded" and params["entry"]["source"] not in ("network", "intervention"):
            self.problems.append(params["entry"]["text"])


@contextmanager
def browser(*flags: str) -> Iterator[Browser]:
    """A browser with an empty profile and more flags; killed at the end."""
    assert PATH is not None, MISSING
    command_end, commands = os.pipe()
    replies, reply_end = os.pipe()
    # bash, because the numbers of the pipes may have several digits, which dash does not read.
    wrapper = ["bash", "-c", f'exec "$@" 3<&{command_end} 4>&{reply_end}', "browser"]
    with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            [*wrapper, PATH, *FLAGS, *flags, f"--user-data-dir={profile}"],
            pass_fds=(command_end, reply_end), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        with process:
            try:
                os.close(command_end)
                os.close(reply_end)
                yield Browser(commands, replies)
            finally:
                process.kill()
                os.close(commands)
                os.close(replies)
