"""Block sizes of the skinny GEMM kernels on a GPU: a measured table, and the constants derived from it.

``python benchmarks/thin_linear.py --tune`` writes ``skinny_gemm_tiles.json``, whose ``measured_on`` names the device.
What the sizes aim at: memory that reads 4.3 TB/s with a latency of 0.9 µs needs 3.9 MB in flight, 30 KB per SM of 132.
A table row without tiles means that the library's GEMM, with separate kernels for norm, gate and residual, is faster.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from colonnade.kernels import tuning
from colonnade.kernels.linear.quantise import INT4_PER_WORD, Kind, Quantised
from colonnade.kernels.linear.reference import Matrix

MAX_ROWS = 16
"""Rows up to which the table applies."""
MAX_CUDA_CORE_ROWS = 4
"""Rows up to which the kernels without tensor cores apply."""
MMA_COLUMNS, MMA_DEPTH = 8, 16
"""The smallest numbers of columns and of summed elements of a tensor core instruction."""
REGISTERS_PER_SM = 1 << 16
CONVERSION_BYTES = 8 << 10
"""Upper bound of the shared memory in which the compiler converts register layouts."""


class SkinnyTiles(NamedTuple):
    """Block sizes of a GEMM of at most :data:`MAX_ROWS` rows."""

    BN: int
    """Outputs per block."""
    BK: int
    """Stored columns per step: inputs, or words of eight inputs for int4."""
    warps: int
    stages: int
    """Steps whose weights are in flight at once, including the one in use."""
    programs_per_sm: int = 0
    """Persistent programs per SM, each taking one block after another; 0: one program per block."""
    tensor_cores: bool = False
    """Whether it uses :mod:`~colonnade.kernels.linear.triton_skinny_gemm_tensor_core`, or else float32 arithmetic in
    registers (:mod:`~colonnade.kernels.linear.triton_skinny_gemm`)."""


FALLBACK = SkinnyTiles(8, 512, 4, 4, 2)
"""Used where the table chose tensor cores, which do not support the operands."""
OVERRIDE: list[SkinnyTiles] = []
"""Tiles that take precedence over the table, for tuning and tests."""


class SplitKTiles(NamedTuple):
    """Block sizes of the split-K kernel for quantised weights."""

    outputs: int
    columns: int
    """Stored columns per step."""
    warps: int
    stages: int


SPLIT_K_TILES: dict[Kind, SplitKTiles] = {
    "int4": SplitKTiles(64, 16, 4, 4),
    "int8": SplitKTiles(64, 128, 4, 4),
    "float8": SplitKTiles(64, 128, 4, 4),
}
"""Estimated, not measured; ``python benchmarks/quantised_linear.py --tune`` measures them."""


def table() -> list[dict[str, Any]]:
    """The rows of the measured table."""
    return tuning.load(__file__, "skinny_gemm_tiles.json")["rows"]


def select_tiles(x_TD: Tensor, weight: Matrix, *, gated: bool) -> SkinnyTiles | None:
    """Tiles for x Wᵀ without gradients; None where the library is to compute it."""
    T = len(x_TD)
    if not 0 < T <= MAX_ROWS or not x_TD.numel():
        return None
    if isinstance(weight, Tensor):
        if weight.dtype != x_TD.dtype or weight.stride(1) != 1:
            return None
        tiles = table_tiles("plain", T, len(weight), x_TD.shape[1], gated=gated)
    else:
        tiles = table_tiles(weight.kind, T, weight.outputs, x_TD.shape[1], gated=gated)
    if tiles is None or not tiles.tensor_cores or tensor_cores_fit(x_TD, weight):
        return tiles
    return FALLBACK if T <= MAX_CUDA_CORE_ROWS else None


def table_tiles(kind: str, rows: int, outputs: int, inputs: int, *, gated: bool) -> SkinnyTiles | None:
    """Tiles of the nearest measured shape, or None where the library is faster; ``kind`` is "plain" or a ``Kind``."""
    if OVERRIDE:
        return OVERRIDE[0]
    found = [row for row in table() if (row["kind"], row["gated"]) == (kind, gated) and rows <= row["rows"]]
    if not found:
        return None
    fewest_rows = min(row["rows"] for row in found)
    nearest = tuning.nearest(
        [row for row in found if row["rows"] == fewest_rows],
        (outputs, inputs),
        lambda row: (row["outputs"], row["inputs"]),
    )
    return SkinnyTiles(**nearest["tiles"]) if nearest["tiles"] else None


def tensor_cores_fit(x_TD: Tensor, weight: Matrix) -> bool:
    """Whether the tensor core kernel supports these: x in 16 bits, weights quantised, rows of whole 16-bit units."""
    if not isinstance(weight, Quantised) or x_TD.dtype not in (torch.bfloat16, torch.float16):
        return False
    return weight.values.stride(1) == 1 and weight.values.stride(0) * weight.values.element_size() % 2 == 0


def tensor_core_constants(
    weight: Quantised, rows: int, tiles: SkinnyTiles, *, gated: bool = False, normed: bool = False,
    shared: float = math.inf,
) -> dict[str, Any]:  # fmt: skip
    """Constants of the tensor core kernel that depend on sizes; a step has BATCH · K units of 16 bits.

    Tiles were measured where a step is a whole row. Longer rows take several steps, each of which also loads x, and a
    gate's second matrix: BK is halved until what is in flight fits ``shared`` bytes of shared memory.
    """
    while True:
        constants = _step_constants(weight, rows, tiles)
        if (
            tiles.BK <= MMA_DEPTH
            or prefetched_bytes(constants, tiles, gated=gated, normed=normed) + CONVERSION_BYTES <= shared
        ):
            return constants
        tiles = tiles._replace(BK=tiles.BK // 2)


def register_limit(tiles: SkinnyTiles) -> dict[str, int]:
    """Launch options of the tensor core kernel that limit registers, so that ``programs_per_sm`` programs fit an SM.

    Without a limit the compiler takes so many registers that only one does.
    """
    most = REGISTERS_PER_SM // (32 * tiles.warps * max(1, tiles.programs_per_sm)) // 8 * 8
    return {"maxnreg": most} if tiles.programs_per_sm > 1 and most < 255 else {}


def prefetched_bytes(constants: dict[str, Any], tiles: SkinnyTiles, *, gated: bool, normed: bool) -> int:
    """Bytes of shared memory of the steps in flight."""
    int4 = constants["KIND"] == "int4"
    units = constants["BATCH"] * constants["K"]
    step = 2 * tiles.BN * units + (4 * tiles.BN * constants["BATCH"] * constants["PARTS"] if int4 else 0)
    if constants["STEPS"] > 1:
        inputs = units * (4 if int4 else 2)
        step = step * (2 if gated else 1) + 2 * inputs * (constants["M"] + normed)
    return (tiles.stages - 1) * step


def _step_constants(weight: Quantised, rows: int, tiles: SkinnyTiles) -> dict[str, Any]:
    M = _next_power_of_2(rows)
    row_bytes = weight.values.shape[1] * weight.values.element_size()
    stored = max(MMA_DEPTH, min(tiles.BK, _next_power_of_2(weight.values.shape[1])))
    step, parts, words = stored * weight.values.element_size() // 2, max(1, MMA_COLUMNS // M), 1
    if weight.kind == "int4":
        words = weight.group // INT4_PER_WORD
        parts = max(parts, MMA_DEPTH // (2 * words))
        span, depth = 2 * words, 2 * words * parts
        # Each warp needs a part of the inputs; if there are too few, use half as many groups side by side.
        while step // depth < tiles.warps and parts > 1 and depth > MMA_DEPTH:
            M, parts, depth = 2 * M, parts // 2, depth // 2
        batch = max(1, step // depth)
    else:
        batch = max(1, min(tiles.warps, step // MMA_DEPTH))
        span = depth = max(MMA_DEPTH, step // batch)
    step = batch * depth
    even = row_bytes % (2 * step) == 0
    if weight.kind == "int4":
        even = even and weight.inputs == weight.values.shape[1] * INT4_PER_WORD
    return {
        "KIND": weight.kind, "WORDS": words, "EVEN": even, "STEPS": -(-row_bytes // (2 * step)), "M": M,
        "BATCH": batch, "K": depth, "PARTS": parts, "SPAN": span,
    }  # fmt: skip


def _next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()
