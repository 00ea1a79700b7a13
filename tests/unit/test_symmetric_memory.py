"""Small all-reduce and all-gather between GPUs: the kernel compiled for Hopper, and when it is not used."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch

import small_allreduce as benchmark
from colonnade.parallel import symmetric_memory
from colonnade.parallel.axis import Axes, Axis
from tests.compiled import compiled, spilled_bytes
from tests.worlds import run


def test_size_limits_come_from_a_table() -> None:
    table = json.loads(Path(symmetric_memory.__file__).with_name("small_allreduce.json").read_text())
    for ranks in (2, 4, 8):
        sums, gathers = symmetric_memory.size_limits(ranks)
        assert 0 <= sums == table["sum"][str(ranks)] <= symmetric_memory.MAX_BYTES
        assert 0 <= gathers == table["gather"][str(ranks)] <= symmetric_memory.MAX_BYTES
    assert symmetric_memory.size_limits(5) == (0, 0), "no measurement for this number of ranks"
    assert symmetric_memory.make_small_allreduce(Axis("tp", 5), torch.device("cuda")) is None


def test_cpu_uses_plain_collectives() -> None:
    axes = Axes(tp=Axis("tp", 2, group="a"))
    assert symmetric_memory.with_small_allreduce(axes, torch.device("cpu")) is axes
    assert axes.tp.small_collectives is None


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed: pip install triton")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("kind", "summed"), [("*bf16", True), ("*i32", False)])
def test_kernel_reads_peers_after_all_have_written(kind: str, summed: bool, tmp_path: Path) -> None:
    from colonnade.parallel import triton_small_allreduce

    types = {"out_ptr": kind, "x_ptr": kind, "slots_ptr": "*i64", "flags_ptr": "*i64", "calls_ptr": "*i32"}
    constants = {
        "RANK": 1,
        "RANKS": 4,
        "BLOCK_R": 4,
        "BLOCK": symmetric_memory.BLOCK,
        "BLOCKS": symmetric_memory.BLOCKS,
        "SUM": summed,
    }
    scalars = {"n": "i32", "slot_bytes": "i32"}
    built = compiled(triton_small_allreduce.exchange, types | scalars, constants, tuple(scalars), warps=4)
    ptx = built.asm["ptx"]
    assert "multimem" not in ptx, "NVLink multicast must not be used"
    signalled, waited = ptx.index("atom.global.sys.release.exch"), ptx.rindex("atom.global.sys.acquire")
    assert ptx.index("st.global.v4") < signalled < waited, "write, signal, wait"
    assert "bar.sync" in ptx[ptx.index("st.global.v4") : signalled], "all threads must finish before one signals"
    assert ptx.count("ld.global.v4", waited) >= 4 * (1 + (kind == "*i32")), "16 bytes at a time, from every rank"
    assert "ld.global.v4" not in ptx[signalled:waited], "no peer's values are read before the wait"
    assert spilled_bytes(built, tmp_path) == 0


def test_limit_is_the_first_size_where_nccl_is_faster() -> None:
    nccl = {4096: 20.0, 8192: 20.0, 16384: 20.0, 32768: 20.0}
    ours = {"sum": [5.0, 20.0, 21.0, 9.0], "gather": [21.0, 5.0, 5.0, 5.0]}
    rows = [
        {"what": what, "by": by, "ranks": 2, "bytes": size, "us": us}
        for what, times in ours.items()
        for by, found in (("one kernel", times), ("NCCL", nccl.values()))
        for size, us in zip(nccl, found, strict=True)
    ]
    assert benchmark.limits_of(rows) == {"sum": {"2": 8192}, "gather": {"2": 0}}
    rows = run(2, benchmark.work, 2, True, "cpu")[0]
    assert {(row["what"], row["by"]) for row in rows} == {("sum", "gloo"), ("gather", "gloo")}
    assert benchmark.heads_of(rows) == []
