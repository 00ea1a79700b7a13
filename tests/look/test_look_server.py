"""The viewer's server: its own address only, a strict policy, hostile requests."""

import contextlib
import http.client
import json
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import cast
from urllib.parse import urlsplit

import pytest
import torch

import colonnade
from colonnade.api import Model
from colonnade.cli import main
from colonnade.look.server import running
from colonnade.parallel.distributed_context import DistributedContext
from tests.look.test_look_pages import TEXT, app
from tests.models import build
from tests.serve import tiny


@pytest.fixture(scope="module")
def address() -> Iterator[tuple[str, int]]:
    with running(app()) as url:
        parts = urlsplit(url)
        yield str(parts.hostname), int(parts.port or 0)


def ask(
    address: tuple[str, int], method: str, path: str, body: bytes | None = None, **headers: str
) -> tuple[int, dict, bytes]:
    connection = http.client.HTTPConnection(*address, timeout=120)
    try:
        connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()
    finally:
        connection.close()


def test_page_and_its_policy(address: tuple[str, int]) -> None:
    for path, kind in (("/", "text/html"), ("/viewer.js", "text/javascript"), ("/viewer.css", "text/css")):
        status, headers, body = ask(address, "GET", path)
        assert status == 200 and headers["Content-Type"].startswith(kind) and body
        policy = headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy and "script-src 'self';" in policy and "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy and "http" not in policy and headers["X-Content-Type-Options"] == "nosniff"
        assert ask(address, "HEAD", path)[2] == b""


def test_other_names_of_this_machine_are_refused(address: tuple[str, int]) -> None:
    """A page elsewhere that resolves its own name to 127.0.0.1 must not read the model."""
    assert ask(address, "GET", "/v1/look/model", Host="evil.example")[0] == 403
    assert ask(address, "GET", "/", Host=f"evil.example:{address[1]}")[0] == 403
    assert ask(address, "GET", "/v1/look/model", Host=f"localhost:{address[1]}")[0] == 200


def test_forms_of_other_pages_are_refused(address: tuple[str, int]) -> None:
    body = json.dumps({"text": TEXT}).encode()
    assert ask(address, "POST", "/v1/look/record", body, Content_Type="text/plain")[0] == 415
    assert ask(address, "POST", "/v1/look/record", body, Content_Type="application/json")[0] == 200


def test_hostile_requests(address: tuple[str, int]) -> None:
    for path in (
        "/../app.py",
        "/viewer.js/..",
        "//etc/passwd",
        "/v1/look/",
        "/v1/look/tensor?%ff",
        "/%00",
        "/static/viewer.js",
    ):
        status, _, body = ask(address, "GET", path)
        assert status in (400, 404), path
        assert json.loads(body)["error"]["message"]
    assert ask(address, "POST", "/", b"{}", Content_Type="application/json")[0] == 404
    assert (
        ask(address, "POST", "/v1/look/record", b"", Content_Length="999999999", Content_Type="application/json")[0]
        == 413
    )
    with socket.create_connection(address, timeout=120) as broken:
        broken.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n")
    assert ask(address, "GET", "/v1/look/model")[0] == 200


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The verb serves until Ctrl-C."""
    model = Model(build(tiny.config(), dtype=torch.float32), tiny.tokenizer(), DistributedContext.solo(), "x")
    colonnade.save(model, tmp_path / "model")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    answers: list[tuple[int, dict, bytes]] = []

    def visit() -> None:
        try:
            for _ in range(1200):
                with contextlib.suppress(ConnectionRefusedError):
                    body = json.dumps({"text": TEXT}).encode()
                    answers.append(
                        ask(("127.0.0.1", port), "POST", "/v1/look/record", body, Content_Type="application/json")
                    )
                    break
                time.sleep(0.1)
        finally:
            signal.pthread_kill(cast("int", threading.main_thread().ident), signal.SIGINT)

    visitor = threading.Thread(target=visit)
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # torch's, after other tests, ends the process
    try:
        visitor.start()
        main(["look", str(tmp_path / "model"), "--port", str(port)])
    finally:
        visitor.join()
        signal.signal(signal.SIGINT, handler)
    said = capsys.readouterr().err
    first, _, then = " ".join(said.split()).partition(" ... ")
    assert first == f"loading {tmp_path / 'model'}"  # before the weights are read
    assert f"http://127.0.0.1:{port}/ (Ctrl-C ends)" in then and "closed" in then
    assert answers[0][0] == 200 and json.loads(answers[0][2])["pieces"]


def test_mistakes_on_the_command_line(
    capsys: pytest.CaptureFixture[str], address: tuple[str, int], tmp_path: Path
) -> None:
    model = Model(build(tiny.config(), dtype=torch.float32), tiny.tokenizer(), DistributedContext.solo(), "x")
    colonnade.save(model, tmp_path / "model")
    for words, message in (
        (["no-such-model"], "no-such-model"), ([str(tmp_path / "model"), "--port", "70000"], "65535"),
        ([str(tmp_path / "model"), "--port", str(address[1])], "choose another --port"),
    ):  # fmt: skip
        with pytest.raises(SystemExit) as end:
            main(["look", *words])
        assert end.value.code == 1 and message in " ".join(capsys.readouterr().err.split())
