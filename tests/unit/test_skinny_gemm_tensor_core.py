"""Tensor-core skinny GEMMs: the unpacking assembly, and kernels compiled for Hopper."""

import importlib.util
import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from colonnade.kernels.linear.quantise import FLOAT8
from colonnade.kernels.linear.skinny_gemm_tiles import SkinnyTiles
from tests.compiled import (
    SHARED_BYTES,
    compiled,
    disassembled,
    loop_instructions,
    product_types,
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

SIZES = ("outputs", "inputs", "x_t", "w_f", "groups")
"""Multiples of 16, as in any real layer."""
AT_ONCE, TWO, STEPS = (
    SkinnyTiles(16, 512, 8, 4, 1, True),
    SkinnyTiles(16, 512, 8, 4, 2, True),
    SkinnyTiles(32, 512, 8, 3, 1, True),
)
THREE = SkinnyTiles(32, 128, 4, 3, 3, True)


def emulate(text: str, words: torch.Tensor) -> torch.Tensor:
    """Emulates a few PTX instructions on 32-bit registers, as the PTX manual defines them."""
    registers: dict[str, torch.Tensor] = {"$1": words & 0xFFFFFFFF}

    def read(name: str) -> torch.Tensor:
        return torch.full_like(words, int(name, 0)) if name[0].isdigit() else registers[name]

    for line in text.strip("{ }").split(";"):
        name, _, rest = line.strip().partition(" ")
        names = [part.strip() for part in rest.split(",")]
        if name in ("", ".reg"):
            continue
        out, sources = names[0], [read(part) for part in names[1:]]
        if name == "shr.b32":
            registers[out] = sources[0] >> sources[1]
        elif name == "shl.b32":
            registers[out] = (sources[0] << sources[1]) & 0xFFFFFFFF
        elif name == "and.b32":
            registers[out] = sources[0] & sources[1]
        else:
            assert (name, names[4]) == ("lop3.b32", "0xEA"), line
            registers[out] = (sources[0] & sources[1]) | sources[2]
    return registers["$0"]


@pytest.mark.parametrize(("dtype", "lift"), [(torch.bfloat16, 128), (torch.float16, 1024)])
def test_unpacking_assembly_is_exact_for_all_halves(dtype: torch.dtype, lift: int) -> None:
    from colonnade.kernels.linear.triton_skinny_gemm_tensor_core import unpack_assembly

    low = torch.arange(1 << 16)
    high = low.flip(0)

    def unpacked(what: str, j: int) -> list[torch.Tensor]:
        bits = emulate(unpack_assembly(what, j, dtype == torch.bfloat16), low | high << 16)
        halves = (bits & 0xFFFF, bits >> 16)
        return [half.to(torch.int32).to(torch.int16).view(dtype).double() for half in halves]

    for j, (made_of, half) in itertools.product(range(4), enumerate((low, high))):
        assert torch.equal(unpacked("nibble", j)[made_of], lift + (half >> 4 * j & 15).double())
        if j < 2:
            byte = (half >> 8 * j & 255).to(torch.uint8).view(torch.int8)
            assert torch.equal(unpacked("seven", j)[made_of] - unpacked("eighth", j)[made_of], byte.double())
            expected = byte.view(FLOAT8).double() * (2.0**-120 if dtype == torch.bfloat16 else 2.0**-8)
            finite = ~expected.isnan()
            assert torch.equal(unpacked("float8", j)[made_of][finite], expected[finite])


def quantised_on_meta(kind: str, inputs: int, group: int = 64) -> Any:
    """A quantised matrix on the meta device."""
    from colonnade.kernels.linear.quantise import Quantised

    four = kind == "int4"
    stored = torch.empty(64, inputs // 8 if four else inputs, dtype=torch.int32 if four else torch.int8, device="meta")
    scales = torch.empty(64, inputs // group if four else 1, 2 if four else 1, device="meta")
    return Quantised(kind, stored, scales, inputs, group if four else inputs)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "rows", "gated", "inputs", "tiles", "most"),
    [
        ("int4", 1, False, 4096, AT_ONCE, 1.75),
        ("int8", 1, True, 4096, SkinnyTiles(16, 4096, 8, 4, 1, True), 2.6),
        pytest.param("int4", 1, True, 4096, AT_ONCE, 2, marks=pytest.mark.long),
        pytest.param("int8", 1, True, 8192, SkinnyTiles(16, 2048, 8, 3, 1, True), 3.9, marks=pytest.mark.long),
        pytest.param("int4", 1, False, 4096, TWO, 1.85, marks=pytest.mark.long),
        pytest.param("int4", 4, False, 4096, AT_ONCE, 2.2, marks=pytest.mark.long),
        pytest.param("int4", 8, False, 4096, AT_ONCE, 2.5, marks=pytest.mark.long),
        pytest.param("int4", 16, False, 4096, AT_ONCE, 3.3, marks=pytest.mark.long),
        pytest.param("int4", 1, False, 11008, STEPS, 2.7, marks=pytest.mark.long),
        pytest.param("int4", 1, False, 11008, THREE, 3.4, marks=pytest.mark.long),
        pytest.param("int4", 4, True, 4096, THREE._replace(stages=2), 4, marks=pytest.mark.long),
        pytest.param("int8", 1, False, 4096, SkinnyTiles(16, 4096, 8, 4, 1, True), 2.4, marks=pytest.mark.long),
        pytest.param("int8", 8, False, 4096, SkinnyTiles(16, 4096, 8, 4, 1, True), 2.7, marks=pytest.mark.long),
        pytest.param("float8", 1, False, 4096, SkinnyTiles(16, 4096, 8, 4, 1, True), 2.8, marks=pytest.mark.long),
    ],
)
def test_few_instructions_per_weight(
    kind: str, rows: int, gated: bool, inputs: int, tiles: SkinnyTiles, most: float, tmp_path: Path
) -> None:
    from colonnade.kernels.linear import skinny_gemm_tiles, triton_skinny_gemm_tensor_core

    four, weight = kind == "int4", quantised_on_meta(kind, inputs)
    constants: dict[str, Any] = skinny_gemm_tiles.tensor_core_constants(weight, rows, tiles)
    limit = skinny_gemm_tiles.register_limit(tiles)
    limited = bool(limit)
    assert limited == (tiles.programs_per_sm > 1)
    types = product_types("*i16", "*i32" if four else "*fp32", SIZES) | ({"rows": "i32"} if rows > 1 else {})
    config = triton_skinny_gemm_tensor_core.Constants(
        **constants, SCALED=not four, NORM=inputs != 11008, ACT="silu" if gated else "", BIASED=False,
        RESIDUAL=not gated, BN=tiles.BN, STAGES=tiles.stages, ASM=True,
    )  # fmt: skip
    whole = [size for size in SIZES if size != "groups" or inputs // 64 % 16 == 0]
    kernel = triton_skinny_gemm_tensor_core.tensor_core_kernel
    built = compiled(kernel, types, {"rows": rows, "C": config}, whole, warps=tiles.warps, **limit)
    body = loop_instructions(disassembled(built, tmp_path), "HMMA")
    step = tiles.BN * constants["BATCH"] * constants["K"] * (4 if four else 2)
    if constants["STEPS"] > 1:
        step *= 1 + gated  # else a gate's matrices take turns
    a_weight = len(body) * 32 * tiles.warps / step
    assert a_weight < most
    # Halves go straight into the tensor cores' registers, for sixteen outputs and eight words at a time.
    reads = sum("LDSM.16.M88.4" in line for line in body)
    assert reads >= step // (8 if four else 4) / 128 / tiles.warps
    assert spilled_bytes(built, tmp_path) <= (512 if rows == 16 else 256 if limited else 0)
    room = max(1, tiles.programs_per_sm)
    assert built.metadata.shared * room <= SHARED_BYTES
    assert registers(built, tmp_path) * 32 * tiles.warps * room <= 65536
    # Enough bytes in flight to saturate a multiprocessor, 16 at a time.
    assert room * (tiles.stages - 1) * step // (2 if four else 1) > 60_000
    ptx = built.asm["ptx"]
    assert len(re.findall(r"cp\.async\.c\w[^;]*, 0x10", ptx)) >= tiles.stages - 1
    lifts = {"int4": "0x43004300", "int8": "0x43004300", "float8": "0x07F007F0"}
    assert lifts[kind] in ptx and "mma.sync.aligned.m16n8k16.row.col.f32.bf16" in ptx


def test_rows_of_any_length_fit() -> None:
    """Tiles of the table were measured with 4096 and 11,008 inputs: they are kept, and any other number fits too."""
    from colonnade.kernels.linear import skinny_gemm_tiles

    for row in skinny_gemm_tiles.table():
        if not row["tiles"] or not row["tiles"].get("tensor_cores"):
            continue
        tiles, rows, gated = SkinnyTiles(**row["tiles"]), row["rows"], row["gated"]
        own = quantised_on_meta(row["kind"], row["inputs"])
        assert skinny_gemm_tiles.tensor_core_constants(
            own, rows, tiles, gated=gated, normed=True, shared=SHARED_BYTES
        ) == skinny_gemm_tiles.tensor_core_constants(own, rows, tiles)
        for inputs, group in itertools.product((576, 5120, 8192, 11008, 28672), (32, 64)):
            found = skinny_gemm_tiles.tensor_core_constants(
                quantised_on_meta(row["kind"], inputs, group),
                rows,
                tiles,
                gated=gated,
                normed=True,
                shared=SHARED_BYTES,
            )
            taken = skinny_gemm_tiles.prefetched_bytes(found, tiles, gated=gated, normed=True)
            assert taken + skinny_gemm_tiles.CONVERSION_BYTES <= SHARED_BYTES, (row, inputs)
            assert found["STEPS"] * found["BATCH"] * found["K"] * (4 if row["kind"] == "int4" else 2) >= inputs


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "rows", "gated", "inputs"),
    [
        ("int8", 8, True, 5120),
        ("int4", 16, False, 8192),
        pytest.param("int4", 2, True, 11008, marks=pytest.mark.long),
        pytest.param("int8", 1, False, 4096, marks=pytest.mark.long),
        pytest.param("float8", 3, True, 8192, marks=pytest.mark.long),
    ],
)
def test_estimated_shared_memory_matches_the_compiler(kind: str, rows: int, gated: bool, inputs: int) -> None:
    from colonnade.kernels.linear import skinny_gemm_tiles, triton_skinny_gemm_tensor_core

    tiles = skinny_gemm_tiles.table_tiles(kind, rows, 11008 if gated else 12288, inputs, gated=gated)
    assert tiles is not None
    weight = quantised_on_meta(kind, inputs)
    constants = skinny_gemm_tiles.tensor_core_constants(
        weight, rows, tiles, gated=gated, normed=gated, shared=SHARED_BYTES
    )
    estimated = skinny_gemm_tiles.prefetched_bytes(constants, tiles, gated=gated, normed=gated)
    types = product_types("*i16", "*i32" if kind == "int4" else "*fp32", (*SIZES, "rows"))
    config = triton_skinny_gemm_tensor_core.Constants(
        **constants, SCALED=kind != "int4", NORM=gated, ACT="silu" if gated else "", BIASED=False, RESIDUAL=False,
        BN=tiles.BN, STAGES=tiles.stages, ASM=True,
    )  # fmt: skip
    kernel, limit = triton_skinny_gemm_tensor_core.tensor_core_kernel, skinny_gemm_tiles.register_limit(tiles)
    built = compiled(kernel, types, {"C": config}, SIZES, warps=tiles.warps, **limit)
    assert estimated <= built.metadata.shared <= estimated + skinny_gemm_tiles.CONVERSION_BYTES


def test_tiles_of_tensor_core_products() -> None:
    from colonnade.kernels.linear import skinny_gemm_tiles
    from colonnade.kernels.linear.quantise import quantise

    for kind, group, rows, warps in itertools.product(("int4", "int8", "float8"), (32, 64, 128), (1, 3, 8, 16), (1, 8)):
        weight = quantise(torch.randn(3, 640), kind, group)  # type: ignore[arg-type]
        cut = skinny_gemm_tiles.tensor_core_constants(weight, rows, SkinnyTiles(16, 512, warps, 3, 1, True))
        step_bytes = 2 * cut["BATCH"] * cut["K"]
        row_bytes = weight.values[0].nbytes
        assert cut["K"] >= 16 and cut["M"] * cut["PARTS"] >= 8 and cut["M"] >= rows
        assert cut["STEPS"] * step_bytes >= row_bytes > (cut["STEPS"] - 1) * step_bytes
        assert cut["EVEN"] == (row_bytes % step_bytes == 0)
        # A group's inputs are never in two products.
        assert kind != "int4" or cut["K"] == cut["PARTS"] * 2 * group // 8
    x, weight = torch.randn(1, 640), quantise(torch.randn(3, 640), "int8")
    assert not skinny_gemm_tiles.tensor_cores_fit(x, weight) and skinny_gemm_tiles.tensor_cores_fit(x.half(), weight)
    assert not skinny_gemm_tiles.tensor_cores_fit(x.half(), torch.randn(3, 640).half())
    odd = quantise(torch.randn(3, 61), "int8")
    assert not skinny_gemm_tiles.tensor_cores_fit(torch.randn(1, 61).half(), odd)
