"""A transducer's joint network on a GPU: tensor cores, chunks of cells, and no backward pass through dead cells.

The same as :mod:`~colonnade.kernels.transducer.joint`, with three differences:

**Tensor cores.** float32 operands are sums of bfloat16 parts, x = x₀ + x₁ + x₂ of 8 bits each, and a product is the sum
of the products of parts i and j with i + j < n, in one GEMM whose inner dimension holds all pairs, summed in float32.
n = 3 keeps float32's 24 bits, for the losses; n = 2 keeps 16, for gradients. bfloat16 operands have n = 1.

**Dead cells.** A cell's logits enter the gradients times its posterior. Cells that alignments pass with a probability
below DEAD are left out of the backward pass. All cells of a frame add up to at least 1, so what is left out is below
float32's rounding. With random weights about half of all cells are dead, in a trained recogniser nearly all.

**Deterministic sums.** A frame's gradient is summed by one program over its prefixes and a prefix's over its frames, in
a fixed order, without atomic additions.
"""

from bisect import bisect_right
from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton import language as tl

from colonnade.kernels.transducer.cells import Cells
from colonnade.kernels.transducer.joint import Gradients, Posteriors

CHUNK_BYTES = 1 << 27
"""Memory for a chunk's hidden units, logits and their gradients [bytes]."""
CHUNK_ROWS = 8192
"""Most cells of a chunk."""
DEAD = 2.0**-32
"""Largest posterior of a cell that is left out of the backward pass."""
ROW_ALIGNMENT = 8
"""Rows of GEMM operands are padded to this many elements, 16 bytes."""
BIAS_ROWS = 64
"""Cells whose gradients a program adds up for the bias."""


class Split(NamedTuple):
    """float32 numbers as sums of ``parts`` numbers of ``dtype``."""

    parts: int
    dtype: torch.dtype

    @property
    def pairs(self) -> int:
        """Products of parts that are not neglected."""
        return self.parts * (self.parts + 1) // 2


LOSS, GRADIENT = Split(3, torch.bfloat16), Split(2, torch.bfloat16)
"""Of float32 operands; others are not split."""


class _Grid(NamedTuple):
    """The cells' lengths and starts, as kernels take them."""

    frames_ptr: Tensor
    labels_ptr: Tensor
    frame_start_ptr: Tensor
    prefix_start_ptr: Tensor
    next_ptr: Tensor
    U: int
    T: int

    @staticmethod
    def of(cells: Cells) -> "_Grid":
        _, U, T = cells.shape
        starts = (cells.frame_start_B, cells.prefix_start_B)
        return _Grid(cells.frames_B, cells.labels_B, *starts, cells.next_BU, U, T)


@triton.jit
def _part(x, WHICH: tl.constexpr, dtype: tl.constexpr):
    """The part number WHICH of float32 values."""
    for _ in tl.static_range(WHICH):
        x = x - x.to(dtype).to(tl.float32)
    return x.to(dtype)


@triton.jit
def _store_pairs(ptr, at, stride, mask, x, PARTS: tl.constexpr, LEFT: tl.constexpr):
    """Stores the left or the right factor of each pair of parts, ``stride`` elements apart."""
    for i in tl.static_range(PARTS):
        for j in tl.static_range(PARTS - i):
            value = _part(x, i if LEFT else j, ptr.dtype.element_ty)
            tl.store(ptr + at + (i * PARTS - i * (i - 1) // 2 + j) * stride, value, mask)


@triton.jit
def _split(
    x_ptr, out_ptr, R, C, padded_C, row_stride, stride, PARTS: tl.constexpr, LEFT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Factors of a matrix, rows and columns padded with 0."""
    r, c = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + r.to(tl.int64) * C + c, c < tl.where(r < R, C, 0), 0.0).to(tl.float32)
    _store_pairs(out_ptr, r.to(tl.int64) * row_stride + c, stride, c < padded_C, x, PARTS, LEFT)


@triton.jit
def _hidden(
    e_ptr, p_ptr, place_ptr, h_ptr, grid, R, D, padded_D, PARTS: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """relu(e_t + p_u) of a chunk's cells, left factors."""
    r, d = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = tl.load(place_ptr + r, r < R, 0)
    b, u, t = place // (grid.U * grid.T), place // grid.T % grid.U, place % grid.T
    frame, prefix = tl.load(grid.frame_start_ptr + b) + t, tl.load(grid.prefix_start_ptr + b) + u
    mask = (r < R)[:, None] & (d < D)[None, :]
    e = tl.load(e_ptr + frame[:, None] * D + d[None, :], mask, 0.0).to(tl.float32)
    p = tl.load(p_ptr + prefix[:, None] * D + d[None, :], mask, 0.0).to(tl.float32)
    PAIRS: tl.constexpr = PARTS * (PARTS + 1) // 2
    at = r.to(tl.int64)[:, None] * (PAIRS * padded_D) + d[None, :]
    mask = (r < R)[:, None] & (d < padded_D)[None, :]
    _store_pairs(h_ptr, at, padded_D, mask, tl.maximum(e + p, 0.0), PARTS, LEFT=True)


@triton.jit
def _logit(row_ptr, bias_ptr, label, V, here):
    """The label's logit, 0 where its row is not here."""
    own = here & (label >= 0) & (label < V)
    return tl.load(row_ptr + label, own, 0.0) + tl.load(bias_ptr + label, own, 0.0).to(tl.float32)


@triton.jit
def _statistics(
    z_ptr, bias_ptr, place_ptr, out_ptr, grid, cells, R, V, padded_V, blank, start, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Largest logit, sum of exponentials below it, logits of blank and next label, into the grid."""
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row_ptr = z_ptr + r.to(tl.int64) * padded_V
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    for first in range(0, V, BLOCK):
        v = first + tl.arange(0, BLOCK)
        z = tl.load(row_ptr[:, None] + v[None, :], (r < R)[:, None] & (v < V)[None, :], float("-inf"))
        z += tl.load(bias_ptr + v, v < V, 0.0).to(tl.float32)[None, :]
        new = tl.maximum(top, tl.max(z, 1))
        safe = tl.where(new == float("-inf"), 0.0, new)
        total = total * tl.exp(top - safe) + tl.sum(tl.exp(z - safe[:, None]), 1)
        top = new
    place = tl.load(place_ptr + r, r < R, 0)
    label = tl.load(grid.next_ptr + place // grid.T) - start
    blank_z = _logit(row_ptr, bias_ptr, tl.zeros_like(label) + (blank - start), V, r < R)
    label_z = _logit(row_ptr, bias_ptr, label, V, r < R)
    tl.store(out_ptr + place, top, r < R)
    tl.store(out_ptr + cells + place, total, r < R)
    tl.store(out_ptr + 2 * cells + place, blank_z, r < R)
    tl.store(out_ptr + 3 * cells + place, label_z, r < R)


@triton.jit
def _logit_gradients(
    z_ptr, bias_ptr, place_ptr, posteriors, dz_ptr, db_ptr, grid, R, V, padded_V, blank, start, PARTS: tl.constexpr,
    STEPS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Gradients of logits, right factors; and their sums over STEPS · ROWS cells, for the bias."""
    v = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    bias = tl.load(bias_ptr + v, v < V, 0.0).to(tl.float32)
    db = tl.zeros((BLOCK,), tl.float32)
    PAIRS: tl.constexpr = PARTS * (PARTS + 1) // 2
    for step in range(STEPS):
        r = (tl.program_id(0) * STEPS + step) * ROWS + tl.arange(0, ROWS)
        here = r < R
        place = tl.load(place_ptr + r, here, 0)
        grad = tl.load(posteriors.grad_B + place // (grid.U * grid.T), here, 0.0).to(tl.float32)
        blank_post = tl.load(posteriors.blank_BUT + place, here, 0.0) * grad
        label_post = tl.load(posteriors.label_BUT + place, here, 0.0) * grad
        lse = tl.load(posteriors.lse_BUT + place, here, 0.0)
        label = tl.load(grid.next_ptr + place // grid.T)
        mask = here[:, None] & (v < V)[None, :]
        z = tl.load(z_ptr + r.to(tl.int64)[:, None] * padded_V + v[None, :], mask, float("-inf"))
        dz = tl.exp(z + bias[None, :] - lse[:, None]) * (blank_post + label_post)[:, None]
        dz -= tl.where((v + start == blank)[None, :], blank_post[:, None], 0.0)
        dz -= tl.where((v + start)[None, :] == label[:, None], label_post[:, None], 0.0)
        dz = tl.where(mask, dz, 0.0)
        db += tl.sum(dz, 0)
        at = r.to(tl.int64)[:, None] * (PAIRS * padded_V) + v[None, :]
        _store_pairs(dz_ptr, at, padded_V, here[:, None] & (v < padded_V)[None, :], dz, PARTS, LEFT=False)
    tl.store(db_ptr + tl.program_id(0) * V + v, db, v < V)


class _Chunk(NamedTuple):
    """Live cells of the rows (b, u) from ``first`` on, of which the first one has the index ``base``."""

    first: int
    stop: int
    base: int


@triton.jit
def _reduce(
    dh_ptr, e_ptr, p_ptr, index_ptr, out_ptr, grid, chunk, D, padded_D, BY_FRAME: tl.constexpr, CELLS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Adds ∂loss/∂h where h > 0 of one frame's or of one prefix's cells in the chunk to its gradient."""
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if BY_FRAME:
        b, t = chunk.first // grid.U + tl.program_id(0) // grid.T, tl.program_id(0) % grid.T
        low = tl.maximum(0, chunk.first - b * grid.U)
        high = tl.minimum(tl.load(grid.labels_ptr + b).to(tl.int32) + 1, chunk.stop - b * grid.U)
        if t >= tl.load(grid.frames_ptr + b):
            return
        first, stride = b * grid.U * grid.T + t, grid.T
        own_ptr, own = e_ptr, tl.load(grid.frame_start_ptr + b) + t
        other_ptr, other = p_ptr, tl.load(grid.prefix_start_ptr + b)
    else:
        row = chunk.first + tl.program_id(0)
        b, u = row // grid.U, row % grid.U
        low, high = 0, tl.load(grid.frames_ptr + b).to(tl.int32)
        if u > tl.load(grid.labels_ptr + b):
            return
        first, stride = row * grid.T, 1
        own_ptr, own = p_ptr, tl.load(grid.prefix_start_ptr + b) + u
        other_ptr, other = e_ptr, tl.load(grid.frame_start_ptr + b)
    x = tl.load(own_ptr + own * D + d, d < D, 0.0).to(tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for at in range(low, high, CELLS):
        i = at + tl.arange(0, CELLS)
        index = tl.load(index_ptr + first + i * stride, i < high, -1)
        mask = (index >= 0)[:, None] & (d < D)[None, :]
        y = tl.load(other_ptr + (other + i)[:, None] * D + d[None, :], mask, 0.0).to(tl.float32)
        dh = tl.load(dh_ptr + (index - chunk.base).to(tl.int64)[:, None] * padded_D + d[None, :], mask, 0.0)
        total += tl.sum(tl.where(x[None, :] + y > 0, dh, 0.0), 0)
    tl.store(out_ptr + own * D + d, tl.load(out_ptr + own * D + d, d < D) + total, d < D)


def _padded(n: int) -> int:
    return max(1, -(-n // ROW_ALIGNMENT)) * ROW_ALIGNMENT


def _tile(columns: int) -> tuple[int, int]:
    """(rows, columns) of a program's block."""
    block = max(16, min(1024, triton.next_power_of_2(columns)))
    return max(1, 2048 // block), block


def _chunk_rows(split: Split, D: int, V: int) -> int:
    """Cells of a chunk that fit into CHUNK_BYTES."""
    width = split.pairs * split.dtype.itemsize
    return max(1, min(CHUNK_ROWS, CHUNK_BYTES // (D * (width + 4) + V * (width + 4))))


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a·b of bfloat16 or float16 in float32."""
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float()


def _factors(x_RC: Tensor, split: Split, *, left: bool, stacked: bool) -> Tensor:
    """Factors of each pair of parts, one beside the other, or ``stacked`` one below the other; padded with 0."""
    R, C = x_RC.shape
    rows, columns = _padded(R), _padded(C)
    shape = (split.pairs * rows, columns) if stacked else (rows, split.pairs * columns)
    out = torch.empty(shape, dtype=split.dtype, device=x_RC.device)
    row_stride, stride = (columns, rows * columns) if stacked else (split.pairs * columns, columns)
    grid = (rows, triton.cdiv(columns, 512))
    _split[grid](x_RC.contiguous(), out, R, C, columns, row_stride, stride, split.parts, left, 512)
    return out


def _logits(
    e_TD: Tensor, p_UD: Tensor, weight: Tensor, place_c: Tensor, grid: _Grid, split: Split
) -> tuple[Tensor, Tensor]:
    """(left factors of the hidden units, logits without bias) of a chunk's cells."""
    rows, D = len(place_c), e_TD.shape[1]
    padded = _padded(D)
    h = torch.empty(rows, split.pairs * padded, dtype=split.dtype, device=e_TD.device)
    tile = _tile(padded)
    launch = (triton.cdiv(rows, tile[0]), triton.cdiv(padded, tile[1]))
    _hidden[launch](e_TD, p_UD, place_c, h, grid, rows, D, padded, split.parts, *tile)
    return h, _product(h, weight.T)


def scores(
    e_TD: Tensor, p_UD: Tensor, weight_vD: Tensor, bias_v: Tensor, cells: Cells, *, blank: int, start: int
) -> Tensor:
    """(4, B, U, T), see :func:`joint.scores`; undefined outside of the utterances."""
    split = LOSS if e_TD.dtype == torch.float32 else Split(1, e_TD.dtype)
    e_TD, p_UD, (V, D) = e_TD.contiguous(), p_UD.contiguous(), weight_vD.shape
    weight, padded_V, tile = _factors(weight_vD, split, left=False, stacked=False), _padded(V), _tile(V)
    grid, place_M = _Grid.of(cells), cells.places()
    out_4BUT = torch.empty(4, *cells.shape, dtype=torch.float32, device=e_TD.device)
    for place_c in place_M.split(_chunk_rows(split, D, padded_V)):
        _, z = _logits(e_TD, p_UD, weight, place_c, grid, split)
        launch, rows = (triton.cdiv(len(z), tile[0]),), len(z)
        _statistics[launch](
            z, bias_v, place_c, out_4BUT, grid, out_4BUT[0].numel(), rows, V, padded_V, blank, start, *tile
        )
    return out_4BUT


def gradients(
    e_TD: Tensor,
    p_UD: Tensor,
    weight_vD: Tensor,
    bias_v: Tensor,
    cells: Cells,
    posteriors: Posteriors,
    *,
    blank: int,
    start: int,
) -> Gradients:
    """See :func:`joint.gradients`; float32. Synchronises once with the device, to count the live cells."""
    split = GRADIENT if e_TD.dtype == torch.float32 else Split(1, e_TD.dtype)
    e_TD, p_UD, (V, D), device = e_TD.contiguous(), p_UD.contiguous(), weight_vD.shape, e_TD.device
    padded_V, padded_D = _padded(V), _padded(D)
    forward = _factors(weight_vD, split, left=False, stacked=False)
    back = _factors(weight_vD, split, left=True, stacked=True)
    out = Gradients(
        *(torch.zeros(x.shape, dtype=torch.float32, device=device) for x in (e_TD, p_UD, weight_vD, bias_v))
    )
    posteriors = Posteriors(*(x.contiguous() for x in posteriors))
    grid, (B, U, T) = _Grid.of(cells), cells.shape
    live_RT = (posteriors.blank_BUT + posteriors.label_BUT > DEAD).view(B * U, T)
    ends = live_RT.sum(1).cumsum(0).tolist()
    place_M = live_RT.flatten().nonzero().squeeze(1)
    index_M = torch.full((B * U * T,), -1, dtype=torch.int32, device=device)
    index_M[place_M] = torch.arange(len(place_M), dtype=torch.int32, device=device)
    most, first, base = _chunk_rows(split, D, padded_V), 0, 0
    dz_tile, reduce_block = _tile(padded_V), min(128, max(16, triton.next_power_of_2(D)))
    steps = max(1, BIAS_ROWS // dz_tile[0])
    while base < len(place_M):
        stop = max(bisect_right(ends, base + most), first + 1)
        place_c = place_M[base : ends[stop - 1]]
        if (rows := len(place_c)) == 0:
            first = stop
            continue
        h, z = _logits(e_TD, p_UD, forward, place_c, grid, split)
        programs = triton.cdiv(rows, steps * dz_tile[0])
        dz = torch.empty(rows, split.pairs * padded_V, dtype=split.dtype, device=device)
        db = torch.empty(programs, V, dtype=torch.float32, device=device)
        _logit_gradients[programs, triton.cdiv(padded_V, dz_tile[1])](
            z, bias_v, place_c, posteriors, dz, db, grid, rows, V, padded_V, blank, start, split.parts, steps, *dz_tile
        )
        out.bias_v.add_(db.sum(0))
        dw = _product(dz.view(-1, padded_V).T, h.view(-1, padded_D))
        out.weight_vD.add_(dw[:V, :D])
        dh, chunk = _product(dz, back), _Chunk(first, stop, base)
        columns = triton.cdiv(D, reduce_block)
        utterances = (stop - 1) // U - first // U + 1
        for by_frame, sums, programs in ((True, out.e_TD, utterances * T), (False, out.p_UD, stop - first)):
            _reduce[programs, columns](
                dh, e_TD, p_UD, index_M, sums, grid, chunk, D, padded_D, by_frame, 32, reduce_block
            )
        first, base = stop, ends[stop - 1]
    return out
