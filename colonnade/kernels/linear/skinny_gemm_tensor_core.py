"""How a product of a few rows is cut up for the matrix units
(:mod:`~colonnade.kernels.linear.triton_skinny_gemm_tensor_core`).
"""

# pyright: reportCallIssue=false, reportArgumentType=false
# A kernel is launched with more than its signature says, and its constants are plain numbers.

import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from colonnade.kernels.linear import triton_skinny_gemm_tensor_core
from colonnade.kernels.linear.quantise import INT4_PER_WORD, Quantised
from colonnade.kernels.linear.reference import Matrix
from colonnade.kernels.linear.skinny_gemm_tiles import SkinnyTiles

COLUMNS = 8
"""The least that a matrix unit has of them."""
DEPTH = 16
"""The least that a product of matrices sums over."""

REGISTERS = 1 << 16
"""Of a multiprocessor."""
CONVERSION_BYTES = 8 << 10
"""Bytes of shared memory, at most, in which the compiler lays out anew what it has in registers."""


def tensor_cores_fit(x_TD: Tensor, weight: Matrix) -> bool:
    """Whether the kernel takes these: numbers of 16 bits, and rows of whole halves of 16 bits."""
    if not isinstance(weight, Quantised) or x_TD.dtype not in (torch.bfloat16, torch.float16):
        return False
    return weight.values.stride(1) == 1 and weight.values.stride(0) * weight.values.element_size() % 2 == 0


def tensor_core_constants(
    weight: Quantised,
    rows: int,
    tiles: SkinnyTiles,
    *,
    gated: bool = False,
    normed: bool = False,
    room: float = math.inf,
) -> dict[str, Any]:
    """The kernel's constants that depend on sizes; BATCH · K halves of 16 bits are a step.

    Tiles were measured where a step is a whole row. Rows that are longer than those take several, in each of which x is
    on its way too, and a gate's second matrix: as many halves as fit into ``room`` bytes of shared memory.
    """
    while True:
        found = _cut(weight, rows, tiles)
        if tiles.BK <= DEPTH or prefetched_bytes(found, tiles, gated=gated, normed=normed) + CONVERSION_BYTES <= room:
            return found
        tiles = tiles._replace(BK=tiles.BK // 2)


def prefetched_bytes(constants: dict[str, Any], tiles: SkinnyTiles, *, gated: bool, normed: bool) -> int:
    """Bytes of shared memory of the steps that are brought ahead."""
    four, many = constants["KIND"] == "int4", constants["STEPS"] > 1
    halves = constants["BATCH"] * constants["K"]
    step = 2 * tiles.BN * halves + (4 * tiles.BN * constants["BATCH"] * constants["PARTS"] if four else 0)
    if many:
        inputs = halves * (4 if four else 2)
        step = step * (2 if gated else 1) + 2 * inputs * (constants["M"] + normed)
    return (tiles.stages - 1) * step


def _cut(weight: Quantised, rows: int, tiles: SkinnyTiles) -> dict[str, Any]:
    M = triton.next_power_of_2(rows)
    row_bytes = weight.values.shape[1] * weight.values.element_size()
    stored = max(DEPTH, min(tiles.BK, triton.next_power_of_2(weight.values.shape[1])))
    step, parts, words = stored * weight.values.element_size() // 2, max(1, COLUMNS // M), 1
    if weight.kind == "int4":
        words = weight.group // INT4_PER_WORD
        parts = max(parts, DEPTH // (2 * words))
        span, depth = 2 * words, 2 * words * parts
        # A part of the inputs for every warp, if need be with a row twice and half as many groups beside it.
        while step // depth < tiles.warps and parts > 1 and depth > DEPTH:
            M, parts, depth = 2 * M, parts // 2, depth // 2
        batch = max(1, step // depth)
    else:
        batch = max(1, min(tiles.warps, step // DEPTH))
        span = depth = max(DEPTH, step // batch)
    step = batch * depth
    even = row_bytes % (2 * step) == 0
    if weight.kind == "int4":
        even = even and weight.inputs == weight.values.shape[1] * INT4_PER_WORD
    found = {
        "KIND": weight.kind, "WORDS": words, "EVEN": even, "STEPS": triton.cdiv(row_bytes, 2 * step), "M": M,
        "BATCH": batch, "K": depth, "PARTS": parts, "SPAN": span,
    }  # fmt: skip
    # Left alone, the compiler takes registers that leave room for one program a multiprocessor.
    most = REGISTERS // (32 * tiles.warps * max(1, tiles.programs_per_sm)) // 8 * 8
    return found | ({"maxnreg": most} if tiles.programs_per_sm > 1 and most < 255 else {})


def launch(
    programs: int, tensors: Sequence[Tensor], sizes: Sequence[int], eps: float, constants: dict[str, Any]
) -> None:
    """Run the kernel: weights (third and sixth of ``tensors``) are read as halves of 16 bits."""
    x, gain, w, w_scale, bias, u, *others = tensors
    triton_skinny_gemm_tensor_core.tensor_core_kernel[programs,](
        x, gain, w.view(torch.int16), w_scale, bias, u.view(torch.int16), *others, *sizes, eps,
        ASM=x.is_cuda, **constants,  # the interpreter has no assembler
    )  # fmt: skip
