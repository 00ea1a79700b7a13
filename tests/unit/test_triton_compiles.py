"""Kernels compiled for Hopper without a GPU: shared memory, tensor cores, register spills, vector width.

Expert kernels fit, use tensor cores and spill little; router and row-copy kernels do not spill; AdamW reads and writes
16 bytes per thread. The interpreter cannot show that the compiler accepts a kernel, or what code it generates.
"""

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

DIVISIBLE = ("R", "D", "F", "stride", "q_stride")
"""Sizes that are multiples of 16, as in any real layer."""


def signature(kernel: str, tma: bool, tiles: Any, *, gather: bool = True) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """(the function, argument types, constants) of a gated layer without biases in bfloat16."""
    common = {"order_ptr": "*i64", "ends_ptr": "*i64", "R": "i32", "F": "i32", "D": "i32", "E": "i32"}
    from colonnade.kernels.experts import triton_grouped_gemm, triton_wgrad

    sizes = (tiles.BM, tiles.BN, tiles.BK, tiles.GROUP)
    common_constants = triton_grouped_gemm.Constants(*sizes, E_PAD=256, EVEN=True, TMA=tma)

    def of(*names: str) -> dict[str, str]:
        return dict.fromkeys(names, "*bf16")

    def fetched(*names: str, block: tuple[int, ...], by_engine: bool = tma) -> dict[str, str]:
        return dict.fromkeys(names, f"tensordesc<bf16{list(block)}>" if by_engine else "*bf16")

    across, along, rows = (1, tiles.BN, tiles.BK), (1, tiles.BK, tiles.BN), (tiles.BM, tiles.BK)
    gathered = {"active": "i32", "stride": "i32"}
    alone = tiles.BM == 16 and tma  # a decode step of one token, in one of the two variants
    if kernel in ("up", "gated_up"):
        gated = kernel == "gated_up"
        types = common | of("h_ptr", "a_ptr", "u_ptr") | gathered
        types |= fetched("up_w", *(["gate_w"] if gated else []), block=across)
        types |= fetched("x", block=rows, by_engine=tma and not gather)
        return (
            "up_kernel",
            types,
            {"C": common_constants._replace(GATHER=gather, GATED=gated, KEEP=True, ACT="silu", ONE_TOKEN=alone)},
        )
    if kernel in ("down", "input_dgrad"):
        two = kernel == "input_dgrad"
        types = common | of("y_ptr") | {"routing_ptr": "*fp32"}
        types |= fetched("x1", *(["x2"] if two else []), block=rows)
        types |= fetched("w1", *(["w2"] if two else []), block=along)
        return (
            "down_kernel",
            types,
            {
                "C": common_constants._replace(
                    TWO=two, WEIGHTED=not two, ONE_TOKEN=alone, INTERLEAVED=two and tiles.interleaved
                )
            },
        )
    if kernel == "hidden_dgrad":
        types = common | gathered | {"tensors": triton_grouped_gemm.Activations(*["*bf16"] * 5)}
        types |= fetched("down_w", block=across) | {"routing_ptr": "*fp32", "dot_ptr": "*fp32"}
        types |= fetched("dy", block=rows, by_engine=tma and not gather)
        return "hidden_dgrad_kernel", types, {"C": common_constants._replace(GATHER=gather, GATED=True, ACT="silu")}
    two = kernel == "gated_wgrad"
    types = (
        common
        | of("dp_ptr", *(["ds_ptr"] if two else []))
        | {"q_stride": "i32", "token_ptr": "*i32", "by_load_ptr": "*i64"}
    )
    types |= fetched("p", *(["s"] if two else []), block=(tiles.BK, tiles.BM))
    types |= fetched("q", block=(tiles.BK, tiles.BN), by_engine=tma and not gather)
    return "wgrad_kernel", types, {"C": triton_wgrad.Constants(*sizes, EVEN=True, TMA=tma, TWO=two, GATHER=gather)}


def cases() -> list[Any]:
    """Estimated tiles with every load path of a kernel; measured tiles with their own."""
    if importlib.util.find_spec("triton") is None:
        return []
    from colonnade.kernels.experts.tiles import table

    estimated, measured = table()
    variants = {"down": [(False, True), (True, True)], "wgrad": [(False, True), (True, False)]}
    variants |= {"input_dgrad": variants["down"], "gated_wgrad": variants["wgrad"]}
    found = {
        (kernel, how, *variant): ()
        for kernel, rows in estimated.items()
        for most, how in rows
        for variant in variants.get(kernel, [(False, True), (True, True), (True, False)])
        if variant[1] or most is None  # rows are gathered where there are many
    }
    found |= {
        (kernel, how, how.descriptors, not how.gather_first): pytest.mark.long
        for kernels in measured.values()
        for kernel, rows in kernels.items()
        for _, how in rows
        if (kernel, how, how.descriptors, not how.gather_first) not in found
    }
    names = {True: "tma", False: "pointers"}, {True: "gathered", False: "laid"}
    return [
        pytest.param(*case, id=f"{case[0]}-{i}-{names[0][case[2]]}-{names[1][case[3]]}", marks=marks)
        for i, (case, marks) in enumerate(found.items())
    ]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("kernel", "how", "tma", "gather"), cases())
def test_expert_kernels_fit_the_gpu(kernel: str, how: Any, tma: bool, gather: bool, tmp_path: Path) -> None:
    from colonnade.kernels.experts import triton_grouped_gemm, triton_wgrad

    name, types, constants = signature(kernel, tma, how, gather=gather)
    function = getattr(triton_grouped_gemm, name, None) or getattr(triton_wgrad, name)
    built = compiled(function, types, constants, DIVISIBLE, warps=how.warps, stages=how.stages)
    assert built.metadata.shared <= SHARED_BYTES
    assert spilled_bytes(built, tmp_path) <= SPILLED_BYTES
    assert ("wgmma" in built.asm["ptx"]) == (how.BM >= 64)
    assert ("cp.async.bulk.tensor" in built.asm["ptx"]) == tma
    # Every operand of the loop is loaded asynchronously, several steps ahead.
    assert "cp.async" in built.asm["ptx"]


@pytest.mark.parametrize("gradient", ["bfloat16", "float32"])
def test_adamw_uses_16_byte_loads_and_stores(gradient: str, tmp_path: Path) -> None:
    """Each thread 16 bytes of float32 at once; exact division and square root, no contraction, no spills."""
    from triton import language as tl

    from colonnade.kernels import triton_adamw

    function = triton_adamw._adamw
    words = {"table_ptr": "*i64", "sizes_ptr": "*i64", "program_weight_ptr": "*i32", "first_program_ptr": "*i32"}
    types = {a: words.get(a, "*fp32" if a.endswith("_ptr") else "fp32") for a in function.arg_names if not a.isupper()}
    types |= {"P": "i32", "moments": triton_adamw._Moments(*["fp32"] * 5)}
    constants = {"GRADIENT": getattr(tl, gradient), "COPY": tl.bfloat16, "ALIGN": triton_adamw.ALIGNED_BYTES}
    constants |= {"BLOCK": triton_adamw.BLOCK, "ITERATIONS": triton_adamw.ITERATIONS}
    built = compiled(function, types, constants, warps=triton_adamw.WARPS, enable_fp_fusion=False)
    assert spilled_bytes(built, tmp_path) == 0
    assert registers(built, tmp_path) <= 64
    ptx = built.asm["ptx"]
    assert ptx.count("ld.global.v4") >= 3 and ptx.count("st.global.v4") >= 3
    assert "div.rn.f32" in ptx and "sqrt.rn.f32" in ptx and "fma.rn.f32" not in ptx


@pytest.mark.parametrize(("experts", "active"), [(8, 2), (64, 6), (128, 8), (300, 12), (4096, 4)])
def test_top_k_kernel_stays_in_registers(experts: int, active: int, tmp_path: Path) -> None:
    import triton

    from colonnade.kernels import triton_routing

    padded = triton.next_power_of_2(experts)
    types = {"ids_ptr": "*i64", "weights_ptr": "*fp32", "compared_ptr": "*fp32", "scores_ptr": "*fp32", "scale": "fp32"}
    types |= dict.fromkeys(("T", "E", "compared_stride", "scores_stride"), "i32")
    rows = max(1, min(triton_routing.MAX_ROWS, triton_routing.BLOCK_VALUES // padded))
    constants = {"A": active, "NORMALISE": True, "E_PAD": padded, "A_PAD": triton.next_power_of_2(active), "ROWS": rows}
    built = compiled(triton_routing._top_experts, types, constants, ("compared_stride", "scores_stride"), warps=4)
    assert spilled_bytes(built, tmp_path) == 0


@pytest.mark.slow
@pytest.mark.parametrize("logits", ["*bf16", "*fp32"])
def test_sampling_kernel_stays_in_registers(logits: str, tmp_path: Path) -> None:
    from colonnade.kernels import triton_sampled_tokens as module

    types = {"logits_ptr": logits, "args_ptr": "*fp64", "tokens_ptr": "*i64"}
    types |= dict.fromkeys(("vocab", "stride", "none"), "i32")
    constants = {"NUM_ARGS": 7, "BLOCK": module.MAX_BLOCK, "DRAW_BLOCK": module.MAX_DRAW_BLOCK}
    built = compiled(module._sample, types, constants, ("vocab", "stride"), warps=module.MAX_BLOCK // 512)
    assert spilled_bytes(built, tmp_path) <= SPILLED_BYTES
    assert "ld.global.v4" in built.asm["ptx"]
    assert built.metadata.shared <= 1024, "a search exchanges sums only"


@pytest.mark.sample(1)
@pytest.mark.parametrize(("experts", "turns"), [(8, 1), (64, 2), (128, 4), (512, 8)])
def test_sort_and_count_kernels_stay_in_registers(experts: int, turns: int, tmp_path: Path) -> None:
    from colonnade.kernels import triton_sort

    numbers = {"N": "i32", "E": "i32", "programs": "i32", "ids_ptr": "*i64", "order_ptr": "*i64", "ends_ptr": "*i64"}
    numbers |= {"counts_ptr": "*i32", "running_ptr": "*i32", "count_ptr": "*i64", "position_ptr": "*i64"}
    cut = {"ITERATIONS": turns, "BLOCK": max(16, min(256, 8192 // experts)), "E_PAD": experts}
    tally = {"BLOCK": triton_sort.HISTOGRAM_BLOCK, "BINS": 2 * experts}
    sorting = [(kernel, cut) for kernel in (triton_sort._count, triton_sort._scatter, triton_sort._rank)]
    kernels = (*sorting, (triton_sort._histogram, tally))
    for function, constants in kernels:
        types = {name: kind for name, kind in numbers.items() if name in function.arg_names}
        assert spilled_bytes(compiled(function, types, constants, warps=4), tmp_path) == 0


@pytest.mark.parametrize("padded", [False, True])
def test_relative_bias_gradient_stays_in_registers(padded: bool, tmp_path: Path) -> None:
    from colonnade.kernels.attention import cudnn_relative as module

    rows = module._Rows("*bf16", "i32", "i32", "i32")
    types: dict[str, Any] = dict.fromkeys(("q", "k", "v", "o", "do"), rows)
    types |= {"lse_ptr": "*fp32", "bias_ptr": "*bf16", "out_ptr": "*fp32", "B": "i32", "T": "i32", "H": "i32"}
    types |= {"scale": "fp32"} | ({"lengths_ptr": "*i32"} if padded else {})
    constants = {"cfg": module._Config(padded, module.BLOCK_Q, module.BLOCK_K, 64)}
    constants |= {} if padded else {"lengths_ptr": None}
    function, whole = module._relative_attention_bias_grad, ("q", "k", "v", "o", "do", "T", "H")
    built = compiled(function, types, constants, whole, warps=module.WARPS, stages=module.STAGES)
    assert spilled_bytes(built, tmp_path) == 0
    assert built.metadata.shared <= SHARED_BYTES // 2, "two blocks on a multiprocessor"


def test_token_is_read_once_for_all_its_rows(tmp_path: Path) -> None:
    """16 bytes per thread, read once and written once for each row."""
    from colonnade.kernels import triton_permute

    types = {"x_ptr": "*bf16", "y_ptr": "*bf16", "inverse_ptr": "*i32", "D": "i32", "stride": "i32"}
    built = compiled(triton_permute._gather_by_token, types, {"A": 8, "BD": 1024}, ("D", "stride"), warps=4)
    assert spilled_bytes(built, tmp_path) == 0
    assert built.asm["ptx"].count("st.global.v4") == 8


def test_decode_expert_kernels_prefetch_16_bytes_at_a_time(tmp_path: Path) -> None:
    from colonnade.kernels.experts import triton_few_tokens

    names = ("x_ptr", "gate_ptr", "up_ptr", "gate_b_ptr", "up_b_ptr", "down_ptr", "down_b_ptr", "y_ptr")
    types = dict.fromkeys(names, "*bf16") | {"ids_ptr": "*i64", "h_ptr": "*fp32", "routing_ptr": "*fp32"}
    types |= dict.fromkeys(("R", "E", "F", "D", "x_t"), "i32")
    up, down = (
        {key: n for key, n in how.items() if key != "num_warps"}
        for how in (triton_few_tokens.UP_TILES, triton_few_tokens.DOWN_TILES)
    )
    constants = triton_few_tokens.UpConstants(
        A=8, GATED=True, BIASED=False, ACT="silu", STEPS=2048 // up["BK"], R_PAD=8, PDL=True, **up
    )
    built = compiled(triton_few_tokens.few_tokens_up_kernel, types, {"C": constants}, ("F", "D", "x_t"), warps=4)
    assert spilled_bytes(built, tmp_path) == 0
    assert built.metadata.shared * triton_few_tokens.PROGRAMS_PER_SM <= SHARED_BYTES
    weight_bytes = 2 * (up["STAGES"] - 1) * up["BN"] * up["BK"] * 2
    assert built.metadata.shared > weight_bytes
    copies = len(re.findall(r"cp\.async\.cg[^;]*, 0x10", built.asm["ptx"]))
    assert copies * 16 * 32 * 4 > weight_bytes
    for outputs, room in ((triton_few_tokens.MIN_OUTPUTS, SHARED_BYTES), (triton_few_tokens.MAX_OUTPUTS, 99 << 10)):
        high = triton_few_tokens.tile_hidden_units(outputs, 2, room)
        constants = triton_few_tokens.DownConstants(
            A=8, BIASED=False, STEPS=-(-768 // high), R_PAD=8, BF=high, BD=outputs, STAGES=down["STAGES"], PDL=True
        )
        built = compiled(triton_few_tokens.few_tokens_down_kernel, types, {"C": constants}, ("F", "D", "x_t"), warps=4)
        assert spilled_bytes(built, tmp_path) == 0
        weight_bytes = (down["STAGES"] - 1) * high * outputs * 2
        assert weight_bytes < built.metadata.shared <= room
        copies = len(re.findall(r"cp\.async\.cg[^;]*, 0x10", built.asm["ptx"]))
        assert copies * 16 * 32 * 4 > weight_bytes


@pytest.mark.parametrize(("words", "unit", "two_levels"), [(4, "*i64", False), (1, "*i16", True)])
def test_ternary_lanes_share_the_inputs_of_a_word(words: int, unit: str, two_levels: bool, tmp_path: Path) -> None:
    """32 lanes have the same word of 32 outputs: the loop exchanges nothing between lanes, and spills nothing."""
    from colonnade.kernels.linear import triton_ternary

    constants = triton_ternary.Constants(
        32, 8, 1, words, 18, 4, two_levels, E_PAD=8, TOKENS=True, GATED=True, ACT="silu", WEIGHTED=True
    )
    matrix = triton_ternary.Matrix(unit, "*bf16", "constexpr")
    two = ("*i32", "*u8", "*i32") if two_levels else ("*i32", "constexpr", "constexpr")
    types = {"matrix": matrix, "gate": matrix, "tables": triton_ternary.Tables(*two)}
    types |= {"order_ptr": "*i64", "ends_ptr": "*i64", "weights_ptr": "*bf16", "x_ptr": "*bf16", "y_ptr": "*bf16"}
    types |= dict.fromkeys(("outputs", "inputs", "E", "stride", "active", "units"), "i32")
    built = compiled(triton_ternary.ternary_kernel, types, {"C": constants}, warps=8)
    assert spilled_bytes(built, tmp_path) == 0
    body = loop_instructions(disassembled(built, tmp_path), "LDG.E.U16", inner=True)
    assert not any(" STS" in line or " SHFL" in line for line in body)
    assert sum("LDG.E.U16" in line for line in body) >= 4 * words  # x, and words of 16 bits


@pytest.mark.parametrize(("frames", "columns"), [(256, 1024), (2048, 32)])
def test_transducer_kernels_stay_in_registers(frames: int, columns: int, tmp_path: Path) -> None:
    """Scans of a warp and of eight, split factors of wide and narrow vocabularies."""
    from colonnade.kernels.transducer import triton_joint, triton_lattice

    longs = dict.fromkeys(("frames_ptr", "labels_ptr", "place_ptr", "table_ptr", "next_ptr"), "*i64")
    common = longs | {"h_ptr": "*bf16", "dz_ptr": "*bf16", "index_ptr": "*i32"}
    common |= {"posteriors": triton_joint.Posteriors(*["*fp32"] * 4)}
    doubles = dict.fromkeys(("alpha_ptr", "beta_ptr"), "*fp64")
    rows, block = triton_joint._tile(columns)
    tiles = {"PARTS": 3, "LEFT": True, "ROWS": rows, "BLOCK": block}
    kernels: list[tuple[Any, dict[str, Any], int]] = [
        (triton_lattice._recursions, {"BLOCK": frames}, max(1, min(8, frames // 128))),
        (triton_lattice._posteriors, {"CELLS": triton_lattice.CELLS}, 4),
        (triton_joint._split, tiles | {"BLOCK": 512}, 4),
        *((kernel, tiles, 4) for kernel in (triton_joint._hidden, triton_joint._statistics)),
        (triton_joint._logit_gradients, tiles, 4),
        *((triton_joint._reduce, {"BY_FRAME": by_frame, "BLOCK": 128}, 4) for by_frame in (True, False)),
    ]
    for function, constants, warps in kernels:
        own = {name: constants[name] for name in function.arg_names if name in constants}
        types = {
            name: common.get(name) or doubles.get(name) or ("*fp32" if name.endswith("_ptr") else "i32")
            for name in function.arg_names
            if name not in own
        }
        if function is triton_joint._split:
            types["out_ptr"] = "*bf16"
        built = compiled(function, types, own, ("D", "padded_D", "V", "padded_V", "padded_C"), warps=warps)
        assert spilled_bytes(built, tmp_path) <= SPILLED_BYTES, function.fn.__name__
