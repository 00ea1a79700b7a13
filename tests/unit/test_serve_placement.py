"""Cores and GPUs are divided among replicas, or the server says before it loads that they are too few."""

from pathlib import Path

import pytest

from colonnade.config import Plan, ServeConfig
from colonnade.errors import ConfigError
from colonnade.serve.continuation import Progress
from colonnade.serve.pooling_request import PoolingOutput, PoolingRequest
from colonnade.serve.replica_placement import ANYWHERE, core_blocks, gpu_blocks, neighbours, place_engines
from colonnade.serve.replicas import sum_stats
from colonnade.serve.request import Stats
from colonnade.serve.server import serve
from tests.serve import tiny


def test_cores_are_divided_without_rest():
    assert core_blocks(range(8), 2) == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert core_blocks([3, 5, 9], 3) == [(3,), (5,), (9,)]
    blocks = core_blocks(range(10), 4)
    assert [len(block) for block in blocks] == [2, 3, 2, 3] and sorted(sum(blocks, ())) == list(range(10))


def test_hardware_threads_of_a_core_stay_together(tmp_path: Path):
    """2 sockets of 2 cores with 2 threads, numbered as Linux does: first threads first."""
    for cpu in range(8):
        folder = tmp_path / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "physical_package_id").write_text(f"{cpu % 4 // 2}\n")
        (folder / "core_id").write_text(f"{cpu % 2}\n")
    assert neighbours(range(8), tmp_path) == [0, 4, 1, 5, 2, 6, 3, 7]
    assert neighbours([7, 2, 0], tmp_path) == [0, 2, 7]
    assert neighbours([2, 0], tmp_path / "missing") == [0, 2]


def test_gpus_are_divided_by_world_size():
    assert gpu_blocks("4567", 2, 2) == [("4", "5"), ("6", "7")]
    with pytest.raises(ConfigError, match=r"2 replicas of 4 ranks need 8 GPUs, and this machine has 4 GPUs; .* most 1"):
        gpu_blocks("4567", 2, 4)
    with pytest.raises(ConfigError, match="this machine has 0 GPUs"):
        gpu_blocks("", 2, 1)


def test_one_engine_is_not_placed():
    assert place_engines(1, 1, Plan(), "auto") == [[ANYWHERE]]


def test_too_many_replicas_are_refused_before_loading():
    lines: list[str] = []
    with pytest.raises(ConfigError, match=r"1000 replicas need a core each, .* set --serve.replicas to at most \d+"):
        serve({"tiny": tiny.load}, config=ServeConfig(replicas=1000, port=0), device="cpu", announce=lines.append)
    assert not lines


def test_embeddings_that_were_delivered_are_not_delivered_again():
    request = PoolingRequest(["a", "b"], [("input", 2)], timeout_s=1e6)
    progress = Progress(request)
    one = PoolingOutput("x", "", 1, "stop")
    assert progress.observe(1, one)
    left = progress.remaining()
    assert left.num_completions == 2 and left.timeout_s is not None and left.timeout_s < 1e6
    assert progress.observe(0, one) and not progress.observe(1, one)


def test_stats_of_replicas_are_added():
    a = Stats(running=1, pages=8, pages_used=2, finished={"stop": 2})
    b = Stats(running=2, pages=8, pages_used=6, finished={"stop": 1, "length": 1})
    total = sum_stats([a, b])
    assert (total.running, total.cache_usage, total.finished) == (3, 0.5, {"stop": 3, "length": 1})
    assert a.finished == {"stop": 2}
