"""Size of the KV cache chosen from the free memory, and memory that is taken only when a page is first written."""

import json
import os
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from colonnade.config import ServeConfig
from colonnade.config.presets import preset
from colonnade.errors import CapacityError
from colonnade.model import KVCache, Transformer
from colonnade.parallel import device_memory
from colonnade.serve import Engine, SamplingParams
from colonnade.serve.cache_size import affordable_pages, size_cache
from colonnade.serve.memory_advice import check_memory
from colonnade.serve.memory_estimate import EngineSpec
from tests.serve import tiny

CPU, GPU = torch.device("cpu"), torch.device("cuda")
GIB = 1 << 30
LLAMA = EngineSpec(preset("llama-2-7b"), ServeConfig(graph_capture=True), torch.bfloat16, GPU)


def pages_of(spec: EngineSpec) -> int:
    return spec.page_count


@pytest.mark.parametrize(
    ("spec", "share"),
    [
        (LLAMA, 0.9),
        (replace(LLAMA, serve=LLAMA.serve.replace(memory_bytes=1)), 1),
        (replace(LLAMA, device=CPU), 0.25),
        (replace(LLAMA, tp=2, serve=LLAMA.serve.replace(cache="float8")), 0.9),
        (replace(LLAMA, cp=4), 0.9),
    ],
    ids=["gpu", "memory_bytes", "cpu", "tp", "cp"],
)
@pytest.mark.parametrize("available", [14 * GIB, 22 * GIB, 70 * GIB])
def test_the_cache_takes_its_share_of_what_is_left(spec: EngineSpec, share: float, available: int):
    """As many pages as possible: with one more the cache would exceed its share."""
    sized = size_cache(spec, available)
    needs = sized.needs()
    assert needs.cache == pages_of(sized) * sized.page_bytes and needs.total <= available
    rest = available - (needs.total - needs.cache)
    more = spec.needs_with(pages_of(sized) + 1)
    assert needs.cache <= share * rest
    if pages_of(sized) < pages_of(spec):
        assert more.cache > share * (available - (more.total - more.cache))


def test_llama_on_an_h100_holds_a_hundred_thousand_tokens():
    usable = int(device_memory.USABLE_FRACTION * 79 * GIB)
    assert affordable_pages(LLAMA, usable) * 64 > 100_000


def test_the_cache_never_exceeds_whole_contexts_of_max_requests():
    one = replace(LLAMA, serve=LLAMA.serve.replace(max_requests=1))
    assert pages_of(size_cache(one, 1 << 50)) == 4096 // 64 + 1  # and the scratch page
    assert pages_of(size_cache(LLAMA, 1 << 50)) == 64 * 4096 // 64 + 1


def test_a_size_that_is_set_is_kept():
    for serve in (ServeConfig(pages=7), ServeConfig(cache_bytes=1 << 28)):
        spec = replace(LLAMA, serve=serve)
        assert size_cache(spec, 1 << 50) is spec


def test_without_room_for_a_page_the_table_has_one_whole_context():
    with pytest.raises(CapacityError) as caught:
        check_memory(replace(LLAMA, serve=LLAMA.serve.replace(memory_bytes=12 * GIB)))
    table = str(caught.value)
    assert "does not fit into the memory of a rank on cuda" in table
    assert f"  {(4096 + 64) * 524288 / GIB:.4g} GiB" in table
    assert "--serve.weights int8" in table and "enough" in table


def test_a_second_server_takes_its_share_of_what_is_left(monkeypatch: pytest.MonkeyPatch):
    """Free memory of the host shrinks as the first writes its pages."""
    model = tiny.model(dtype=torch.float32)
    wide = ServeConfig(max_requests=4096, token_budget=16)
    spec = EngineSpec(model.config, wide, torch.float32, CPU)
    free, pages = 64 << 20, []
    for _ in range(2):
        monkeypatch.setattr("colonnade.parallel.device_memory.free_host_bytes", lambda free=free: free)
        engine = Engine(model, tiny.tokenizer(), wide)
        pages.append(engine.cache.pages)
        assert engine.cache.bytes < free / 4
        free -= engine.cache.bytes
    assert 0 < pages[1] < pages[0] < pages_of(spec)


def test_free_memory_is_that_of_a_cgroup(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """A container's limit, in the files of version 2."""
    (tmp_path / "self").mkdir()
    (tmp_path / "meminfo").write_text("MemTotal: 99999999 kB\nMemAvailable: 99999999 kB\n")
    (tmp_path / "self" / "cgroup").write_text("0::/\n")
    mount = tmp_path / "cgroup"
    (tmp_path / "self" / "mountinfo").write_text(f"41 31 0:38 / {mount} rw - cgroup2 cgroup2 rw\n")
    mount.mkdir()
    (mount / "memory.max").write_text(f"{32 << 20}\n")
    (mount / "memory.current").write_text(f"{8 << 20}\n")
    monkeypatch.setattr(device_memory, "free_host_bytes", lambda read=device_memory.free_host_bytes: read(tmp_path))
    wide = ServeConfig(max_requests=4096, token_budget=16)
    cache = Engine(tiny.model(dtype=torch.float32), tiny.tokenizer(), wide).cache
    assert 2 << 20 < cache.bytes <= int(0.95 * (24 << 20)) // 4


ENGINE = """
import json, resource, sys, torch
from colonnade.config import ServeConfig
from colonnade.parallel.device_memory import free_host_bytes
from colonnade.serve import Engine, SamplingParams
from tests.serve import tiny

resident = lambda: int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()
model, free = tiny.model(dtype=torch.float32), free_host_bytes()
before = resident()
engine = Engine(model, tiny.tokenizer(), ServeConfig(max_requests=1 << 16, token_budget=16))
text = engine.generate(["The quick"], SamplingParams(max_tokens=4))[0].text
print(json.dumps({"free": free, "cache": engine.cache.bytes, "grown": resident() - before, "text": text}))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").is_file(), reason="needs Linux's /proc")
def test_an_untouched_cache_takes_no_memory_and_respects_ulimit():
    """Under ``ulimit -v`` the free address space counts; pages without tokens are not resident."""
    limit = 4 * GIB
    done = subprocess.run(
        [sys.executable, "-c", ENGINE], capture_output=True, text=True, timeout=120, check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["free"] < limit
    assert 256 << 20 < seen["cache"] <= seen["free"] / 4
    assert seen["grown"] < 128 << 20, "all pages are resident"


def test_pools_are_aligned_zeros():
    for kind, dtype in (("stored", torch.bfloat16), ("float8", torch.float32)):
        cache = KVCache(tiny.config(), pages=3, page_tokens=4, dtype=dtype, kind=kind)
        for pool in (*cache.k, *cache.v):
            assert pool.data_ptr() % 64 == 0 and pool.is_contiguous() and not pool.float().any()
        assert len({pool.data_ptr() for pool in (*cache.k, *cache.v)}) == 4


def test_one_request_at_a_time_gets_one_context():
    model: Transformer = tiny.model(dtype=torch.float32)
    engine = Engine(model, tiny.tokenizer(), ServeConfig(max_requests=1))
    assert engine.scheduler.pool.tokens == model.config.context
    assert engine.generate(["The quick"], SamplingParams(max_tokens=3, ignore_eos=True))[0].token_ids
