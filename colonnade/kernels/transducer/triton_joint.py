"""A transducer's joint network on a GPU: tensor cores and chunks of cells.

Computes the same as :mod:`~colonnade.kernels.transducer.joint`, with two differences:

**Tensor cores.** float32 operands are sums of bfloat16 parts, x = x₀ + x₁ + x₂ of 8 bits each, and a product is the sum
of the products of parts i and j with i + j < n, in one GEMM whose inner dimension holds all pairs, summed in float32.
n = 3 keeps float32's 24 bits, for the losses; n = 2 keeps 16, for gradients. bfloat16 operands have n = 1.

**Deterministic sums.** A frame's gradient is summed by one program over its prefixes and a prefix's over its frames, in
a fixed order, without atomic additions.
"""

from bisect import bisect_right
from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton import language as tl

from colonnade.kernels.transducer.cells import Cells
from colonnade.kernels.transducer.joint import NEGLIGIBLE, Gradients, Posteriors

CHUNK_BYTES = 192 << 20
"""Memory for a chunk's hidden units, logits and their gradients [bytes]; smaller chunks take longer to launch."""
CHUNK_ROWS = 16384
"""Maximum number of cells in a chunk."""
ROW_ALIGNMENT = 8
"""Rows of GEMM operands are padded to this many elements, 16 bytes."""
TILE = tl.constexpr(2048)
"""Logits that a program loads at once."""
BIAS_ROWS = tl.constexpr(64)
"""Cells whose gradients a program adds up for the bias."""
REDUCED = tl.constexpr(32)
"""Cells that a program adds at once to a frame's or a prefix's gradient."""


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


VARYING = ["B", "U", "T", "R", "cells", "blank", "first_row", "stop_row", "base"]
"""Arguments that differ from batch to batch or chunk to chunk: a kernel is not compiled for their values."""


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


@triton.jit(do_not_specialize=VARYING)
def _hidden(
    e_ptr, p_ptr, place_ptr, h_ptr, table_ptr, B, U, T, R, D, padded_D, PARTS: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """relu(e_t + p_u) of a chunk's cells, left factors."""
    r, d = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = tl.load(place_ptr + r, r < R, 0)
    b = place // (U * T)
    frame = tl.load(table_ptr + 2 * B + b) + place % T
    prefix = tl.load(table_ptr + 3 * B + b) + place // T % U
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


@triton.jit(do_not_specialize=VARYING)
def _statistics(
    z_ptr, bias_ptr, place_ptr, out_ptr, next_ptr, T, cells, R, V, padded_V, blank, ROWS: tl.constexpr,
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
    label = tl.load(next_ptr + place // T)
    blank_z = _logit(row_ptr, bias_ptr, tl.zeros_like(label) + blank, V, r < R)
    label_z = _logit(row_ptr, bias_ptr, label, V, r < R)
    tl.store(out_ptr + place, top, r < R)
    tl.store(out_ptr + cells + place, total, r < R)
    tl.store(out_ptr + 2 * cells + place, blank_z, r < R)
    tl.store(out_ptr + 3 * cells + place, label_z, r < R)


@triton.jit(do_not_specialize=VARYING)
def _logit_gradients(
    z_ptr, bias_ptr, place_ptr, posteriors, dz_ptr, db_ptr, next_ptr, U, T, R, V, padded_V, blank, PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Gradients of logits, right factors; and their sums over BIAS_ROWS cells, for the bias."""
    v = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    bias = tl.load(bias_ptr + v, v < V, 0.0).to(tl.float32)
    db = tl.zeros((BLOCK,), tl.float32)
    PAIRS: tl.constexpr = PARTS * (PARTS + 1) // 2
    ROWS: tl.constexpr = min(TILE // BLOCK, BIAS_ROWS)
    for first in range(0, BIAS_ROWS, ROWS):
        r = tl.program_id(0) * BIAS_ROWS + first + tl.arange(0, ROWS)
        here = r < R
        place = tl.load(place_ptr + r, here, 0)
        grad = tl.load(posteriors.grad_B + place // (U * T), here, 0.0).to(tl.float32)
        blank_post = tl.load(posteriors.blank_BUT + place, here, 0.0) * grad
        label_post = tl.load(posteriors.label_BUT + place, here, 0.0) * grad
        lse = tl.load(posteriors.lse_BUT + place, here, 0.0)
        label = tl.load(next_ptr + place // T)
        mask = here[:, None] & (v < V)[None, :]
        z = tl.load(z_ptr + r.to(tl.int64)[:, None] * padded_V + v[None, :], mask, float("-inf"))
        dz = tl.exp(z + bias[None, :] - lse[:, None]) * (blank_post + label_post)[:, None]
        dz -= tl.where((v == blank)[None, :], blank_post[:, None], 0.0)
        dz -= tl.where(v[None, :] == label[:, None], label_post[:, None], 0.0)
        dz = tl.where(mask, dz, 0.0)
        db += tl.sum(dz, 0)
        at = r.to(tl.int64)[:, None] * (PAIRS * padded_V) + v[None, :]
        _store_pairs(dz_ptr, at, padded_V, here[:, None] & (v < padded_V)[None, :], dz, PARTS, LEFT=False)
    tl.store(db_ptr + tl.program_id(0) * V + v, db, v < V)


@triton.jit(do_not_specialize=VARYING)
def _reduce(
    dh_ptr, e_ptr, p_ptr, index_ptr, out_ptr, table_ptr, B, U, T, first_row, stop_row, base, D, padded_D,
    BY_FRAME: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Adds ∂loss/∂h where h > 0 of one frame's or of one prefix's cells in the chunk to its gradient.

    The chunk has the live cells of the rows (b, u) from ``first_row`` on; its first one has the index ``base``.
    """
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if BY_FRAME:
        b, t = first_row // U + tl.program_id(0) // T, tl.program_id(0) % T
        low = tl.maximum(0, first_row - b * U)
        high = tl.minimum(tl.load(table_ptr + B + b).to(tl.int32) + 1, stop_row - b * U)
        if t >= tl.load(table_ptr + b):
            return
        first, stride = b * U * T + t, T
        own_ptr, own = e_ptr, tl.load(table_ptr + 2 * B + b) + t
        other_ptr, other = p_ptr, tl.load(table_ptr + 3 * B + b)
    else:
        row = first_row + tl.program_id(0)
        b, u = row // U, row % U
        low, high = 0, tl.load(table_ptr + b).to(tl.int32)
        if u > tl.load(table_ptr + B + b):
            return
        first, stride = row * T, 1
        own_ptr, own = p_ptr, tl.load(table_ptr + 3 * B + b) + u
        other_ptr, other = e_ptr, tl.load(table_ptr + 2 * B + b)
    x = tl.load(own_ptr + own * D + d, d < D, 0.0).to(tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for at in range(low, high, REDUCED):
        i = at + tl.arange(0, REDUCED)
        index = tl.load(index_ptr + first + i * stride, i < high, -1)
        mask = (index >= 0)[:, None] & (d < D)[None, :]
        y = tl.load(other_ptr + (other + i)[:, None] * D + d[None, :], mask, 0.0).to(tl.float32)
        dh = tl.load(dh_ptr + (index - base).to(tl.int64)[:, None] * padded_D + d[None, :], mask, 0.0)
        total += tl.sum(tl.where(x[None, :] + y > 0, dh, 0.0), 0)
    tl.store(out_ptr + own * D + d, tl.load(out_ptr + own * D + d, d < D) + total, d < D)


def _padded(n: int) -> int:
    return max(1, -(-n // ROW_ALIGNMENT)) * ROW_ALIGNMENT


def _tile(columns: int) -> tuple[int, int]:
    """(rows, columns) of a program's block."""
    block = max(16, min(1024, triton.next_power_of_2(columns)))
    return max(1, TILE.value // block), block


def _chunk_rows(split: Split, D: int, V: int, *, backward: bool) -> int:
    """Cells of a chunk that fit into CHUNK_BYTES with their logits, and in the backward pass the gradients of these."""
    width = split.pairs * split.dtype.itemsize
    cell_bytes = D * width + V * (4 + (width if backward else 0))
    return max(1, min(CHUNK_ROWS, CHUNK_BYTES // cell_bytes))


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a·b of bfloat16 or float16 in float32."""
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float()


def _factors(x_RC: Tensor, split: Split, *, left: bool, stacked: bool) -> Tensor:
    """Factors of each pair of parts, side by side, or ``stacked`` vertically; padded with 0."""
    R, C = x_RC.shape
    rows, columns = _padded(R), _padded(C)
    shape = (split.pairs * rows, columns) if stacked else (rows, split.pairs * columns)
    out = torch.empty(shape, dtype=split.dtype, device=x_RC.device)
    row_stride, stride = (columns, rows * columns) if stacked else (split.pairs * columns, columns)
    grid = (rows, triton.cdiv(columns, 512))
    _split[grid](x_RC.contiguous(), out, R, C, columns, row_stride, stride, split.parts, left, 512)
    return out


def _logits(
    e_TD: Tensor, p_UD: Tensor, weight: Tensor, place_c: Tensor, cells: Cells, split: Split
) -> tuple[Tensor, Tensor]:
    """(left factors of the hidden units, logits without bias) of a chunk's cells."""
    rows, D, (B, U, T) = len(place_c), e_TD.shape[1], cells.shape
    padded = _padded(D)
    h = torch.empty(rows, split.pairs * padded, dtype=split.dtype, device=e_TD.device)
    tile = _tile(padded)
    launch = (triton.cdiv(rows, tile[0]), triton.cdiv(padded, tile[1]))
    _hidden[launch](e_TD, p_UD, place_c, h, cells.table, B, U, T, rows, D, padded, split.parts, *tile)
    return h, _product(h, weight.T)


class _Operands(NamedTuple):
    """The joint network's tensors; labels are counted from this rank's first row of W."""

    e_TD: Tensor
    p_UD: Tensor
    bias_v: Tensor
    forward: Tensor
    next_BU: Tensor
    blank: int
    split: Split

    @staticmethod
    def of(
        e_TD: Tensor,
        p_UD: Tensor,
        weight_vD: Tensor,
        bias_v: Tensor,
        cells: Cells,
        blank: int,
        start: int,
        split: Split,
    ) -> "_Operands":
        split = split if e_TD.dtype == torch.float32 else Split(1, e_TD.dtype)
        forward = _factors(weight_vD, split, left=False, stacked=False)
        next_BU = cells.next_BU - start if start else cells.next_BU
        return _Operands(e_TD.contiguous(), p_UD.contiguous(), bias_v, forward, next_BU, blank - start, split)


def scores(
    e_TD: Tensor, p_UD: Tensor, weight_vD: Tensor, bias_v: Tensor, cells: Cells, *, blank: int, start: int
) -> Tensor:
    """(4, B, U, T), see :func:`joint.scores`; undefined outside of the utterances."""
    own, V = _Operands.of(e_TD, p_UD, weight_vD, bias_v, cells, blank, start, LOSS), len(weight_vD)
    padded_V, tile, (B, U, T) = _padded(V), _tile(V), cells.shape
    out_4BUT = torch.empty(4, B, U, T, dtype=torch.float32, device=e_TD.device)
    for place_c in cells.cell_indices().split(_chunk_rows(own.split, e_TD.shape[1], padded_V, backward=False)):
        rows = len(place_c)
        z = _logits(own.e_TD, own.p_UD, own.forward, place_c, cells, own.split)[1]
        _statistics[(triton.cdiv(rows, tile[0]),)](
            z, bias_v, place_c, out_4BUT, own.next_BU, T, B * U * T, rows, V, padded_V, own.blank, *tile
        )
        del z  # before the next chunk's
    return out_4BUT


class _Live(NamedTuple):
    """Cells with more than negligible posteriors, in the order of the grid."""

    place_M: Tensor
    index: Tensor
    """(B·U·T,) int32: the index of each cell among the live ones, or −1."""
    ends: list[int]
    """For each row (b, u) the live cells up to its end."""

    @staticmethod
    def of(posteriors: Posteriors) -> "_Live":
        B, U, T = posteriors.lse_BUT.shape
        live_RT = (posteriors.blank_BUT + posteriors.label_BUT > NEGLIGIBLE).view(B * U, T)
        ends = live_RT.sum(1).cumsum(0).tolist()
        place_M = live_RT.flatten().nonzero().squeeze(1)
        index = torch.full((B * U * T,), -1, dtype=torch.int32, device=place_M.device)
        index[place_M] = torch.arange(len(place_M), dtype=torch.int32, device=place_M.device)
        return _Live(place_M, index, ends)

    def chunks(self, rows: int) -> Iterator[tuple[int, int, int, Tensor]]:
        """(first row, row after the last, index of the first cell, cells) of runs of at most ``rows`` cells, or of a
        larger row alone.
        """
        first = base = 0
        while base < len(self.place_M):
            stop = max(bisect_right(self.ends, base + rows), bisect_right(self.ends, base) + 1)
            yield first, stop, base, self.place_M[base : self.ends[stop - 1]]
            first, base = stop, self.ends[stop - 1]


class _Backward(NamedTuple):
    """State shared by all chunks of a backward pass."""

    own: _Operands
    back: Tensor
    """W's factors for ∂loss/∂h."""
    cells: Cells
    posteriors: Posteriors
    index: Tensor
    out: Gradients

    def add(self, first: int, stop: int, base: int, place_c: Tensor) -> None:
        """Add the gradients of a chunk of live cells to ``out``; its tensors are freed before the next chunk's."""
        (own, back, cells, posteriors, index, out), rows = self, len(place_c)
        (B, U, T), (V, D), split = cells.shape, out.weight_vD.shape, own.split
        padded_V, blocks, block = _padded(V), triton.cdiv(rows, BIAS_ROWS.value), _tile(_padded(V))[1]
        h, z = _logits(own.e_TD, own.p_UD, own.forward, place_c, cells, split)
        dz = torch.empty(rows, split.pairs * padded_V, dtype=split.dtype, device=z.device)
        db = torch.empty(blocks, V, dtype=torch.float32, device=z.device)
        _logit_gradients[blocks, triton.cdiv(padded_V, block)](
            z, own.bias_v, place_c, posteriors, dz, db, own.next_BU, U, T, rows, V, padded_V, own.blank, split.parts,
            block,
        )  # fmt: skip
        del z
        out.bias_v.add_(db.sum(0))
        out.weight_vD.add_(_product(dz.view(-1, padded_V).T, h.view(-1, _padded(D)))[:V, :D])
        del h
        dh, width = _product(dz, back), min(128, max(16, triton.next_power_of_2(D)))
        frames = ((stop - 1) // U - first // U + 1) * T
        for by_frame, sums, programs in ((True, out.e_TD, frames), (False, out.p_UD, stop - first)):
            _reduce[programs, triton.cdiv(D, width)](
                dh, own.e_TD, own.p_UD, index, sums, cells.table, B, U, T, first, stop, base, D, _padded(D), by_frame,
                width,
            )  # fmt: skip


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
    """See :func:`joint.gradients`; float32. Synchronises with the device, to count the live cells."""
    own = _Operands.of(e_TD, p_UD, weight_vD, bias_v, cells, blank, start, GRADIENT)
    back = _factors(weight_vD, own.split, left=True, stacked=True)
    shapes = (x.shape for x in (e_TD, p_UD, weight_vD, bias_v))
    out = Gradients(*(torch.zeros(shape, dtype=torch.float32, device=e_TD.device) for shape in shapes))
    posteriors = Posteriors(*(x.contiguous() for x in posteriors))
    live = _Live.of(posteriors)
    backward = _Backward(own, back, cells, posteriors, live.index, out)
    rows = _chunk_rows(own.split, e_TD.shape[1], _padded(len(weight_vD)), backward=True)
    for chunk in live.chunks(rows):
        backward.add(*chunk)
    return out
