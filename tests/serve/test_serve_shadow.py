"""A shadow gets answered requests again: one that never answers delays nothing, one that is equal answers the same."""

import json
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from colonnade.serve.api.shadow import MAX_QUEUED, SENDERS
from tests.serve.serving import Running, server


@dataclass
class Shadowed:
    running: Running
    black_hole: socket.socket
    """It listens where the shadow should be, and accepts and answers nothing."""
    shadow_url: str
    log: Path

    def counts(self) -> dict[str, int]:
        """Requests for the shadow, by result."""
        lines = httpx.get(f"{self.running.url}/metrics").text.splitlines()
        rows = [line for line in lines if line.startswith("colonnade:shadow_requests_total{")]
        return {row.split('"')[1]: int(float(row.split()[-1])) for row in rows}

    def comparisons(self, count: int, after: int = 0) -> list[dict]:
        """``count`` lines of the log, without the first ``after``; waits until they are there."""
        while len(lines := self.log.read_text().splitlines()) < after + count:
            time.sleep(0.02)
        return [json.loads(line) for line in lines[after:]]


@pytest.fixture(scope="module")
def shadowed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shadowed]:
    log = tmp_path_factory.mktemp("shadow") / "log.jsonl"
    with socket.create_server(("127.0.0.1", 0), backlog=64) as black_hole:
        url = f"http://127.0.0.1:{black_hole.getsockname()[1]}"
        with server(shadow=url, shadow_log=str(log)) as running:
            yield Shadowed(running, black_hole, url, log)


def test_shadow_never_delays(shadowed: Shadowed):
    """More requests than may wait all end while the black hole has answered none; then they are counted."""
    requests = MAX_QUEUED + SENDERS + 40

    def ask(number: int) -> int:
        body = {"prompt": "The quick", "max_tokens": 1, "seed": number}
        return http.post(f"{shadowed.running.url}/v1/completions", json=body, timeout=100).status_code

    with httpx.Client() as http, ThreadPoolExecutor(16) as pool:
        assert set(pool.map(ask, range(requests))) == {200}
    assert shadowed.counts() == {"dropped": 40} and not shadowed.log.read_text()
    shadowed.black_hole.close()
    rows = shadowed.comparisons(MAX_QUEUED + SENDERS)
    assert {(row["status"], row["shadow_status"]) for row in rows} == {(200, None)}
    while sum(shadowed.counts().values()) < requests:
        time.sleep(0.02)
    assert shadowed.counts() == {"dropped": 40, "unanswered": MAX_QUEUED + SENDERS}


@pytest.mark.slow
def test_an_equal_shadow_answers_the_same(shadowed: Shadowed):
    """Without a seed, too; of streams, chats, refusals and several choices. A shadow's requests have no shadow."""
    shadowed.black_hole.close()
    before = len(shadowed.log.read_text().splitlines())
    asked = [
        ("/v1/completions", {"prompt": "The quick", "max_tokens": 30, "ignore_eos": True}, 200),
        ("/v1/completions", {"prompt": "The quick", "max_tokens": 30, "ignore_eos": True, "n": 3, "stream": True}, 200),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9}, 200),
        ("/v1/completions", {"prompt": "The quick", "max_tokens": -1}, 400),
        ("/v1/embeddings", {"input": "The quick"}, 400),
    ]
    with server(port=int(shadowed.shadow_url.rsplit(":", 1)[1])) as other:
        assert other.url == shadowed.shadow_url
        for i, (path, body, status) in enumerate(asked):
            headers = {"x-request-id": f"request-{i}"}
            assert httpx.post(shadowed.running.url + path, json=body, headers=headers).status_code == status
        shadow = {"x-colonnade-shadow": "1"}
        assert httpx.post(shadowed.running.url + asked[0][0], json=asked[0][1], headers=shadow).status_code == 200
        rows = {row["id"]: row for row in shadowed.comparisons(len(asked), before)}
    assert set(rows) == {f"request-{i}" for i in range(len(asked))}
    for i, (path, _, status) in enumerate(asked):
        row = rows[f"request-{i}"]
        assert (row["route"], row["status"], row["shadow_status"]) == (path, status, status)
        if status == 200:
            assert row["characters"] == row["shadow_characters"] == row["common_prefix"] > 0
    assert shadowed.counts()["compared"] == len(asked)
    assert "The quick" not in shadowed.log.read_text(), "texts are not logged"
    assert shadowed.running.stop(signal.SIGTERM) == (0, "stopping\n", "")
