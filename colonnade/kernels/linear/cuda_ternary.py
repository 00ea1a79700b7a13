"""Ternary words times a few rows in CUDA C++ for Hopper (cuda_ternary.cu): supported inputs, tables, launch.

The same product as :mod:`~colonnade.kernels.linear.triton_ternary`, which handles everything else: float32, 32
weights a word, biases, other activations than silu, other GPUs, and machines without NVRTC. Each block has in shared
memory: two tables of 32 KB, in which it looks words up; x as columns; and all weights that it reads, which bulk copies
bring while x is written. The lanes of a warp are 32 outputs at the same column, so their terms of x lie in different
banks.
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
RANGES, RANGE = 124, 32
"""Words from 128 on are found by ranges of 32, at 124 + word // 32 of the first table; those before by themselves."""
ENTRIES = RANGES + ternary.TABLE_WORDS // RANGE
NEVER = 255
"""No border in a range."""
TRITS = (18, 24)
"""Of 32 weights the last one has the sign bit, and words are in another order."""


@functools.cache
def tables(trits: int, device: torch.device | str = "cpu") -> Tensor:
    """int32: for each range of words its block's first word, where ±x of the last place lies in a column (byte 2), and
    where the next block begins (byte 3); then the places of each rest, a byte each.
    """
    codes = ternary.table(trits)[: ternary.word_count(trits)].tolist()
    places = [_places(code, trits) for code in codes]
    zero = 4 * trits
    last = [each[-1] if each else zero for each in places]
    begins = [i for i in range(len(codes)) if i == 0 or last[i] != last[i - 1]] + [len(codes)]
    ranges, block = list[int](), 0
    for entry in range(ENTRIES):
        alone = entry < RANGES + RANGES // 31
        first = entry if alone else (entry - RANGES) * RANGE
        while block < len(begins) and begins[block] <= first:
            block += 1  # the next one
        if first >= len(codes):
            ranges.append(first | zero << 16 | NEVER << 24)
            continue
        border = begins[block] - first
        assert alone or border >= RANGE or block + 1 == len(begins) or begins[block + 1] - first >= RANGE
        ranges.append(begins[block - 1] | last[first] << 16 | (NEVER if alone or border >= RANGE else border) << 24)
    most = ternary.NONZERO[trits] - 1
    rests = [each for each in places if len(each) <= most and (not each or each[-1] < zero - 4)]
    rests = [each + [zero] * (most - len(each)) for each in rests]
    words = ranges + [sum(offset << 8 * j for j, offset in enumerate(each)) for each in rests]
    words += [0] * (-len(words) % 4)  # bulk copies take multiples of 16 bytes
    return torch.tensor([word - (word >> 31 << 32) for word in words], dtype=torch.int32).to(device)


def _places(code: int, trits: int) -> list[int]:
    """Where ±x of each weight that is not 0 lies in a column, ascending."""
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
    """A product by experts: rows' choices and experts' ends, the gate's matrix, routing weights, activation."""

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
    """How the outputs of a row are divided."""

    blocks: int
    most: int
    """Tiles of a block."""
    shared_bytes: int


@functools.cache
def layout(
    outputs: int, words: int, trits: int, matrices: int, processors: int, limit: int, warps: int = WARPS
) -> Layout | None:
    """Of a row's outputs: the fewest blocks, in whole rounds of the SMs, whose tiles fit the shared memory."""
    tiles = -(-outputs // BN)
    fixed = 4 * len(tables(trits)) + -(-(4 * trits + 4) * words // 16) * 16 + 8
    for rounds in range(1, tiles // processors + 2):
        blocks = min(tiles, rounds * processors)
        most = -(-tiles // blocks)
        shared = fixed + most * matrices * (64 * words + 4 * 32 * warps + 8)
        if shared <= limit:
            return Layout(blocks, most, shared)
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
    """The CUDA C++."""
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
    """y = rows of x by a matrix, or by that of the row's expert; arguments as in :mod:`triton_ternary`."""
    device, words, trits = x.device, matrix.values.shape[-1], matrix.group
    found, second = _layout(matrix, 1 if gate is None else 2, device, warps), matrix if gate is None else gate
    assert found is not None, "supports() says so"
    constants = macros(
        trits, words, x.dtype, gated=gate is not None, silu=activation == "silu", routed=ends is not None,
        tokens=active > 0, weighted=0 if routing is None else routing.element_size(), warps=warps,
    )  # fmt: skip

    def at(tensor: Tensor | None) -> int:
        return 0 if tensor is None else tensor.data_ptr()

    arguments = ARGUMENTS.pack(
        at(x), at(order), at(ends), at(routing), at(matrix.values), at(second.values), at(tables(trits, device)),
        at(matrix.scales), at(second.scales), at(y), x.stride(0), matrix.outputs, matrix.inputs, words,
        0 if ends is None else len(ends), max(1, active), found.blocks, -(-matrix.outputs // BN), found.most,
    )  # fmt: skip
    kernel = _kernel(tuple(constants.items()), found.shared_bytes, device)
    with torch.cuda.device(device):
        kernel.launch(len(y) * found.blocks, 32 * warps, arguments)
