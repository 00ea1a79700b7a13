"""Cores and GPUs are divided among replicas, or the server says before it loads that they are too few."""

from pathlib import Path

import pytest

from colonnade.config import Plan, ServeConfig
from colonnade.cores import Cpu, Machine
from colonnade.errors import ConfigError
from colonnade.serve.continuation import Progress
from colonnade.serve.pooling_request import PoolingOutput, PoolingRequest
from colonnade.serve.replica_placement import ANYWHERE, gpu_blocks, has_gpu_devices, place_engines
from colonnade.serve.replicas import sum_stats
from colonnade.serve.request import Stats
from colonnade.serve.server import serve
from tests.serve import tiny


def test_gpus_are_divided_by_world_size():
    assert gpu_blocks("4567", 2, 2) == [("4", "5"), ("6", "7")]
    with pytest.raises(ConfigError, match=r"2 replicas of 4 ranks need 8 GPUs, and this machine has 4 GPUs; .* most 1"):
        gpu_blocks("4567", 2, 4)
    with pytest.raises(ConfigError, match="this machine has 0 GPUs"):
        gpu_blocks("", 2, 1)


def test_replicas_on_cores():
    machine = Machine(tuple(Cpu(i, i, node=i // 4) for i in range(8)))
    placements, warning = place_engines(1, "auto", Plan(), "cpu", machine)
    assert [each.cpus and each.cpus.cpus for each in placements[0]] == [(0, 1, 2, 3), (4, 5, 6, 7)] and not warning
    placements, warning = place_engines(1, 3, Plan(), "cpu", machine)
    assert len(placements[0]) == 3 and "use 6 of 8 cores and leave 25% idle" in warning and "replicas 2 or 4" in warning


def test_several_ranks_on_a_cpu_are_announced():
    machine = Machine(tuple(Cpu(i, i, node=i // 4) for i in range(8)))
    _, warning = place_engines(1, 1, Plan(tp=2), "cpu", machine)
    assert warning.startswith("on a CPU 2 ranks launch each kernel") and "remove --plan.tp" in warning
    _, warning = place_engines(1, 2, Plan(tp=2), "cpu", machine)
    assert "on a CPU 2 ranks" in warning
    assert not place_engines(1, 2, Plan(), "cpu", machine)[1]


def test_one_engine_on_a_machine_with_gpus_is_not_placed(monkeypatch: pytest.MonkeyPatch):
    """And torch, which would tell whether it can use them, is not asked."""
    monkeypatch.setattr("colonnade.serve.replica_placement.has_gpu_devices", lambda: True)
    assert place_engines(1, 1, Plan(), "auto") == ([[ANYWHERE]], "")


def test_models_share_cores_and_memory():
    machine = Machine(tuple(Cpu(i, i, node=i // 4) for i in range(8)))
    placements, _ = place_engines(3, 2, Plan(), "cpu", machine)
    assert [[each.cpus and each.cpus.cpus for each in several] for several in placements] == [
        [(0, 1, 2, 3), (4, 5, 6, 7)]
    ] * 3
    assert all(each.engines == 3 and each.cpus and not each.cpus.owned for several in placements for each in several)


def test_gpu_devices(tmp_path: Path):
    (tmp_path / "null").touch()
    (tmp_path / "nvidiactl").touch()
    assert not has_gpu_devices(tmp_path)
    (tmp_path / "nvidia3").touch()
    assert has_gpu_devices(tmp_path)


def test_too_many_replicas_are_refused_before_loading():
    lines: list[str] = []
    with pytest.raises(ConfigError, match=r"1000 replicas need one core each, .* set --serve.replicas to at most \d+"):
        serve({"tiny": tiny.load}, config=ServeConfig(replicas=1000, port=0), device="cpu", announce=lines.append)
    assert not lines


def test_embeddings_that_were_delivered_are_not_delivered_again():
    request = PoolingRequest(["a", "b"], [("input", 2)], timeout_s=1e6)
    progress = Progress(request)
    one = PoolingOutput("x", "", 1, "stop")
    assert progress.observe(1, one)
    left = progress.remaining_request()
    assert left.num_completions == 2 and left.timeout_s is not None and left.timeout_s < 1e6
    assert progress.observe(0, one) and not progress.observe(1, one)


def test_stats_of_replicas_are_added():
    a = Stats(running=1, pages=8, pages_used=2, finished={"stop": 2})
    b = Stats(running=2, pages=8, pages_used=6, finished={"stop": 1, "length": 1})
    total = sum_stats([a, b])
    assert (total.running, total.cache_usage, total.finished) == (3, 0.5, {"stop": 3, "length": 1})
    assert a.finished == {"stop": 2}
