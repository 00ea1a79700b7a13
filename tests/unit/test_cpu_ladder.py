"""The ladder of CPU serving: its load generator, its image service, and its steps."""

import json
import math
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch

import cpu_ladder
from harness import image_worker
from harness.http_load import LoadResult, closed_loop, open_loop
from harness.resnet import classifier


@pytest.mark.parametrize(("name", "parameters"), [("resnet50", 25_557_032), ("resnet18", 11_689_512)])
def test_resnet_has_the_published_size(name: str, parameters: int):
    with torch.device("meta"):
        assert sum(weight.numel() for weight in classifier(name).parameters()) == parameters


@pytest.mark.parametrize("size", [32, 65])
def test_resnet_halves_five_times(size: int):
    """The last feature map has 1/32 of height and width, rounded up; logits are finite and differ between images."""
    network = classifier("resnet18")
    x_BCHW = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(1))
    features = network.blocks(network.pool(network.stem(x_BCHW).relu()))
    assert features.shape == (2, 512, math.ceil(size / 32), math.ceil(size / 32))
    logits_BK = network(x_BCHW)
    assert logits_BK.shape == (2, 1000) and bool(logits_BK.isfinite().all())
    assert not torch.allclose(logits_BK[0], logits_BK[1])
    assert torch.allclose(network(x_BCHW[1:])[0], logits_BK[1], atol=1e-5), "requests do not affect each other"


@contextmanager
def slow_server(delay_s: float, fail_every: int = 0) -> Iterator[str]:
    """A server that answers after ``delay_s``, and every so many times with a 500."""
    numbers, lock = iter(range(1, 1 << 30)), threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            with lock:
                number = next(numbers)
            time.sleep(delay_s)
            self.send_response(500 if fail_every and number % fail_every == 0 else 200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def test_closed_loop_waits_for_answers():
    with slow_server(0.05) as url:
        served = closed_loop([url], {"content": b"x"}, clients=3, seconds=0.5)
    assert served.failures == 0
    assert 3 <= len(served.latencies_s) <= 33, "3 clients with at most 10 answers each, and one that is awaited"
    assert served.seconds >= 0.5 and served.requests_per_s == len(served.latencies_s) / served.seconds
    assert min(served.latencies_s) >= 0.05 and served.percentile_ms(50) >= 50


def test_what_is_not_answered_in_time_is_cancelled_and_counted():
    with slow_server(1.0) as url:
        served = closed_loop([url], {"content": b"x"}, clients=2, seconds=0.1, patience_s=0.1)
    assert not served.latencies_s and served.requests_per_s == 0 and served.seconds < 1
    assert len(served.unanswered_s) == 2 and 190 <= served.percentile_ms(50) < 1000


def test_open_loop_does_not_wait_for_answers():
    with slow_server(1.0) as url:
        served = open_loop([url, url], {"content": b"x"}, rate=40, seconds=0.5)
    assert len(served.latencies_s) > 5, "arrivals did not wait for the first answer"
    assert served.seconds > 1, "the rate counts the time until the last answer"
    assert min(served.latencies_s) >= 1


def test_failures_are_counted_apart():
    with slow_server(0.01, fail_every=2) as url:
        served = closed_loop([url], {"content": b"x"}, clients=1, seconds=0.3)
    assert abs(served.failures - len(served.latencies_s)) <= 1
    refused = closed_loop(["http://127.0.0.1:1"], {"content": b"x"}, clients=1, seconds=0.05)
    assert refused.failures > 0 and not refused.latencies_s and math.isnan(refused.percentile_ms(50))


@pytest.mark.parametrize(("percent", "expected"), [(50, 50), (95, 95), (99, 99), (100, 100), (1, 1), (99.5, 100)])
def test_percentiles_by_nearest_rank(percent: float, expected: int):
    served = LoadResult(1, [i / 1e3 for i in range(100, 0, -1)])
    assert served.percentile_ms(percent) == pytest.approx(expected)


@pytest.mark.slow
@pytest.mark.parametrize(("overlap", "cpus"), [(True, ()), (True, (0,)), (False, ())])
def test_image_worker_answers_as_the_network(overlap: bool, cpus: tuple[int, ...]):
    """With eight clients at once, stages overlapped or not, on any CPU or on one."""
    network, photo = classifier("resnet18"), cpu_ladder.photo(48, 64)
    logits_1K = network(image_worker.prepare(photo, 40, torch.float32))
    expected = json.loads(image_worker.answer(logits_1K))
    assert [each["class"] for each in expected] == logits_1K[0].topk(5).indices.tolist()
    answers: list[bytes] = []
    handler = image_worker.handler(network, 40, torch.float32, overlap=overlap, decode_cpus=cpus)
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        import httpx

        def ask() -> None:
            answers.append(httpx.post(f"http://127.0.0.1:{server.server_port}", content=photo, timeout=120).content)

        clients = [threading.Thread(target=ask) for _ in range(8)]
        for each in clients:
            each.start()
        for each in clients:
            each.join()
    finally:
        server.shutdown()
        server.server_close()
    for each in map(json.loads, answers):
        assert [best["class"] for best in each] == [best["class"] for best in expected]
        assert each[0]["probability"] == pytest.approx(expected[0]["probability"], rel=1e-5)
    assert len(answers) == 8


def test_prepared_image_is_normalised():
    x_1CHW = image_worker.prepare(cpu_ladder.photo(48, 64), 40, torch.float32)
    assert x_1CHW.shape == (1, 3, 40, 40) and x_1CHW.is_contiguous()
    white = (1 - torch.tensor(image_worker.MEAN)) / torch.tensor(image_worker.STD)
    black = -torch.tensor(image_worker.MEAN) / torch.tensor(image_worker.STD)
    assert (x_1CHW.amax((0, 2, 3)) <= white + 1e-5).all() and (x_1CHW.amin((0, 2, 3)) >= black - 1e-5).all()


def test_steps_on_eight_cores():
    settings = cpu_ladder.Settings(workers=4, cores=8, clients=16, seconds=1, rate=None)
    for service in ("image", "text", "chat"):
        default, aligned, pinned, *_ = cpu_ladder.steps_of(service, settings)
        assert [step.name for step in (default, aligned, pinned)] == ["default", "aligned", "pinned"]
        assert (default.threads, aligned.threads) == (8, 2) and pinned.pinned and not aligned.pinned
        assert "OMP_NUM_THREADS" in cpu_ladder.environment(aligned) and not cpu_ladder.environment(pinned)
    assert [step.weights for step in cpu_ladder.steps_of("chat", settings)[3:]] == ["int8", "int4", "int4"]
    assert [step.name for step in cpu_ladder.steps_of("text", settings)[3:]] == [
        "bfloat16",
        "student",
        "pinned, token ids",
        cpu_ladder.PINNED_ASLEEP,
    ]
    assert cpu_ladder.environment(cpu_ladder.steps_of("image", settings)[-1])["GOMP_SPINCOUNT"] == "0"


def test_own_thread_settings_are_not_inherited(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    with cpu_ladder.without_thread_settings():
        assert not {*cpu_ladder.THREAD_VARIABLES} & {*os.environ}
    assert os.environ["OMP_NUM_THREADS"] == "7"


def test_plot_and_headlines(tmp_path: Path):
    rows = [
        {"service": "image", "step": step, "requests_per_s": 2.0 * i, "over_default": 1.0 * i}
        for i, step in enumerate(["default", "aligned", "pinned", "pinned, stages in turn"], 1)
    ]
    cpu_ladder.draw(rows, tmp_path / "ladder.png")
    assert (tmp_path / "ladder.png").stat().st_size > 5_000
    (head,) = cpu_ladder.headlines(rows)
    assert (head.value, head.peer_value) == (6.0, 2.0)


@pytest.mark.parametrize("described", [cpu_ladder.__doc__, "An older description.\n\n    and its table\n"])
def test_records_of_one_machine_are_joined(described: str, tmp_path: Path):
    """The conditions of each are kept; the description of the benchmark stands there once, as it is now."""
    for folder, service, cores, commit in (
        ("a", "text", 8, "1"),
        ("b", "chat", 8, "1"),
        ("c", "chat", 2, "1"),
        ("d", "chat", 8, "2"),
    ):
        (tmp_path / folder).mkdir()
        steps = [
            {"service": service, "step": step, "requests_per_s": 2.0, "over_default": 1.0}
            for step in ("default", "pinned")
        ]
        record = {
            "machine": {"cores": cores},
            "versions": {"torch": "2"},
            "commit": commit,
            "rows": steps,
            "notes": f"{described}\nnotes of {service}",
            "command": f"run {service}",
        }
        (tmp_path / folder / "cpu_ladder.json").write_text(json.dumps(record))
    services = ("text", "chat")
    cpu_ladder.join([tmp_path / "a", tmp_path / "b"], services, "cpu_ladder_8", tmp_path)
    joined = json.loads((tmp_path / "cpu_ladder_8.json").read_text())
    assert (joined["name"], joined["command"], len(joined["rows"])) == ("cpu_ladder_8", "run text & run chat", 4)
    assert joined["notes"] == f"{cpu_ladder.__doc__}\ntext: notes of text\nchat: notes of chat"
    assert len(joined["headlines"]) == 2
    assert {row["service"] for row in cpu_ladder.rows_by_cores(tmp_path)} == {"text, 8 cores", "chat, 8 cores"}
    for folder, key in (("c", "machine"), ("d", "commit")):
        with pytest.raises(ValueError, match=f"differ in {key}"):
            cpu_ladder.join([tmp_path / "a", tmp_path / folder], services, "x", tmp_path)


def test_services_of_a_joined_record_are_chosen(tmp_path: Path):
    rows = [{"service": service, "step": "pinned", "requests_per_s": 2.0} for service in ("image", "chat")]
    record = {"machine": {}, "versions": {}, "commit": "1", "command": "run", "rows": rows}
    record["notes"] = "A description.\n\nimage: at a load of 4\nchat: at a load of 5\nLeft out: a row"
    (tmp_path / "cpu_ladder.json").write_text(json.dumps(record))
    cpu_ladder.join([tmp_path], ["chat"], "chat", tmp_path)
    chosen = json.loads((tmp_path / "chat.json").read_text())
    assert chosen["rows"] == rows[1:] and chosen["notes"] == f"{cpu_ladder.__doc__}\nchat: at a load of 5"


@pytest.mark.slow
def test_benchmark_runs_to_the_end(capsys: pytest.CaptureFixture[str]):
    cpu_ladder.main(["--tiny", "--workers", "1", "--clients", "2"])
    printed = capsys.readouterr().out
    for step in ("default", "aligned", "pinned", "bfloat16", "student", "pinned, stages in turn"):
        assert f"service image  step {step}  requests_per_s" in printed
    assert "failures 0" in printed
