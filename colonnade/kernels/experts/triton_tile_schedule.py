"""Maps programs to tiles of the experts on the device, without synchronising on the experts' loads.

Expert e has ceil(n_e / BM) · columns tiles; an expert without rows has none. The host only knows R = Σ n_e (or an upper
bound) and E. It launches min(programs that fit on the GPU, (R // BM + min(E, R)) · columns) programs: always enough for
every tile of rows, since Σ ceil(n_e / BM) ≤ (R − E′) // BM + E′ over the E′ experts that have rows. Program p computes
tiles p, p + programs, p + 2·programs, … of any expert, so a skewed load costs at most one partly filled tile per
expert.

With ONE_TOKEN all rows belong to one token. Its rows have distinct experts, so each row is a tile.

Tiles of an expert are ordered for L2 reuse: GROUP tiles of rows go through all columns before the next GROUP starts, so
weights are read from memory m_e / GROUP times, not m_e times.
"""

import triton
from torch import Tensor
from triton import language as tl

from colonnade.kernels.device import multiprocessors
from colonnade.kernels.experts.tiles import GroupedTiles


@triton.jit
def count_tiles(ends_ptr, E, columns, BM: tl.constexpr, E_PAD: tl.constexpr):
    """(first tile of each expert, tiles of rows of each expert)."""
    e = tl.arange(0, E_PAD)
    end_e = tl.load(ends_ptr + e, e < E, 0).to(tl.int32)
    start_e = tl.load(ends_ptr + e - 1, (e > 0) & (e <= E), 0).to(tl.int32)
    rows_e = tl.where(e < E, end_e - start_e, 0)
    tiles_e = (rows_e + BM - 1) // BM
    return tl.cumsum(tiles_e * columns, 0) - tiles_e * columns, tiles_e


@triton.jit
def locate_tile(tile, first_e, tiles_e, columns, E_PAD: tl.constexpr, GROUP: tl.constexpr):
    """(expert, tile of its rows, tile of columns)."""
    expert = tl.sum((first_e + tiles_e * columns <= tile).to(tl.int32), 0)
    this = tl.arange(0, E_PAD) == expert
    local = tile - tl.sum(tl.where(this, first_e, 0), 0)
    tiles = tl.sum(tl.where(this, tiles_e, 0), 0)
    first = local // (GROUP * columns) * GROUP
    size = tl.minimum(tiles - first, GROUP)
    local = local % (GROUP * columns)
    return expert, first + local % size, local // size


@triton.jit
def expert_rows(ends_ptr, expert):
    """(first, end) of an expert's rows."""
    start = tl.load(ends_ptr + expert - 1, expert > 0, 0).to(tl.int32)
    return start, tl.load(ends_ptr + expert).to(tl.int32)


@triton.jit
def schedule(ends_ptr, E, columns, BM: tl.constexpr, E_PAD: tl.constexpr, ONE_TOKEN: tl.constexpr):
    """(number of tiles, the two tables that :func:`find_tile` needs)."""
    if ONE_TOKEN:
        e = tl.arange(0, E_PAD)
        first_e = tl.load(ends_ptr + e, e < E, 0x7FFFFFFF).to(tl.int32)
        tiles_e = first_e
        count = tl.load(ends_ptr + E - 1).to(tl.int32)
    else:
        first_e, tiles_e = count_tiles(ends_ptr, E, columns, BM, E_PAD)
        count = tl.sum(tiles_e, 0)
    return count * columns, first_e, tiles_e


@triton.jit
def find_tile(
    tile, first_e, tiles_e, ends_ptr, columns, E_PAD: tl.constexpr, GROUP: tl.constexpr, ONE_TOKEN: tl.constexpr
):
    """(expert, tile of its rows, tile of columns, first of its rows, end of its rows)."""
    if ONE_TOKEN:
        start = tile // columns
        expert, m, n = tl.sum((first_e <= start).to(tl.int32), 0), 0, tile % columns
        end = start + 1
    else:
        expert, m, n = locate_tile(tile, first_e, tiles_e, columns, E_PAD, GROUP)
        start, end = expert_rows(ends_ptr, expert)
    return expert, m, n, start, end


def grid_size(rows: int, ends_E: Tensor, columns: int, tiles: GroupedTiles, *, one_token: bool = False) -> int:
    """Programs to launch for ``rows`` rows and ``columns`` columns."""
    row_tiles = rows if one_token else rows // tiles.BM + min(len(ends_E), rows)
    most = row_tiles * triton.cdiv(columns, tiles.BN)
    return min(most, tiles.programs_per_sm * multiprocessors(ends_E.device)) if tiles.programs_per_sm else most


def padded_experts(ends_E: Tensor) -> int:
    """The smallest power of two above the number of experts."""
    return triton.next_power_of_2(len(ends_E) + 1)
