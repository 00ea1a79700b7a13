"""Kernels compiled for Hopper, which takes no GPU: experts' fit, use its matrix units and spill little; AdamW's reads
and writes 16 bytes a thread.

What the interpreter cannot tell: that the compiler accepts a kernel, and what it makes of it.
"""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from tests.compiled import SHARED_BYTES, SPILLED_BYTES, compiled, registers, spilled

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None, reason="triton is not installed: pip install triton"
    ),
    pytest.mark.filterwarnings("ignore"),
]

WHOLE = ("R", "D", "F", "stride", "q_stride")
"""Numbers that are multiples of 16, as in any real layer."""


def signature(kernel: str, tma: bool, tiles: Any) -> tuple[str, dict[str, str], dict[str, Any]]:
    """(the function, types of its arguments, constants) of a gated layer without biases in bfloat16."""
    common = {"order_ptr": "*i64", "ends_ptr": "*i64", "R": "i32", "F": "i32", "D": "i32", "E": "i32"}
    sizes = {"BM": tiles.BM, "BN": tiles.BN, "BK": tiles.BK, "GROUP": tiles.GROUP}
    rows = {**sizes, "E_PAD": 256, "EVEN": True, "TMA": tma}

    def of(*names: str) -> dict[str, str]:
        return dict.fromkeys(names, "*bf16")

    def weights(*names: str, across: bool) -> dict[str, str]:
        block = (tiles.BN, tiles.BK) if across else (tiles.BK, tiles.BN)
        return dict.fromkeys(names, f"tensordesc<bf16[1, {block[0]}, {block[1]}]>" if tma else "*bf16")

    gathered = {"active": "i32"}
    if kernel in ("up", "gated_up"):
        gated = kernel == "gated_up"
        types = common | of("x_ptr", "h_ptr", "a_ptr", "u_ptr") | gathered | {"stride": "i32"}
        types |= weights("up_w", *(["gate_w"] if gated else []), across=True)
        return "up", types, {"GATHER": True, "GATED": gated, "BIASED": False, "KEEP": True, "ACT": "silu", **rows}
    if kernel in ("down", "rows_back"):
        two = kernel == "rows_back"
        types = common | of("one_ptr", "y_ptr", *(["two_ptr"] if two else []))
        types |= weights("one_w", *(["two_w"] if two else []), across=False) | {"routing_ptr": "*fp32"}
        return "down", types, {"TWO": two, "BIASED": False, "WEIGHTED": not two, "TAIL": False, **rows}
    if kernel == "hidden_back":
        types = common | of("dy_ptr", "a_ptr", "u_ptr", "h_ptr", "da_ptr", "du_ptr") | gathered
        types |= weights("down_w", across=True) | {"routing_ptr": "*fp32", "part_ptr": "*fp32"}
        return "hidden_back", types, {"GATHER": True, "GATED": True, "WEIGHTED": True, "ACT": "silu", **rows}
    two = kernel == "gated_weights_back"
    types = common | of("p_ptr", "q_ptr", "dp_ptr", *(["s_ptr", "ds_ptr"] if two else [])) | gathered
    return "weights_back", types | {"q_stride": "i32"}, {"TWO": two, "GATHER": True, **sizes}


def cases() -> list[Any]:
    if importlib.util.find_spec("triton") is None:
        return []
    from colonnade.kernels.experts.tiles import table

    return [
        pytest.param(kernel, most, how, tma, id=f"{kernel}-{most}-{'tma' if tma else 'pointers'}")
        for kernel, rows in table().items()
        for most, how in rows
        for tma in ((False, True) if "weights" not in kernel else (False,))
    ]


@pytest.mark.parametrize(("kernel", "most", "how", "tma"), cases())
def test_experts_fit_the_chip(kernel: str, most: int | None, how: Any, tma: bool, tmp_path: Path) -> None:
    from colonnade.kernels.experts import triton_rows, triton_weights

    name, types, constants = signature(kernel, tma, how)
    function = getattr(triton_rows, name, None) or getattr(triton_weights, name)
    built = compiled(function, types, constants, WHOLE, warps=how.warps, stages=how.stages)
    assert built.metadata.shared <= SHARED_BYTES
    assert spilled(built, tmp_path) <= SPILLED_BYTES
    assert ("wgmma" in built.asm["ptx"]) == (how.BM >= 64)
    assert ("cp.async.bulk.tensor" in built.asm["ptx"]) == tma
    # Every operand of the loop comes asynchronously, several steps ahead.
    assert "cp.async" in built.asm["ptx"]


@pytest.mark.parametrize("gradient", ["bfloat16", "float32"])
def test_adamw_moves_whole_words(gradient: str, tmp_path: Path) -> None:
    """Each thread 16 bytes of float32 at once; divided and rooted exactly, nothing contracted, nothing spilled."""
    from triton import language as tl

    from colonnade.kernels.adamw import triton_adamw

    function = triton_adamw._kernel
    words = {"table_ptr": "*i64", "sizes_ptr": "*i64", "of_ptr": "*i32", "first_ptr": "*i32"}
    types = {a: words.get(a, "*fp32" if a.endswith("_ptr") else "fp32") for a in function.arg_names if not a.isupper()}
    constants = {"GRADIENT": getattr(tl, gradient), "COPY": tl.bfloat16, "ALIGN": triton_adamw.ALIGNED_BYTES}
    constants |= {"BLOCK": triton_adamw.BLOCK, "TURNS": triton_adamw.TURNS}
    built = compiled(function, types | {"P": "i32"}, constants, warps=triton_adamw.WARPS, enable_fp_fusion=False)
    assert spilled(built, tmp_path) == 0
    assert registers(built, tmp_path) <= 64
    ptx = built.asm["ptx"]
    assert ptx.count("ld.global.v4") >= 3 and ptx.count("st.global.v4") >= 3
    assert "div.rn.f32" in ptx and "sqrt.rn.f32" in ptx and "fma.rn.f32" not in ptx
