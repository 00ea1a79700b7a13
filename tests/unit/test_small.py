"""Small messages between GPUs: the kernel compiled for Hopper, and where its way is not taken."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch

import small_allreduce as benchmark
from colonnade.parallel import symmetric_memory
from colonnade.parallel.axis import Axes, Axis
from tests.compiled import compiled, spilled
from tests.worlds import run


def test_what_is_small_is_a_table() -> None:
    table = json.loads(Path(symmetric_memory.__file__).with_name("small_allreduce.json").read_text())
    for ranks in (2, 4, 8):
        sums, gathers = symmetric_memory.size_limits(ranks)
        assert 0 <= sums == table["sum"][str(ranks)] <= symmetric_memory.MAX_BYTES
        assert 0 <= gathers == table["gather"][str(ranks)] <= symmetric_memory.MAX_BYTES
    assert symmetric_memory.size_limits(5) == (0, 0), "a number of ranks that nobody measured"
    assert symmetric_memory.make_small_allreduce(Axis("tp", 5), torch.device("cuda")) is None


def test_a_cpu_has_plain_collectives() -> None:
    axes = Axes(tp=Axis("tp", 2, group="a"))
    assert symmetric_memory.with_small_allreduce(axes, torch.device("cpu")) is axes
    assert axes.tp.small_collectives is None


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed: pip install triton")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("kind", "summed"), [("*bf16", True), ("*i32", False)])
def test_the_kernel_reads_peers_after_all_have_written(kind: str, summed: bool, tmp_path: Path) -> None:
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
    numbers = {"n": "i32", "slot_bytes": "i32"}
    built = compiled(triton_small_allreduce.exchange, types | numbers, constants, tuple(numbers), warps=4)
    ptx = built.asm["ptx"]
    assert "multimem" not in ptx, "NVLink's multicast is not to be used"
    told, heard = ptx.index("atom.global.sys.release.exch"), ptx.rindex("atom.global.sys.acquire")
    assert ptx.index("st.global.v4") < told < heard, "written, told, heard"
    assert "bar.sync" in ptx[ptx.index("st.global.v4") : told], "all threads before one tells"
    assert ptx.count("ld.global.v4", heard) >= 4 * (1 + (kind == "*i32")), "16 bytes at once, of every rank"
    assert "ld.global.v4" not in ptx[told:heard], "no peer's numbers before"
    assert spilled(built, tmp_path) == 0


@pytest.mark.xdist_group("worlds")
def test_the_limit_is_where_the_library_first_is_ahead() -> None:
    theirs = {4096: 20.0, 8192: 20.0, 16384: 20.0, 32768: 20.0}
    ours = {"sum": [5.0, 20.0, 21.0, 9.0], "gather": [21.0, 5.0, 5.0, 5.0]}
    rows = [
        {"what": what, "by": by, "ranks": 2, "bytes": size, "us": us}
        for what, times in ours.items()
        for by, found in (("one kernel", times), ("NCCL", theirs.values()))
        for size, us in zip(theirs, found, strict=True)
    ]
    assert benchmark.limits_of(rows) == {"sum": {"2": 8192}, "gather": {"2": 0}}
    rows = run(2, benchmark.work, 2, True, "cpu")[0]
    assert {(row["what"], row["by"]) for row in rows} == {("sum", "gloo"), ("gather", "gloo")}
    assert benchmark.heads_of(rows) == []
