"""Batch-invariant kernels: a row's result does not depend, bitwise, on the other rows of the batch.

**Linear layers**, y = x Wᵀ + b: libraries choose the split of the summed dimension by the number of rows. Here one
program sums each output over the inputs in order. In 16 bits the tile depends on the sizes, and the bits do not
depend on the tile (:func:`tile_of`).

**Norms**: a program per row; the order of a row's sum depends on its width only. torch's reductions also depend on the
number of rows, so that a row's last bit may change with the batch.

**Paged attention**: a request's result does not depend on the batch or on prompt chunking. Flash-Decoding with splits
at fixed positions (:mod:`~colonnade.kernels.attention.triton_decode`), also for prompts. In Triton all blocks have 16
rows, or as many as one query has; in CUDA C++ only those of prompts. The cost is that a prompt's keys are read once
for every few queries. Which queries share a block does not matter: keys that a row does not see are states
of weight 0, which do not change a sum.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from colonnade.kernels.attention.decode_plan import DevicePlan, KernelLayout
from colonnade.kernels.attention.page_table import PageTable
from colonnade.kernels.attention.triton_decode import attend

CHUNK = 512
"""Keys per split; splits end at multiples of this."""


class Tile(NamedTuple):
    """Rows, outputs and inputs of a tile, and launch options."""

    rows: int
    outputs: int
    inputs: int
    warps: int
    stages: int


FLOAT32 = Tile(64, 32, 64, warps=4, stages=3)
FEW_ROWS = Tile(64, 16, 128, warps=4, stages=5)
FEW_ROWS_WIDE = Tile(64, 32, 128, warps=4, stages=4)
MEDIUM = Tile(64, 32, 128, warps=4, stages=3)
MANY_ROWS = Tile(128, 128, 64, warps=8, stages=3)
PROGRAMS = 96
"""With so many, a GPU is busy enough for the tiles of many rows."""


def tile_of(rows: int, outputs: int, dtype: torch.dtype) -> Tile:
    """The tile for a product.

    In 16 bits all tiles give the same bits: each warpgroup adds 16 inputs at a time to 64 rows of sums by ``wgmma``, in
    order, whatever the tile. float32 does not use tensor cores and has one tile.
    """
    if dtype == torch.float32:
        return FLOAT32
    if rows <= 64:
        return FEW_ROWS if outputs < 4096 else FEW_ROWS_WIDE
    programs = triton.cdiv(rows, MANY_ROWS.rows) * triton.cdiv(outputs, MANY_ROWS.outputs)
    return MANY_ROWS if programs >= PROGRAMS else MEDIUM


@triton.jit
def _linear(
    x_ptr, w_ptr, b_ptr, y_ptr, rows, outputs, inputs, x_t, w_f,
    BIASED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    x_row = x_ptr + m[:, None].to(tl.int64) * x_t
    w_row = w_ptr + n[None, :].to(tl.int64) * w_f
    total = tl.zeros([BM, BN], tl.float32)
    for k0 in range(0, inputs, BK):
        valid = k0 + k < inputs
        x = tl.load(x_row + (k0 + k)[None, :], mask=(m < rows)[:, None] & valid[None, :], other=0)
        w = tl.load(w_row + (k0 + k)[:, None], mask=(n < outputs)[None, :] & valid[:, None], other=0)
        total = tl.dot(x, w, total, input_precision="ieee")
    if BIASED:
        total += tl.load(b_ptr + n, mask=n < outputs, other=0).to(tl.float32)[None, :]
    y_at = y_ptr + m[:, None].to(tl.int64) * outputs + n[None, :]
    tl.store(y_at, total, mask=(m < rows)[:, None] & (n < outputs)[None, :])


def linear(x_TD: Tensor, weight_FD: Tensor, bias_F: Tensor | None = None, tile: Tile | None = None) -> Tensor:
    """y_TF (see :func:`reference.linear`)."""
    x = x_TD.reshape(-1, x_TD.shape[-1])
    x, w = (a if a.stride(1) == 1 else a.contiguous() for a in (x, weight_FD))
    (rows, inputs), outputs = x.shape, len(w)
    y = x.new_empty(rows, outputs)
    if y.numel():
        tile = tile or tile_of(rows, outputs, x.dtype)
        _linear[triton.cdiv(outputs, tile.outputs), triton.cdiv(rows, tile.rows)](
            x, w, y if bias_F is None else bias_F, y, rows, outputs, inputs, x.stride(0), w.stride(0),
            BIASED=bias_F is not None, BM=tile.rows, BN=tile.outputs, BK=tile.inputs,
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
    return y.view(*x_TD.shape[:-1], outputs)


@triton.jit
def _norm(x_ptr, w_ptr, b_ptr, y_ptr, width, eps, LAYER: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * width
    column = tl.arange(0, BLOCK)
    mask = column < width
    x = tl.load(x_ptr + row + column, mask=mask, other=0).to(tl.float32)
    if LAYER:
        x = tl.where(mask, x - tl.sum(x, 0) / width, 0)
    y = x * tl.rsqrt(tl.sum(x * x, 0) / width + eps) * tl.load(w_ptr + column, mask=mask, other=0).to(tl.float32)
    if LAYER:
        y += tl.load(b_ptr + column, mask=mask, other=0).to(tl.float32)
    tl.store(y_ptr + row + column, y, mask=mask)


def norm(x: Tensor, weight_D: Tensor, bias_D: Tensor | None, eps: float) -> Tensor:
    """y (see :func:`norm.norm`)."""
    width = len(weight_D)
    x = x.contiguous()
    y = torch.empty_like(x)
    if x.numel():
        block = triton.next_power_of_2(width)
        _norm[x.numel() // width,](
            x, weight_D, weight_D if bias_D is None else bias_D, y, width, eps, LAYER=bias_D is not None, BLOCK=block,
            num_warps=min(16, max(1, block // 512)),
        )  # fmt: skip
    return y


def paged(
    q_TNH: Tensor,
    k_PpKH: Tensor,
    v_PpKH: Tensor,
    table: PageTable,
    *,
    window: int | None = None,
    values: int | None = None,
) -> Tensor:
    """o_TNH (see :func:`reference.paged`), for head widths up to 256."""
    key = "fixed splits", q_TNH.shape[1], k_PpKH.shape[2], q_TNH.shape[2], q_TNH.dtype, k_PpKH.dtype, window
    if key not in table.plan_cache:
        table.plan_cache[key] = _make_plans(q_TNH, k_PpKH, table, window)
    first, *rest = table.plan_cache[key]
    state = attend(q_TNH, k_PpKH, v_PpKH, table, first)
    for ready in rest:
        state = attend(q_TNH, k_PpKH, v_PpKH, table, ready, into=state)
    return state.o[..., :values]


def _make_plans(q_TNH: Tensor, k_PpKH: Tensor, table: PageTable, window: int | None) -> tuple[DevicePlan, ...]:
    """A plan for requests of one query, and one for prompts in blocks of more rows, if the kernel has such blocks."""
    new, lengths = table.host_lengths
    decodes = max(1, sum(n == 1 for n in new))
    layout = KernelLayout.of(q_TNH[:decodes], k_PpKH, 1, window=window, chunk=CHUNK)
    prompts = KernelLayout.of(q_TNH, k_PpKH, max(new, default=1), window=window, chunk=CHUNK)
    parts = [(layout, new)]
    if prompts.shape.rows > layout.shape.rows:
        parts = [(layout, [n if n == 1 else 0 for n in new]), (prompts, [n if n != 1 else 0 for n in new])]
    used = [(layout, queries) for layout, queries in parts if any(queries)] or parts[:1]
    return tuple(
        layout.prepare(layout.plan(lengths, queries, max_keys=table.max_keys), q_TNH.device) for layout, queries in used
    )
