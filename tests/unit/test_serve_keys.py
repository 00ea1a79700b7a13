"""Key files: every mistake is one line that names the file and the key."""

import hashlib
from pathlib import Path

import pytest

from colonnade.cli.serving import _with_environment_keys
from colonnade.config import ServeConfig
from colonnade.errors import ConfigError
from colonnade.serve.api.api_keys import KeyRing, read_keys
from colonnade.serve.api.request_record import record_of


def digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def test_toml_and_json_lines_are_equal(tmp_path: Path):
    toml, lines = tmp_path / "keys.toml", tmp_path / "keys.jsonl"
    toml.write_text(
        f'[[keys]]\nname = "a"\nsha256 = "{digest("x").upper()}"\nmodels = ["m"]\nrequests_per_minute = 3\n'
        f'[[keys]]\nname = "b"\nsha256 = "{digest("y")}"\npriority = -1\n'
    )
    lines.write_text(
        f'{{"name": "a", "sha256": "{digest("x")}", "models": ["m"], "requests_per_minute": 3}}\n\n'
        f'{{"name": "b", "sha256": "{digest("y")}", "priority": -1}}\n'
    )
    assert read_keys(toml) == read_keys(lines)
    ring = KeyRing(str(toml), "z")
    known, state = ring.find(b"x")
    assert known and state is not None and state.key.name == "a" and state.limiter.limits.requests_per_minute == 3
    assert ring.find(b"z") == (True, None) and ring.find(b"w") == (False, None) and ring.required
    assert not KeyRing(None, None).required


KEY = f'[[keys]]\nname = "a"\nsha256 = "{digest("x")}"\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[keys]\n", "is malformed: "),
        ("", r"has no keys; add a table \[\[keys\]\]"),
        ("keys = 3", r"is malformed: it may contain only tables \[\[keys\]\]"),
        ("keys = [3]", "key 1 in the key file .* is not a table"),
        (f"{KEY}sha = 1", "key 1 .*has no key 'sha'; did you mean 'sha256'"),
        (f"{KEY}{KEY.replace(digest('x'), digest('y'))}", "key 2 .* has the name of an earlier one"),
        (KEY + KEY.replace('"a"', '"b"'), "key 2 .* has the sha256 of an earlier one"),
        (f"{KEY}requests_per_minute = 0", "requests_per_minute"),
        (f"{KEY}tokens_per_minute = true", "tokens_per_minute"),
        (KEY.replace(digest("x"), "12"), "sha256"),
        (KEY.replace('"a"', '"a b"'), "name"),
        (KEY.replace('"a"', '"' + "a" * 65 + '"'), "name"),
    ],
)
def test_a_bad_key_file_is_refused(tmp_path: Path, text: str, message: str):
    file = tmp_path / "keys.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message) as error:
        read_keys(file)
    assert "\n" not in str(error.value) and "keys.toml" in str(error.value)


@pytest.mark.parametrize("data", [b"\xff\xfe", b"[" * 100_000, b"{", b"[]"])
def test_bad_json_lines_are_refused(tmp_path: Path, data: bytes):
    file = tmp_path / "keys.jsonl"
    file.write_bytes(data)
    with pytest.raises(ConfigError, match=r"the key file .*keys\.jsonl"):
        read_keys(file)


def test_a_missing_file_is_refused(tmp_path: Path):
    for file in (tmp_path / "none.toml", tmp_path):
        with pytest.raises(ConfigError, match="cannot read the key file"):
            read_keys(file)


def test_reload_keeps_the_counts_of_unchanged_keys(tmp_path: Path):
    file = tmp_path / "keys.toml"
    file.write_text(KEY + "requests_per_minute = 2\n")
    ring = KeyRing(str(file), None)
    before = ring.find(b"x")[1]
    file.write_text(KEY + f'requests_per_minute = 2\n[[keys]]\nname = "b"\nsha256 = "{digest("y")}"\n')
    assert ring.reload() == f"read 2 keys from {file}"
    assert ring.find(b"x")[1] is before and ring.find(b"y")[0]
    file.write_text("broken")
    with pytest.raises(ConfigError):
        ring.reload()
    assert ring.find(b"x")[1] is before and ring.find(b"y")[0]


def test_keys_from_the_environment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLONNADE_API_KEY", "secret")
    assert _with_environment_keys(ServeConfig()).api_key == "secret"
    assert _with_environment_keys(ServeConfig(api_key="flag")).api_key == "flag"
    assert "secret" not in repr(_with_environment_keys(ServeConfig()))
    monkeypatch.setenv("COLONNADE_ADMIN_KEY", "")
    with pytest.raises(ConfigError, match="admin_key"):  # an empty key must not leave a server open
        _with_environment_keys(ServeConfig())


@pytest.mark.parametrize(
    ("address", "client"),
    [
        ("127.0.0.1", "127.0.0.1"), ("::ffff:10.0.0.7", "10.0.0.7"), ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"), ("", ""), ("unix", "unix"),
    ],
)  # fmt: skip
def test_a_client_is_an_address_or_an_ipv6_network(address: str, client: str):
    assert record_of({"type": "http", "client": (address, 5)}).client == client
    assert record_of({"type": "http", "client": None}).client == ""
