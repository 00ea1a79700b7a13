"""Launches the CUDA C++ kernel for products of a few rows with ternary weights on Hopper (cuda_ternary.cu).

It computes the same product as :mod:`~colonnade.kernels.linear.triton_ternary`, which covers all other cases: float32,
32 weights per word, biases, activations other than silu, other GPUs, and machines without NVRTC. Each thread block
keeps in shared memory two lookup tables of 32 KB, x as columns, and all the weights that it reads; bulk copies load the
weights while x is written. The lanes of a warp compute 32 outputs of the same column, so their terms of x lie in
different banks.
"""

import functools
import logging
import struct
from pathlib import Path
from typing import NamedTuple, TypedDict

import torch
from torch import Tensor

from colonnade.kernels import nvrtc
from colonnade.kernels.device import multiprocessors, shared_memory_bytes
from colonnade.kernels.linear import ternary
from colonnade.kernels.linear.quantise import Quantised

log = logging.getLogger(__name__)
ARCH = (9, 0)
ARGUMENTS = struct.Struct("10Qq8i")
BN, WARPS = 32, 16
RANGE_OFFSET, RANGE_WORDS = 124, 32
"""The first table has one entry for each word below 128, then one for each range of 32 words: word // 32 + 124."""
ENTRIES = RANGE_OFFSET + ternary.TABLE_WORDS // RANGE_WORDS
NO_BOUNDARY = 255
"""Marks an entry whose words all belong to the same block."""
TRITS = (18, 24)
"""Words of 32 weights are not supported: their last weight has the sign bit, so the words are in another order."""


@functools.cache
def tables(trits: int, device: torch.device | str = "cpu") -> Tensor:
    """Both lookup tables in one int32 tensor.

    Words with the same last nonzero weight and sign are consecutive; they form a block. An entry of the first table has
    the block's first word (bits 0 to 15), the offset of that last weight in a column of x (bits 16 to 23), and where in
    the range the next block begins, or :data:`NO_BOUNDARY` (bits 24 to 31). The second table has a word's other
    offsets, a byte each, by its number in its block.
    """
    codes = ternary.table(trits)[: ternary.word_count(trits)].tolist()
    offsets = [_column_offsets(code, trits) for code in codes]
    zero = 4 * trits
    last = [each[-1] if each else zero for each in offsets]
    block_starts = [i for i in range(len(codes)) if i == 0 or last[i] != last[i - 1]] + [len(codes)]
    entries, next_block = list[int](), 0
    for entry in range(ENTRIES):
        single_word = entry < RANGE_OFFSET + RANGE_OFFSET // 31
        first = entry if single_word else (entry - RANGE_OFFSET) * RANGE_WORDS
        while next_block < len(block_starts) and block_starts[next_block] <= first:
            next_block += 1
        if first >= len(codes):
            entries.append(first | zero << 16 | NO_BOUNDARY << 24)
            continue
        boundary = block_starts[next_block] - first
        one_block = single_word or boundary >= RANGE_WORDS
        at_most_two = next_block + 1 == len(block_starts) or block_starts[next_block + 1] - first >= RANGE_WORDS
        assert one_block or at_most_two
        start = block_starts[next_block - 1]
        entries.append(start | last[first] << 16 | (NO_BOUNDARY if one_block else boundary) << 24)
    most = ternary.NONZERO[trits] - 1
    others = [each for each in offsets if len(each) <= most and (not each or each[-1] < zero - 4)]
    others = [each + [zero] * (most - len(each)) for each in others]
    numbers = entries + [sum(offset << 8 * j for j, offset in enumerate(each)) for each in others]
    numbers += [0] * (-len(numbers) % 4)  # bulk copies take multiples of 16 bytes
    return torch.tensor([number - (number >> 31 << 32) for number in numbers], dtype=torch.int32).to(device)


def _column_offsets(code: int, trits: int) -> list[int]:
    """Byte offsets in a column of x of the terms ±x of a word's nonzero weights, ascending."""
    return [4 * i + 2 * (code >> 2 * i & 3 == 2) for i in range(trits) if code >> 2 * i & 3]


@functools.cache
def _device_supported(device: torch.device) -> bool:
    """Whether this GPU is supported and NVRTC available; logs the reason once if not."""
    capability = torch.cuda.get_device_capability(device)
    reason = nvrtc.unavailable_reason() if capability == ARCH else f"{device} has compute capability {capability}"
    if reason is not None:
        log.warning("ternary weights are multiplied in Triton, not in CUDA C++: %s", reason)
    return reason is None


class Routing(TypedDict, total=False):
    """Arguments of a product with experts: the choices of rows, ends of experts, gate, routing weights, activation."""

    order: Tensor | None
    ends: Tensor | None
    gate: Quantised | None
    routing: Tensor | None
    activation: str


def supports(
    x: Tensor, matrix: Quantised, *, order: Tensor | None = None, ends: Tensor | None = None,
    gate: Quantised | None = None, routing: Tensor | None = None, activation: str = "",
) -> bool:  # fmt: skip
    """Whether the kernel supports this product of rows of ``x``, without bias; their number does not matter."""
    parts = [matrix] if gate is None else [matrix, gate]
    return (
        x.is_cuda
        and x.dtype in (torch.bfloat16, torch.float16)
        and x.stride(-1) == 1
        and matrix.group in TRITS
        and activation in ("", "silu")
        and all(each is None or each.dtype == torch.int64 for each in (order, ends))
        and (routing is None or (routing.is_contiguous() and routing.dtype in (x.dtype, torch.float32)))
        and all(part.values.is_contiguous() and part.values.data_ptr() % 16 == 0 for part in parts)
        and all(part.scales.is_contiguous() and part.scales.dtype == torch.bfloat16 for part in parts)
        and matrix.outputs * matrix.values.shape[-1] % 8 == 0  # each expert begins at a multiple of 16 bytes
        and _device_supported(x.device)
        and _layout(matrix, len(parts), x.device) is not None
    )


class Layout(NamedTuple):
    """How the outputs of a row are divided among thread blocks."""

    blocks: int
    max_tiles: int
    """Tiles of a thread block at most."""
    shared_bytes: int


@functools.cache
def layout(
    outputs: int, words: int, trits: int, matrices: int, processors: int, limit: int, warps: int = WARPS
) -> Layout | None:
    """The layout with the fewest thread blocks, in whole waves of the SMs, whose tiles fit into shared memory."""
    tiles = -(-outputs // BN)
    fixed = 4 * len(tables(trits)) + -(-(4 * trits + 4) * words // 16) * 16 + 8
    for waves in range(1, tiles // processors + 2):
        blocks = min(tiles, waves * processors)
        max_tiles = -(-tiles // blocks)
        shared = fixed + max_tiles * matrices * (64 * words + 4 * 32 * warps + 8)
        if shared <= limit:
            return Layout(blocks, max_tiles, shared)
    return None


def _layout(matrix: Quantised, matrices: int, device: torch.device, warps: int = WARPS) -> Layout | None:
    processors, limit = multiprocessors(device), shared_memory_bytes(device)
    return layout(matrix.outputs, matrix.values.shape[-1], matrix.group, matrices, processors, limit, warps)


def macros(
    trits: int, words: int, dtype: torch.dtype, *, gated: bool = False, silu: bool = False, routed: bool = False,
    tokens: bool = False, weighted: int = 0, warps: int = WARPS,
) -> dict[str, int]:  # fmt: skip
    """Macros of a kernel variant; ``weighted`` is the size of a routing weight."""
    per = 4 if words % 4 == 0 else 2 if words % 2 == 0 else 1
    return {
        "TRITS": trits, "REST": ternary.NONZERO[trits] - 1, "BF16": int(dtype == torch.bfloat16), "PER": per,
        "GATED": int(gated), "SILU": int(silu), "ROUTED": int(routed), "TOKENS": int(tokens), "WEIGHTED": weighted,
        "WARPS": warps, "TABLE_WORDS": len(tables(trits)),
    }  # fmt: skip


@functools.cache
def source() -> str:
    """The CUDA C++ source."""
    return Path(__file__).with_suffix(".cu").read_text(encoding="utf-8")


@functools.cache
def _kernel(constants: tuple[tuple[str, int], ...], shared: int, device: torch.device) -> nvrtc.Kernel:
    options = ["--std=c++17", *(f"-D{name}={value}" for name, value in constants)]
    binary = nvrtc.compile_cubin(source(), options, "sm_{}{}".format(*ARCH))
    with torch.cuda.device(device):
        return nvrtc.Kernel(binary, "ternary", shared)


def launch(
    x: Tensor,
    matrix: Quantised,
    y: Tensor,
    *,
    order: Tensor | None = None,
    ends: Tensor | None = None,
    active: int = 0,
    gate: Quantised | None = None,
    routing: Tensor | None = None,
    activation: str = "",
    warps: int = WARPS,
) -> None:
    """Multiplies each row of x by the matrix, or by that of its expert; arguments as in :mod:`triton_ternary`."""
    device, words, trits = x.device, matrix.values.shape[-1], matrix.group
    second = matrix if gate is None else gate
    layout = _layout(matrix, 1 if gate is None else 2, device, warps)
    assert layout is not None, "the caller has checked supports()"
    constants = macros(
        trits, words, x.dtype, gated=gate is not None, silu=activation == "silu", routed=ends is not None,
        tokens=active > 0, weighted=0 if routing is None else routing.element_size(), warps=warps,
    )  # fmt: skip

    def address(tensor: Tensor | None) -> int:
        return 0 if tensor is None else tensor.data_ptr()

    arguments = ARGUMENTS.pack(
        address(x), address(order), address(ends), address(routing), address(matrix.values), address(second.values),
        address(tables(trits, device)), address(matrix.scales), address(second.scales), address(y), x.stride(0),
        matrix.outputs, matrix.inputs, words, 0 if ends is None else len(ends), max(1, active), layout.blocks,
        -(-matrix.outputs // BN), layout.max_tiles,
    )  # fmt: skip
    kernel = _kernel(tuple(constants.items()), layout.shared_bytes, device)
    with torch.cuda.device(device):
        kernel.launch(len(y) * layout.blocks, 32 * warps, arguments)
