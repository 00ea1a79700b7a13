"""How Flash-Decoding's kernels are cut up, and what their work costs: a table, never tuned while a model runs.

``decode_tiles.json`` stands beside this file; ``python benchmarks/flash_decoding.py --tune`` measures it anew.
``measured_on`` there says on which device; "none" marks sizes and costs that were reckoned. A memory of 4 TB/s that
answers after 0.8 µs is kept busy by 3.2 MB on their way, 24 KB a multiprocessor of 132; two workers on each, with two
tiles of 64 keys and values of 128 numbers on their way, have 128 KB, and take 140 of 227 KB of its shared memory.
"""

from typing import Any, NamedTuple

from colonnade.kernels import tuning
from colonnade.kernels.attention.split_plan import Costs


class Tiles(NamedTuple):
    """How the two kernels are cut up."""

    tile: int
    """Keys read at once."""
    warps: int
    stages: int
    """Tiles on their way at once, the one in use among them."""
    workers: int
    """Programs that stay on each multiprocessor."""
    pieces: int
    """Pieces that the merge loads side by side."""
    part: int
    """Numbers of a row that one program merges."""
    overlap: bool = False
    """Whether the merge is started while the reading goes on, and waits (programmatic dependent launch)."""


def table() -> dict[str, Any]:
    """Tile sizes and costs, as measured."""
    return tuning.load(__file__, "decode_tiles.json")


OVERRIDE: list[Tiles] = []
"""Where there is one, it stands above the table: for the tool that measures, and for tests."""


def choose_tiles(rows: int, width: int, query_bytes: int, cache_bytes: int) -> Tiles:
    """For blocks of ``rows`` rows, heads of ``width`` numbers, elements of queries and of a cache of so many bytes."""
    if OVERRIDE:
        return OVERRIDE[0]
    found = [row for row in table()["rows"] if rows <= row["rows"] and width <= row["width"]]
    if not found:
        raise LookupError(f"no tiles for blocks of {rows} rows and heads of {width}; see decode_tiles.json")
    tiles = Tiles(**found[0]["tiles"])
    if max(query_bytes, cache_bytes) > 2:
        # float32 takes twice the room, and no tensor unit multiplies it without rounding it first.
        return tiles._replace(tile=max(16, tiles.tile // 4), stages=2)
    return Tiles(**found[0].get("eight", found[0]["tiles"])) if cache_bytes == 1 else tiles


def costs(
    tiles: Tiles, rows: int, width: int, element_bytes: int, workers: int, copies: int = 2, *, cuda: bool = False
) -> Costs:
    """Nanoseconds of a tile of keys and values, while ``workers`` workers share the chip, and of the rest; those of
    the kernel in CUDA C++, or in Triton.

    Whatever takes longer counts: reading its ``copies`` times width numbers, or two products with ``rows`` rows.
    """
    known = table()["cuda_costs" if cuda else "costs"]
    tile_bytes, flops = copies * tiles.tile * width * element_bytes, 4 * rows * tiles.tile * width
    tile_ns = max(1, round(max(tile_bytes / known["bytes_a_ns"], flops / known["flops_a_ns"]) * workers))
    lone_ns = 0
    if cuda:
        # A part of a multiprocessor's warps has fewer tiles on their way.
        lone_ns = min(tile_ns, round(tile_bytes / known["lone_bytes_a_ns"] * min(2, tiles.workers)))
    prices = (known[f"{what}_ns"] for what in ("start", "merge", "part", "row", "twice"))
    return Costs(tile_ns, *prices, lone=lone_ns)
