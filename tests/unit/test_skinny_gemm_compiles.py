"""Skinny GEMMs and the KV-cache write of new heads, compiled for Hopper without a GPU."""

import importlib.util
import re
from pathlib import Path

import pytest

from tests.compiled import SHARED_BYTES, compiled, product_types, registers, spilled_bytes

pytestmark = [
    pytest.mark.sample(6),
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None, reason="triton is not installed: pip install triton"
    ),
    pytest.mark.filterwarnings("ignore"),
]

STORED = {"plain": "*bf16", "int4": "*i32", "int8": "*i8", "float8": "*fp8e4nv"}
SIZES = ("outputs", "inputs", "x_t", "w_f", "groups")
"""Multiples of 16, as in any real layer."""


@pytest.mark.parametrize(
    ("kind", "rows", "gated", "inputs"),
    [
        ("plain", 1, True, 4096),
        ("int4", 1, False, 4096),
        pytest.param("plain", 1, False, 11008, marks=pytest.mark.long),
        pytest.param("plain", 4, True, 4096, marks=pytest.mark.long),
        pytest.param("int4", 1, True, 4096, marks=pytest.mark.long),
        pytest.param("int4", 1, False, 11008, marks=pytest.mark.long),
        pytest.param("int8", 1, True, 4096, marks=pytest.mark.long),
        pytest.param("float8", 2, False, 4096, marks=pytest.mark.long),
    ],
)
def test_skinny_gemms_fit_the_gpu(kind: str, rows: int, gated: bool, inputs: int, tmp_path: Path) -> None:
    from colonnade.kernels.linear import skinny_gemm_tiles, triton_skinny_gemm

    tiles = skinny_gemm_tiles.table_tiles(kind, rows, 11008 if gated else 4096, inputs, gated=gated)
    assert tiles is not None
    if tiles.tensor_cores:  # another kernel's argument, where x does not use it
        tiles = skinny_gemm_tiles.FALLBACK
    four = kind == "int4"
    kernel, columns = (
        triton_skinny_gemm.skinny_int4_kernel if four else triton_skinny_gemm.skinny_kernel,
        inputs // 8 if four else inputs,
    )
    types = product_types(STORED[kind], "*i32" if four else "*fp32", SIZES) | ({"rows": "i32"} if rows > 1 else {})
    types = {name: kind for name, kind in (types | {"bits": ("i32",) * 4}).items() if name in kernel.arg_names}
    constants = triton_skinny_gemm.Constants(
        SCALED=kind in ("int8", "float8"), NORM=gated, ACT="silu" if gated else "", BIASED=False, RESIDUAL=not gated,
        EVEN=columns % tiles.BK == 0, STEPS=-(-columns // tiles.BK), M=rows, BN=tiles.BN, BK=tiles.BK,
        STAGES=tiles.stages, V=8 if kind == "plain" else 16, WORDS=8,
    )  # fmt: skip
    whole = [name for name in (*SIZES, "bits") if name in types]
    built = compiled(kernel, types, {"rows": rows, "C": constants}, whole, warps=tiles.warps)
    ptx = built.asm["ptx"]
    # Enough bytes in flight to saturate a multiprocessor, over the programs resident on it.
    room = min(SHARED_BYTES // built.metadata.shared, 65536 // (registers(built, tmp_path) * 32 * tiles.warps))
    each = tiles.BN * tiles.BK * (1 + gated) * {"plain": 2, "int4": 4}.get(kind, 1)
    assert room * (tiles.stages - 1) * each > 60_000
    assert spilled_bytes(built, tmp_path) == 0
    # Weights are prefetched, 16 bytes per thread.
    assert len(re.findall(r"cp\.async\.c\w[^;]*, 0x10", ptx)) >= tiles.stages - 1


def test_cache_write_fits_the_gpu(tmp_path: Path) -> None:
    from colonnade.kernels.attention import triton_cache_write
    from colonnade.kernels.attention.triton_args import Cache
    from colonnade.kernels.rotary import Rotation

    kernel = triton_cache_write._rope_and_kv_write
    norm, cache = triton_cache_write._Norm("*bf16", "fp32"), Cache("*fp8e4nv", "i32", "i32", "i32")
    types = {
        "qkv_ptr": "*bf16", "rotation": Rotation("*bf16", "*bf16"), "q_norm": norm, "k_norm": norm,
        "slots_ptr": "*i64", "q_ptr": "*bf16", "keys": cache, "values": cache,
        "qkv_t": "i32", "page_tokens": "i32", "slots_total": "i32",
    }  # fmt: skip
    constants = {"cfg": triton_cache_write._Config(8, 4, 128, True, True, 8, 128)}
    whole = ["qkv_t", "page_tokens", "slots_total", "keys", "values"]
    built = compiled(kernel, types, constants, whole, warps=4)
    assert spilled_bytes(built, tmp_path) == 0
