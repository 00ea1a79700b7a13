"""Comparisons of two servers' answers, their summary, and configurations that make no sense."""

import json
import socket
from array import array
from base64 import b64encode
from pathlib import Path
from typing import Any

import pytest

from colonnade.cli import main
from colonnade.config import ServeConfig
from colonnade.errors import ConfigError
from colonnade.serve.api.shadow import is_own_address, with_seed
from colonnade.serve.server import serve
from colonnade.serve.shadow_comparison import UNREADABLE, compare, differs
from tests.serve import tiny


def text(*texts: str) -> bytes:
    choices = [{"index": i, "text": each, "finish_reason": "stop"} for i, each in enumerate(texts)]
    return json.dumps({"object": "text_completion", "choices": choices}).encode()


def stream(*pieces: tuple[int, dict[str, Any]]) -> bytes:
    events = [json.dumps({"choices": [{"index": i, "delta": delta}]}) for i, delta in pieces]
    return "".join(f"data: {event}\n\n" for event in [*events, '{"choices": [], "usage": {}}', "[DONE]"]).encode()


def vectors(*rows: list[float], base64: bool = False) -> bytes:
    data = [b64encode(array("f", row).tobytes()).decode() if base64 else row for row in rows]
    return json.dumps({"object": "list", "data": [{"index": i, "embedding": x} for i, x in enumerate(data)]}).encode()


def classes(*labels: str) -> bytes:
    return json.dumps({"data": [{"index": i, "label": each} for i, each in enumerate(labels)]}).encode()


def lengths(a: int, b: int, common: int) -> dict[str, int]:
    return {"characters": a, "shadow_characters": b, "common_prefix": common}


@pytest.mark.parametrize(
    ("a", "b", "found"),
    [
        (text("abcd"), text("abXd"), lengths(4, 4, 2)),
        (text("abcd", "é"), text("abcd", "é"), lengths(5, 5, 5)),
        (text("ab"), text("abc"), lengths(2, 3, 2)),
        (text(""), text("x"), lengths(0, 1, 0)),
        (
            stream((0, {"role": "assistant"}), (0, {"content": "ab"}), (1, {"content": "x"}), (0, {"content": "c"})),
            stream((0, {"content": "abc"}), (1, {"content": "y"})),
            lengths(4, 4, 3),
        ),
        (
            stream((0, {"tool_calls": [{"index": 0, "function": {"name": "f", "arguments": "{}"}}]})),
            stream((0, {"tool_calls": [{"index": 0, "function": {"name": "g", "arguments": "{}"}}]})),
            lengths(3, 3, 0),
        ),
        (vectors([1, 0], [0, 2]), vectors([1, 0], [0, 3], base64=True), {"cosine": 1.0}),
        (vectors([1, 0], [0, 2]), vectors([1, 0], [2, 0]), {"cosine": 0.0}),
        (vectors([1, 0]), vectors([1, 0, 0]), {"cosine": 0.0}),
        (classes("a", "b"), classes("a", "c"), {"class": ["a", "b"], "shadow_class": ["a", "c"]}),
    ],
)
def test_answers_are_compared(a: bytes, b: bytes, found: dict[str, Any]):
    assert compare(a, b) == found


@pytest.mark.parametrize(
    "shadow",
    [b"", b"<html>", b"[]", b"{}", b"[" * 99999, text("a", "b"), b'{"choices": [1]}', b'{"choices": null}',
     b'data: {"choices": []}\n\n', b'{"choices": [{"index": 0, "text": 7}]}'],
)  # fmt: skip
def test_unreadable_answers_are_no_comparison(shadow: bytes):
    with pytest.raises(UNREADABLE):
        compare(text("a"), shadow)


def line(**fields: Any) -> dict[str, Any]:
    known = {
        "route": "/v1/completions",
        "status": 200,
        "shadow_status": 200,
        "latency_s": 0.5,
        "shadow_latency_s": 0.25,
    }
    return {**known, **fields}


def test_what_differs():
    assert not differs(line(**lengths(3, 3, 3)), 1) and differs(line(**lengths(3, 3, 2)), 1)
    assert differs(line(**lengths(3, 4, 3)), 1) and differs(line(shadow_status=None), 1)
    assert not differs(line(status=400, shadow_status=400), 1) and differs(line(shadow_status=429), 1)
    assert differs(line(cosine=0.99), 0.999) and not differs(line(cosine=0.9995), 0.999)
    assert differs(line(**{"class": ["a"], "shadow_class": ["b"]}), 1)


def test_the_verb_sums_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    log = tmp_path / "shadow.jsonl"
    rows = [line(**lengths(10, 10, 10))] * 8 + [line(**lengths(10, 10, 5)), line(shadow_status=None)]
    rows += [line(route="/v1/embeddings", cosine=0.9999)]
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    main(["shadow", str(log), "--max_differ", "0.2"])
    table = [words.split() for words in capsys.readouterr().out.splitlines()]
    assert ["/v1/completions", "10", "2", "(20.0%)", "1", "94.4%", "0.500", "s", "0.250", "s"] in table
    assert ["/v1/embeddings", "1", "0", "(0.0%)", "0", "0.999900", "0.500", "s", "0.250", "s"] in table
    with pytest.raises(SystemExit) as end:
        main(["shadow", str(log), "--max_differ", "0.1"])
    assert end.value.code == 1 and "2 of 11 responses differ (18.2%)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "has no comparisons"), ("{}\n", "line 1 is not a comparison"), ("[]\n", "line 1 is not a comparison"),
        ("nonsense", "line 1 is not a comparison"), (None, "No such file"),
    ],
)  # fmt: skip
def test_other_files_are_refused(content: str | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    log = tmp_path / "shadow.jsonl"
    if content is not None:
        log.write_text(content)
    with pytest.raises(SystemExit):
        main(["shadow", str(log)])
    assert message in capsys.readouterr().err


def test_a_request_without_a_seed_gets_one():
    seed = json.loads(with_seed(b'{"prompt": "a"}'))["seed"]
    assert 0 <= seed < 2**63 and json.loads(with_seed(b'{"seed": null}'))["seed"] is not None
    for kept in (b'{"seed": 7}', b'{"seed": "x"}', b"nonsense", b"[1]", b"[" * 99999, b"", b"\xff"):
        assert with_seed(kept) == kept


def test_own_addresses():
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("", 0)) as every:
        for host, listener, own in [
            ("127.0.0.1", one, True), ("localhost", one, True), ("127.0.0.2", one, False), ("127.0.0.1", every, True),
            ("192.0.2.1", every, False), ("unknown.invalid", every, False),
        ]:  # fmt: skip
            assert is_own_address(f"http://{host}:{listener.getsockname()[1]}", listener) is own, host
        assert not is_own_address("http://127.0.0.1", one) and not is_own_address("https://127.0.0.1", one)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"shadow": "http://localhost:{port}"}, "is this server itself"),
        ({"shadow": "http://localhost:1", "shadow_log": None}, "must be used together"),
        ({}, "must be used together"),
        ({"shadow": "http://localhost:1", "shadow_log": "/proc/none"}, "No such file"),
    ],
)
def test_configurations_that_are_refused_before_loading(config: dict[str, Any], message: str, tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    values = {"shadow_log": str(tmp_path / "log"), **config}
    if values.get("shadow"):
        values["shadow"] = values["shadow"].format(port=port)
    lines: list[str] = []
    with pytest.raises(ConfigError, match=message):
        serve({"tiny": tiny.load}, config=ServeConfig(port=port, **values), device="cpu", announce=lines.append)
    assert not lines


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://a", "http://", "http://a/b", "http://user@a", "http://a?b"])
def test_a_shadow_is_a_plain_url(url: str):
    with pytest.raises(ConfigError, match="it must be http://HOST"):
        ServeConfig(shadow=url)
