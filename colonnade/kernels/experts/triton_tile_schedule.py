"""Which tile of which expert a program computes, found on the device: nothing here waits for the loads of the experts.

Expert e has ceil(n_e / BM) · columns tiles, an idle one none. The host knows R = Σ n_e (or a bound of it) and E only,
so it starts min(programs that fit on the chip, (R // BM + min(E, R)) · columns) programs: that many tiles of rows
always suffice, since Σ ceil(n_e / BM) ≤ (R − E′) // BM + E′ over the E′ experts that have rows. Program p takes the
tiles p, p + programs, p + 2·programs, … of the tiles that there are, whichever experts they fall to, so a skewed load
costs a partly filled tile for an expert and nothing else.

The rows of one token have an expert each: with ALONE, each row is a tile, and only its own place is looked for.

The order of an expert's tiles keeps what is read together in the level-2 cache: GROUP tiles of rows run through all
columns before the next GROUP start, so that the weights are read from memory m_e / GROUP times, not m_e times.
"""

# pyright: reportCallIssue=false, reportArgumentType=false
# A kernel is launched with more than its signature says, and its constants are plain numbers.

import triton
from torch import Tensor
from triton import language as tl

from colonnade.kernels.device import multiprocessors
from colonnade.kernels.experts.tiles import Tiles


@triton.jit
def spread(ends_ptr, R, E, columns, BM: tl.constexpr, E_PAD: tl.constexpr, TAIL: tl.constexpr):
    """(each expert's first tile, its tiles of rows); with TAIL, the rows past the last end are those of an expert E."""
    e = tl.arange(0, E_PAD)
    end_e = tl.load(ends_ptr + e, e < E, 0).to(tl.int32)
    start_e = tl.load(ends_ptr + e - 1, (e > 0) & (e <= E), 0).to(tl.int32)
    if TAIL:
        end_e = tl.where(e == E, R, end_e)
    rows_e = tl.where(e < E + TAIL, end_e - start_e, 0)
    tiles_e = (rows_e + BM - 1) // BM
    return tl.cumsum(tiles_e * columns, 0) - tiles_e * columns, tiles_e


@triton.jit
def place(tile, first_e, tiles_e, columns, E_PAD: tl.constexpr, GROUP: tl.constexpr):
    """(expert, tile of its rows, tile of columns) of a tile."""
    expert = tl.sum((first_e + tiles_e * columns <= tile).to(tl.int32), 0)
    this = tl.arange(0, E_PAD) == expert
    local = tile - tl.sum(tl.where(this, first_e, 0), 0)
    tiles = tl.sum(tl.where(this, tiles_e, 0), 0)
    first = local // (GROUP * columns) * GROUP
    size = tl.minimum(tiles - first, GROUP)
    local = local % (GROUP * columns)
    return expert, first + local % size, local // size


@triton.jit
def rows_of(ends_ptr, expert, E, R):
    """(first, end) of an expert's rows; of expert E those past the last end."""
    start = tl.load(ends_ptr + expert - 1, expert > 0, 0).to(tl.int32)
    return start, tl.load(ends_ptr + expert, expert < E, R).to(tl.int32)


@triton.jit
def tiles(ends_ptr, R, E, columns, BM: tl.constexpr, E_PAD: tl.constexpr, TAIL: tl.constexpr, ALONE: tl.constexpr):
    """(how many tiles there are, what :func:`find` needs to know of them)."""
    if ALONE:
        e = tl.arange(0, E_PAD)
        first_e = tl.load(ends_ptr + e, e < E, R).to(tl.int32)
        tiles_e = first_e
        count = tl.load(ends_ptr + E - 1).to(tl.int32)
    else:
        first_e, tiles_e = spread(ends_ptr, R, E, columns, BM, E_PAD, TAIL)
        count = tl.sum(tiles_e, 0)
    return count * columns, first_e, tiles_e


@triton.jit
def find(
    tile, first_e, tiles_e, ends_ptr, R, E, columns, E_PAD: tl.constexpr, GROUP: tl.constexpr, ALONE: tl.constexpr
):
    """(expert, tile of its rows, tile of columns, first of its rows, their end) of a tile."""
    if ALONE:
        start = tile // columns
        expert, m, n = tl.sum((first_e <= start).to(tl.int32), 0), 0, tile % columns
        end = start + 1
    else:
        expert, m, n = place(tile, first_e, tiles_e, columns, E_PAD, GROUP)
        start, end = rows_of(ends_ptr, expert, E, R)
    return expert, m, n, start, end


def programs(rows: int, ends_E: Tensor, columns: int, tiles: Tiles, *, tail: bool = False, single: bool = False) -> int:
    """How many programs to start for ``rows`` rows and ``columns`` columns; ``single``: each row is a tile."""
    groups = len(ends_E) + tail
    most = (rows if single else rows // tiles.BM + min(groups, rows)) * triton.cdiv(columns, tiles.BN)
    return min(most, tiles.a_processor * multiprocessors(ends_E.device)) if tiles.a_processor else most


def padded(ends_E: Tensor) -> int:
    """A power of two above the number of experts."""
    return triton.next_power_of_2(len(ends_E) + 1)
