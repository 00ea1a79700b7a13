"""Quantised and fixed-tile matmul kernels, compiled for Hopper without a GPU: they fit and do not spill."""

import importlib.util
import re
from pathlib import Path

import pytest

from tests.compiled import SHARED_BYTES, SPILLED_BYTES, compiled, registers, spilled_bytes

pytestmark = [
    pytest.mark.sample(6),
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None, reason="triton is not installed: pip install triton"
    ),
    pytest.mark.filterwarnings("ignore"),
]

STORED = {"int4": "*i32", "int8": "*i8", "float8": "*fp8e4nv"}
SIZES = ("outputs", "inputs", "columns", "groups", "x_t", "step")
"""Multiples of 16, as in any real layer."""
EXPERT_SIZES = ("D", "F", "stride", "columns", "groups")
FAST_CASES = {("up", "int4", 16), ("up", "int8", 128)}
EXPERTS = [
    pytest.param(name, kind, rows, marks=() if (name, kind, rows) in FAST_CASES else pytest.mark.long)
    for name in ("up", "down") for kind in STORED for rows in (16, 64, 128)
]  # fmt: skip


@pytest.mark.parametrize("kind", ["int4", "int8", pytest.param("float8", marks=pytest.mark.long)])
@pytest.mark.parametrize("rows", [16, pytest.param(64, marks=pytest.mark.long)])
def test_linear_kernels_fit_the_gpu(kind: str, rows: int, tmp_path: Path) -> None:
    from colonnade.kernels.linear import skinny_gemm_tiles, triton_quantised

    how, kernel = skinny_gemm_tiles.SPLIT_K_TILES[kind], triton_quantised.split_k_kernel
    types = {"x_ptr": "*bf16", "w_ptr": STORED[kind], "scale_ptr": "*i32" if kind == "int4" else "*fp32"}
    types |= {"out_ptr": "*fp32", "rows": "i32", **dict.fromkeys(SIZES, "i32")}
    constants = {"KIND": kind, "WORDS": 8, "BM": rows, "BN": how.outputs, "BK": how.columns}
    types, constants = ({k: v for k, v in x.items() if k in kernel.arg_names} for x in (types, constants))
    whole = [size for size in SIZES if size in types]
    built = compiled(kernel, types, constants, whole, warps=how.warps, stages=how.stages)
    ptx = built.asm["ptx"]
    # Several programs share a multiprocessor: otherwise nothing would be loaded while one waits.
    assert built.metadata.shared * (4 if rows == 16 else 2) <= SHARED_BYTES
    assert registers(built, tmp_path) * 32 * how.warps * 3 <= 65536
    assert spilled_bytes(built, tmp_path) == 0
    # Weights are loaded 16 bytes at a time; 4-bit integers are not converted to float one by one.
    assert "wgmma" in ptx and re.search(r"cp\.async\.cg[^;]*, 0x10", ptx)
    assert kind != "int4" or not re.search(r"cvt\.rn\.f32\.[su]", ptx)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind", "rows"), EXPERTS)
def test_expert_kernels_fit_the_gpu(name: str, kind: str, rows: int, tmp_path: Path) -> None:
    """A gated layer without biases."""
    from colonnade.kernels.experts import triton_quantised

    kernel = getattr(triton_quantised, f"quantised_{name}_kernel")
    how = next(tiles for _, tiles in triton_quantised.TILES if rows == tiles.BM)
    types = dict.fromkeys(("x_ptr", "h_ptr", "y_ptr"), "*bf16") | {"routing_ptr": "*fp32"}
    types |= dict.fromkeys(("order_ptr", "ends_ptr"), "*i64") | dict.fromkeys((*EXPERT_SIZES, "E", "active"), "i32")
    matrices = triton_quantised.Matrices(STORED[kind], "*i32" if kind == "int4" else "*fp32", "constexpr")
    types |= dict.fromkeys(("up", "gate", "down"), matrices)
    constants = {
        "C": triton_quantised.Constants(
            rows,
            how.BN,
            triton_quantised.INT4_WORDS if kind == "int4" else how.BK,
            8,
            256,
            kind,
            8,
            GATED=True,
            ACT="silu",
        )
    }
    types, constants = ({k: v for k, v in x.items() if k in kernel.arg_names} for x in (types, constants))
    whole = [size for size in EXPERT_SIZES if size in types]
    built = compiled(kernel, types, constants, whole, warps=how.warps, stages=how.stages)
    assert built.metadata.shared * (2 if rows < 128 else 1) <= SHARED_BYTES
    assert spilled_bytes(built, tmp_path) <= SPILLED_BYTES
    assert "wgmma" in built.asm["ptx"] and re.search(r"cp\.async\.cg[^;]*, 0x10", built.asm["ptx"])
    assert kind != "int4" or not re.search(r"cvt\.rn\.f32\.[su]", built.asm["ptx"])


@pytest.mark.parametrize("name", ["FEW_ROWS", "MANY_ROWS", pytest.param("FLOAT32", marks=pytest.mark.long)])
def test_fixed_tile_kernels_fit_the_gpu(name: str, tmp_path: Path) -> None:
    from colonnade.kernels import triton_batch_invariant

    kind, tile = "*fp32" if name == "FLOAT32" else "*bf16", getattr(triton_batch_invariant, name)
    types = dict.fromkeys(("x_ptr", "w_ptr", "b_ptr", "y_ptr"), kind)
    types |= dict.fromkeys(("rows", "outputs", "inputs", "x_t", "w_f"), "i32")
    constants = {"BIASED": False, "BM": tile.rows, "BN": tile.outputs, "BK": tile.inputs}
    whole = ("outputs", "inputs", "x_t", "w_f")
    run = triton_batch_invariant._linear
    built = compiled(run, types, constants, whole, warps=tile.warps, stages=tile.stages)
    assert built.metadata.shared * 2 <= SHARED_BYTES
    assert spilled_bytes(built, tmp_path) == 0
    assert kind != "*bf16" or "wgmma" in built.asm["ptx"]


@pytest.mark.parametrize("kind", ["int4", "int8", "float8", pytest.param("sparse24", marks=pytest.mark.slow)])
def test_gptq_kernel_is_one_warp_without_barriers(kind: str, tmp_path: Path) -> None:
    from colonnade.kernels.linear import triton_gptq

    kernel = triton_gptq._round_columns
    pointers = dict.fromkeys(("w_ptr", "u_ptr", "scale_ptr", "low_ptr", "q_ptr", "delta_ptr"), "*fp32")
    types = pointers | dict.fromkeys(("rows", "columns", "w_stride", "u_stride"), "i32")
    together = 4 if kind == "sparse24" else 1
    constants = {"KIND": kind, "HIGHEST": 15.0, "TOGETHER": together, "BF": triton_gptq.ROWS, "BC": 128}
    built = compiled(kernel, types, constants, [], warps=1, stages=1)
    assert "bar.sync" not in built.asm["ptx"]
    assert spilled_bytes(built, tmp_path) == 0
