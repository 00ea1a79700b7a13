"""Flash-Decoding kernels compiled for Hopper without a GPU: they fit, use tensor cores and spill little."""

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

from tests.compiled import (
    SHARED_BYTES,
    SPILLED_BYTES,
    compiled,
    disassembled,
    loop_instructions,
    registers,
    spilled_bytes,
)

pytestmark = [
    pytest.mark.sample(6),
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None, reason="triton is not installed: pip install triton"
    ),
    pytest.mark.filterwarnings("ignore"),
]

MERGE_REGISTERS = 56
"""Registers per thread of the merge kernel at head width 128."""
EVERY_WIDTH = (64, 80, 96, 112, 128, 192, 256)
STRIDES = [
    *("queries.token", "queries.head", "keys.page", "keys.token", "keys.head", "values.page", "values.token"),
    *("values.head", "latents.page", "latents.token", "k_t"),
]
"""Strides known to be multiples of 16, as in real layers."""
INTEGERS = dict.fromkeys(
    ("pages_r", "columns", "pages", "items_at", "merges_at", "firsts_at", "groups_at", "shared_at", "used"), "i32"
)


def attend_types(queries: str = "*bf16", cache: str = "*bf16", members: str = "constexpr") -> dict[str, Any]:
    """Types of the arguments of the decode and prefill kernels."""
    from colonnade.kernels.attention.triton_args import Batch, Cache, Mods, Output, Queries

    keys, scales = Cache(cache, "i32", "i32", "i32"), ("*fp32", "*fp32", "*fp32", "*fp32", "*bf16")
    return INTEGERS | {
        "queries": Queries(queries, "i32", "i32"), "keys": keys, "values": keys,
        "output": Output(queries, "*fp32", "*fp32", "*fp32"), "plan_ptr": "*i32",
        "batch": Batch("*i32", "*i32", "*i32", members), "mods": Mods("fp32", "fp32", *scales),
    }  # fmt: skip


def mla_types(cache: str = "*bf16", *, scaled: bool = False) -> dict[str, Any]:
    """Types of the arguments of the MLA kernel."""
    from colonnade.kernels.attention.triton_args import Batch, Cache, Output, Queries

    scales = ("*fp32", "i32", "i32") if scaled else ("constexpr", "constexpr", "constexpr")
    return INTEGERS | {
        "queries": Queries("*bf16", "i32", "i32"), "latents": Cache(cache, "i32", "i32", "constexpr"),
        "scales": Cache(*scales, "constexpr"), "output": Output("*bf16", "*fp32", "*fp32", "*fp32"),
        "plan_ptr": "*i32", "batch": Batch("*i32", "*i32", "*i32", "constexpr"), "scale": "fp32",
    }  # fmt: skip


def merge_types() -> dict[str, Any]:
    """Types of the arguments of the merge kernels."""
    from colonnade.kernels.attention.triton_args import Output, SharedStates

    plain = dict.fromkeys(("plan_ptr", "cu_ptr", "lengths_ptr"), "*i32") | {"sinks_ptr": "*fp32"}
    shared = SharedStates("*fp32", "*fp32", "*i32", "*i32")
    return INTEGERS | plain | {"output": Output("*bf16", "*fp32", "*fp32", "*fp32"), "shared": shared}


def with_config(constants: dict[str, Any]) -> dict[str, Any]:
    """``constants`` plus the kernel's configuration tuple built from them."""
    from colonnade.kernels.attention.triton_args import Config, MergeConfig, MlaConfig

    kind = MlaConfig if "RANK" in constants else MergeConfig if "WAIT" in constants else Config
    return constants | {"cfg": kind(**{name: x for name, x in constants.items() if name in kind._fields})}


def cases() -> list[Any]:
    """Cases of width, rows, page size, cache type, chunks and options; those that compile slowly are marked
    ``long``.
    """
    plain = {"PAGE": 256, "WINDOW": 0, "CAPPED": False, "SLOPES": False, "SINKS": False, "SCALED": False}
    params = []
    for rows, widths in ((16, EVERY_WIDTH), (64, (64, 128, 256))):
        for width in widths:
            marks = [] if (width, rows) in ((128, 16), (256, 64)) else [pytest.mark.long]
            params.append(pytest.param(width, rows, "*bf16", plain, id=f"width-{width}-{rows}-rows", marks=marks))
            if rows == 16:
                marks, more = [] if width == 128 else [pytest.mark.long], {**plain, "CHUNK": 512}
                params.append(pytest.param(width, rows, "*bf16", more, id=f"width-{width}-chunks", marks=marks))
    params.append(pytest.param(128, 16, "*bf16", {**plain, "PAGE": 64}, id="pages-of-a-tile"))
    all_options = {"PAGE": 16, "WINDOW": 4096, "CAPPED": True, "SLOPES": True, "SINKS": True, "SCALED": False}
    params.append(pytest.param(128, 16, "*bf16", all_options, id="all-options"))
    params.append(
        pytest.param(
            128, 16, "*bf16", {**all_options, "CHUNK": 512}, id="all-options-in-chunks", marks=pytest.mark.long
        )
    )
    relative = {**plain, "PAGE": 16, "NEAR": 128}
    params.append(pytest.param(64, 16, "*bf16", relative, id="relative-biases"))
    for kind in ("*fp8e4nv", "*i8"):
        eight_bit = {**plain, "PAGE": 16, "SCALED": True}
        params.append(pytest.param(128, 16, kind, eight_bit, id=f"cache-of-{kind[1:]}", marks=pytest.mark.long))
    return params


@pytest.mark.sample(1)
@pytest.mark.parametrize(("width", "rows", "cache", "more"), cases())
def test_decode_kernel_fits_the_gpu(width: int, rows: int, cache: str, more: dict, tmp_path: Path) -> None:
    from colonnade.kernels.attention import triton_split_kv
    from colonnade.kernels.attention.decode_tiles import choose_tiles
    from colonnade.kernels.attention.triton_decode import prefetch_options

    tiles = choose_tiles(rows, width, 2, 2)
    constants = {
        "N": 32, "GROUP": 8, "H": width, "LAUNCH_MERGE": True, "SINGLE": not more["SINKS"],
        "SAME_STRIDES": not more["SINKS"], "ROWS": rows, "TILE": tiles.tile, "STAGES": tiles.stages,
        "BLOCK_H": 1 << (width - 1).bit_length(), **more,
    }  # fmt: skip
    types = attend_types(cache=cache)
    constants |= prefetch_options(rows, tiles, more["PAGE"], kv8=False)
    built = compiled(triton_split_kv.attend, types, with_config(constants), STRIDES, warps=tiles.warps, stages=3)
    # The table's number of workers fits on one SM, together with blocks of the merge kernel.
    assert built.metadata.shared * tiles.workers <= SHARED_BYTES
    if "maxnreg" in constants:
        assert 32 * tiles.warps * (tiles.workers * registers(built, tmp_path) + 2 * MERGE_REGISTERS) <= 2**16
    assert spilled_bytes(built, tmp_path) <= SPILLED_BYTES
    assert "mma" in built.asm["ptx"]
    # Keys and values are copied 16 bytes at a time, and the loop waits only for copies of an earlier step.
    assert re.search(r"cp\.async\.cg[^;]*, 0x10", built.asm["ptx"])
    assert max(map(int, re.findall(r"cp\.async\.wait_group\s+(\d+)", built.asm["ptx"]))) >= 2 * (tiles.stages - 2)
    assert ("griddepcontrol.launch_dependents" in built.asm["ptx"]) == constants["LAUNCH_MERGE"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("width", "rows", "kind", "queries", "page", "most"),
    [
        pytest.param(128, 16, "float8", "*bf16", 16, 530, id="small-pages"),
        pytest.param(128, 16, "float8", "*bf16", 256, 450, id="pages", marks=pytest.mark.long),
        pytest.param(128, 16, "float8", "*fp16", 256, 450, id="float16", marks=pytest.mark.long),
        pytest.param(128, 16, "int8", "*bf16", 16, 650, id="int8", marks=pytest.mark.long),
        pytest.param(80, 16, "float8", "*bf16", 16, 530, id="width-80", marks=pytest.mark.long),
        pytest.param(256, 64, "int8", "*bf16", 64, 1000, id="many-rows", marks=pytest.mark.long),
    ],
)
def test_eight_bit_values_are_converted_in_registers(
    width: int, rows: int, kind: str, queries: str, page: int, most: int, tmp_path: Path
) -> None:
    from colonnade.kernels.attention import triton_split_kv
    from colonnade.kernels.attention.decode_tiles import choose_tiles
    from colonnade.kernels.attention.triton_decode import prefetch_options

    tiles = choose_tiles(rows, width, 2, 2)
    constants = {
        "N": 32, "GROUP": 8, "H": width, "PAGE": page, "WINDOW": 0, "CAPPED": False, "SLOPES": False, "SINKS": False,
        "SCALED": True, "LAUNCH_MERGE": True, "SINGLE": True, "SAME_STRIDES": page == 16, "ROWS": rows,
        "TILE": tiles.tile, "STAGES": tiles.stages, "BLOCK_H": 1 << (width - 1).bit_length(), "KV8": kind, "ASM": True,
    }  # fmt: skip
    constants |= prefetch_options(rows, tiles, page, kv8=True)
    types = attend_types(queries, "*i16")
    built = compiled(triton_split_kv.attend, types, with_config(constants), STRIDES, warps=tiles.warps, stages=3)
    assert built.metadata.shared * tiles.workers <= SHARED_BYTES
    assert spilled_bytes(built, tmp_path) <= SPILLED_BYTES
    ptx = built.asm["ptx"]
    assert re.search(r"cp\.async\.cg[^;]*, 0x10", ptx)
    assert max(map(int, re.findall(r"cp\.async\.wait_group\s+(\d+)", ptx))) >= 2 * (tiles.stages - 2)
    # Tiles are loaded from shared memory as float16 ones are, and each value is converted once.
    body = loop_instructions(disassembled(built, tmp_path), "MMA", inner=True)
    assert any("LDSM.16" in line for line in body)
    converted = sum(("E4M3.UNPACK" if kind == "float8" else "HADD2 ") in line for line in body)
    assert converted == tiles.tile * constants["BLOCK_H"] // (32 * tiles.warps)
    # Each instruction converts two values; the scalar conversions are several times slower.
    assert not any(re.search(r"\b(F2F|I2F)\.", line) for line in body)
    assert len(body) <= most, len(body)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("width", "rows", "listed", "more"),
    [
        pytest.param(128, 128, False, {}, id="prompts"),
        pytest.param(128, 128, True, {}, id="groups", marks=pytest.mark.long),
        pytest.param(128, 128, True, {"TMA": True, "OVERLAP": True}, id="groups-by-tma"),
        pytest.param(256, 64, False, {"PAGE": 16, "WINDOW": 4096}, id="width-256", marks=pytest.mark.long),
        pytest.param(64, 128, False, {"CAPPED": True, "SINKS": True}, id="width-64", marks=pytest.mark.long),
        pytest.param(80, 128, True, {"SLOPES": True, "PAGE": 16}, id="width-80", marks=pytest.mark.long),
    ],
)
def test_prefill_kernel_fits_the_gpu(width: int, rows: int, listed: bool, more: dict, tmp_path: Path) -> None:
    from colonnade.kernels.attention import triton_prefill
    from colonnade.kernels.attention.decode_tiles import choose_tiles

    tiles = choose_tiles(rows, width, 2, 2)
    constants = {
        "N": 32, "GROUP": 8, "H": width, "PAGE": 256, "WINDOW": 0, "CAPPED": False, "SLOPES": False, "SINKS": False,
        "SCALED": False, "GROUPED": listed, "TMA": False, "OVERLAP": False, "SAME_STRIDES": True, "ROWS": rows,
        "TILE": tiles.tile, "STAGES": tiles.stages,
        "BLOCK_H": 1 << (width - 1).bit_length(), **more,
    }  # fmt: skip
    types = attend_types(members="*i32")
    cache = f"tensordesc<bf16[{tiles.tile}, {width}]>" if constants["TMA"] else "*bf16"
    types |= {"k_rows": cache, "v_rows": cache}
    built = compiled(triton_prefill.attend, types, with_config(constants), STRIDES, warps=tiles.warps, stages=3)
    assert built.metadata.shared * tiles.workers <= SHARED_BYTES
    assert spilled_bytes(built, tmp_path) <= SPILLED_BYTES
    # Blocks of 64 rows and more use wgmma.
    assert "wgmma" in built.asm["ptx"]
    assert re.search(r"cp\.async\.cg[^;]*, 0x10", built.asm["ptx"])
    assert ("cp.async.bulk.tensor" in built.asm["ptx"]) == constants["TMA"]


@pytest.mark.slow
@pytest.mark.parametrize("rows", [16, pytest.param(64, marks=pytest.mark.long)])
def test_mla_kernel_fits_the_gpu(rows: int, tmp_path: Path) -> None:
    from colonnade.kernels.attention import triton_mla_decode
    from colonnade.kernels.attention.decode_tiles import choose_tiles

    tiles = choose_tiles(rows, 576, 2, 2)
    constants = {
        "N": 128, "RANK": 512, "ROPE": 64, "PAGE": 64, "WINDOW": 0, "SCALED": False, "LAUNCH_MERGE": False,
        "ROWS": rows, "TILE": tiles.tile, "STAGES": tiles.stages, "BLOCK_C": 512, "BLOCK_R": 64,
    }  # fmt: skip
    function = triton_mla_decode.mla_attend
    built = compiled(function, mla_types(), with_config(constants), STRIDES, warps=tiles.warps, stages=3)
    assert built.metadata.shared * tiles.workers <= SHARED_BYTES
    # 64 rows of 512 accumulators take half of all registers, so addresses spill before the loop and reload after it.
    assert spilled_bytes(built, tmp_path) <= (SPILLED_BYTES if rows == 16 else 300)
    assert ("wgmma" if rows == 64 else "mma") in built.asm["ptx"]
    # Three tiles of 32 fit because both products share each tile.
    assert built.metadata.shared <= 2 * 576 * (rows + 3 * 32) + 4096
    assert re.search(r"cp\.async\.cg[^;]*, 0x10", built.asm["ptx"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cache", "rows"),
    [("*fp8e4nv", 16), *(pytest.param(*case, marks=pytest.mark.long) for case in (("*i8", 16), ("*i8", 64)))],
)
def test_mla_kernel_with_eight_bit_cache_fits_the_gpu(cache: str, rows: int, tmp_path: Path) -> None:
    """Tiles take half the shared memory, plus one widened tile; with 64 rows some registers spill."""
    from colonnade.kernels.attention import triton_mla_decode
    from colonnade.kernels.attention.decode_tiles import choose_tiles

    tiles = choose_tiles(rows, 576, 2, 2)
    constants = {
        "N": 128, "RANK": 512, "ROPE": 64, "PAGE": 64, "WINDOW": 0, "SCALED": True, "LAUNCH_MERGE": False,
        "ROWS": rows, "TILE": tiles.tile, "STAGES": tiles.stages, "BLOCK_C": 512, "BLOCK_R": 64,
    }  # fmt: skip
    function, types = triton_mla_decode.mla_attend, mla_types(cache, scaled=True)
    built = compiled(function, types, with_config(constants), STRIDES, warps=tiles.warps, stages=3)
    assert built.metadata.shared * tiles.workers <= SHARED_BYTES
    assert spilled_bytes(built, tmp_path) <= (SPILLED_BYTES if rows == 16 else 700)
    assert ("wgmma" if rows == 64 else "mma") in built.asm["ptx"]


@pytest.mark.parametrize("kind", ["int8", "float8"])
def test_latent_cache_write_compiles_without_spills(kind: str, tmp_path: Path) -> None:
    from colonnade.kernels.attention import triton_cache_write

    types = {"k_ptr": "*bf16", "slots_ptr": "*i64", "scales_ptr": "*fp32", "k_t": "i32"}
    types["values_ptr"] = {"int8": "*i8", "float8": "*fp8e4nv"}[kind]
    constants = {"RANK": 512, "ROPE": 64, "KIND": kind, "BLOCK_C": 512, "BLOCK_R": 64}
    built = compiled(triton_cache_write._write_latents, types, constants, ["k_t"], warps=4)
    assert spilled_bytes(built, tmp_path) == 0
    assert "div.rn.f32" in built.asm["ptx"]  # rounds exactly as plain torch
    assert (kind == "float8") == ("cvt.rn.satfinite.e4m3x2" in built.asm["ptx"])


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("width", "part", "wait", "shared", "pieces"),
    [
        (128, 32, True, 0, 64),
        (80, 32, False, 128, 64),
        (256, 256, True, 0, 16),
        (128, 32, False, 0, 1),
        (128, 128, True, 0, 16),
    ],
)
def test_merge_kernel_fits_the_gpu(width: int, part: int, wait: bool, shared: int, pieces: int, tmp_path: Path) -> None:
    from colonnade.kernels.attention import triton_merge

    constants = {
        "N": 32, "GROUP": 8, "H": width, "SINKS": True, "WAIT": wait, "ROWS": 16, "USED": 8, "SHARED_ROWS": shared,
        "PIECES": pieces, "SHARED_PIECES": 64, "BLOCK_H": part,
    }  # fmt: skip
    built = compiled(triton_merge.merge, merge_types(), with_config(constants), (), warps=4, stages=3)
    assert spilled_bytes(built, tmp_path) == 0
    assert registers(built, tmp_path) <= MERGE_REGISTERS or width != 128
    assert ("griddepcontrol.wait" in built.asm["ptx"]) == wait


@pytest.mark.sample(1)
@pytest.mark.parametrize(("width", "part", "pieces"), [(128, 32, 64), (64, 64, 128), (80, 64, 64), (512, 64, 64)])
def test_chunk_merge_kernel_fits_the_gpu(width: int, part: int, pieces: int, tmp_path: Path) -> None:
    from colonnade.kernels.attention import triton_merge

    constants = {
        "N": 32, "GROUP": 8, "H": width, "SINKS": True, "WAIT": True, "ROWS": 16, "CHUNK": 512,
        "FEW": triton_merge.FEW_CHUNKS, "WHOLE": min(triton_merge.MAX_WIDTH, 1 << (width - 1).bit_length()),
        "PIECES": pieces, "BLOCK_H": part,
    }  # fmt: skip
    built = compiled(triton_merge.merge_chunks, merge_types(), with_config(constants), (), warps=4, stages=3)
    assert spilled_bytes(built, tmp_path) == 0
    assert "griddepcontrol.wait" in built.asm["ptx"]
