"""Downloads by model id from a Hub served on 127.0.0.1: which files are fetched, and the errors."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from colonnade.checkpoint.hf.write import write_hf
from colonnade.checkpoint.load_model import download
from colonnade.errors import CheckpointError
from tests.models import build
from tests.unit.test_hf_files import LLAMA

COMMIT = "0123456789abcdef0123456789abcdef01234567"
# A separate process, because huggingface_hub reads its environment once, at import.
SCRIPT = """
import sys
from colonnade.checkpoint.hf.read import HFFolder
from colonnade.checkpoint.load_model import download
from colonnade.errors import CheckpointError
for model_id in sys.argv[1:]:
    try:
        folder = download(model_id)
        print(*sorted(path.name for path in folder.iterdir()), HFFolder(folder).config.layers)
    except CheckpointError as error:
        print("refused:", error)
"""


TOKENIZER = b'{"version": "1.0", "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1, "c": 2}, "unk_token": "a"}}'


def git_id(contents: bytes) -> str:
    """The Hub's git blob id of a file."""
    return hashlib.sha1(b"blob %d\0" % len(contents) + contents).hexdigest()


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[tuple[str, list[str]]]:
    """(address, requested paths) of a Hub with one model, "us/tiny"."""
    write_hf(build(LLAMA), tmp_path / "tiny")
    (tmp_path / "tiny" / "pytorch_model.bin").write_bytes(b"never")
    (tmp_path / "tiny" / "modeling.py").write_text("raise SystemExit")
    (tmp_path / "tiny" / "tokenizer.json").write_bytes(TOKENIZER)
    files = {path.name: path.read_bytes() for path in (tmp_path / "tiny").iterdir()}
    requested: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            requested.append(self.path)
            name = self.path.rsplit("/", 1)[-1]
            if self.path.startswith("/api/models/us/tiny/revision/"):
                self.say({"id": "us/tiny", "sha": COMMIT, "siblings": [{"rfilename": file} for file in files]})
            elif self.path.startswith(f"/api/models/us/tiny/tree/{COMMIT}"):
                self.say([{"type": "file", "path": f, "size": len(files[f]), "oid": git_id(files[f])} for f in files])
            elif self.path.startswith(f"/us/tiny/resolve/{COMMIT}/") and name in files:
                self.answer(files[name])
            else:
                self.answer(b"{}", 404)

        def say(self, value: object) -> None:
            self.answer(json.dumps(value).encode())

        def answer(self, body: bytes, status: int = 200) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("ETag", f'"{git_id(body)}"')
            if status == 404:
                self.send_header("X-Error-Code", "RepoNotFound")
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", requested
    server.shutdown()
    server.server_close()
    thread.join()


def fetch_output(address: str, model_ids: str, home: Path, script: str = SCRIPT, **more: str) -> str:
    """Output of a fresh process that fetches the models one after another."""
    keep = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    env = keep | {"HF_ENDPOINT": address, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", **more}
    command = [sys.executable, "-c", script, *model_ids.split()]
    run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100, check=True)
    return run.stdout.strip()


@pytest.mark.slow
def test_fetches_weights_and_config_but_no_code(hub: tuple[str, list[str]], tmp_path: Path) -> None:
    address, requested = hub
    home = tmp_path / "home"
    output = fetch_output(address, "us/tiny", home)
    assert output == "config.json generation_config.json model.safetensors tokenizer.json 2", requested
    assert not any(path.endswith((".bin", ".py")) for path in requested)
    requested.clear()
    offline = fetch_output(address, "us/tiny", home, HF_HUB_OFFLINE="1")
    assert offline == "config.json generation_config.json model.safetensors tokenizer.json 2" and requested == []


@pytest.mark.slow
def test_tokenizer_is_fetched_without_weights(hub: tuple[str, list[str]], tmp_path: Path) -> None:
    address, requested = hub
    words = "import sys, colonnade; print(colonnade.load_tokenizer(sys.argv[1]).vocab_size)"
    assert fetch_output(address, "us/tiny", tmp_path / "home", words) == "3"
    assert requested and not any(path.endswith(".safetensors") for path in requested)


@pytest.mark.slow
def test_errors_are_one_line(hub: tuple[str, list[str]], tmp_path: Path) -> None:
    address, _ = hub
    unknown, misspelt = fetch_output(address, "us/nothing a/b/c", tmp_path).splitlines()
    unreachable = fetch_output("http://127.0.0.1:9", "us/tiny", tmp_path)
    assert unknown.startswith("refused: cannot download 'us/nothing' from the Hub")
    assert unreachable.startswith("refused: ") and "cannot be reached" in unreachable and "\n" not in unreachable
    assert misspelt == "refused: 'a/b/c' is neither a local file or folder nor a Hub id (owner/name)"


def test_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(CheckpointError, match=r"pip install 'colonnade\[hub\]'"):
        download("us/tiny")
