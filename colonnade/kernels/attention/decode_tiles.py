"""Tile sizes and costs of the Flash-Decoding kernels, from a measured table.

``python benchmarks/flash_decoding.py --tune`` measures ``decode_tiles.json``. Its ``measured_on`` names the device;
"none" marks estimates. A memory of 4 TB/s with a latency of 0.8 µs needs 3.2 MB in flight, 24 KB per SM of 132; two
workers on each SM, with two tiles of 64 keys and values of width 128 in flight, have 128 KB, and use 140 of 227 KB of
its shared memory.
"""

from typing import Any, NamedTuple

from colonnade.kernels import tuning
from colonnade.kernels.attention.split_plan import Costs


class Tiles(NamedTuple):
    """Tile sizes and launch parameters of the decode and merge kernels."""

    tile: int
    """Keys of a tile."""
    warps: int
    stages: int
    """Tiles in flight, including the one in use."""
    workers: int
    """Persistent programs per SM."""
    pieces: int
    """Pieces that the merge kernel loads in parallel."""
    part: int
    """Elements of a row that one program merges."""
    overlap: bool = False
    """Whether the merge is launched before the reads end and then waits (programmatic dependent launch)."""


def table() -> dict[str, Any]:
    """Tile sizes and costs, as measured."""
    return tuning.load(__file__, "decode_tiles.json")


OVERRIDE: list[Tiles] = []
"""Replaces the table if not empty; for tuning and tests."""


def choose_tiles(rows: int, width: int, query_bytes: int, cache_bytes: int) -> Tiles:
    """Tiles for blocks of ``rows`` rows and heads of ``width``, given the bytes of a query and a cache element."""
    if OVERRIDE:
        return OVERRIDE[0]
    fitting = [row for row in table()["rows"] if rows <= row["rows"] and width <= row["width"]]
    if not fitting:
        raise LookupError(f"no tiles for blocks of {rows} rows and heads of {width}; see decode_tiles.json")
    tiles = Tiles(**fitting[0]["tiles"])
    if max(query_bytes, cache_bytes) > 2:
        # float32 takes twice the memory, and tensor cores would round it.
        return tiles._replace(tile=max(16, tiles.tile // 4), stages=2)
    return Tiles(**fitting[0].get("eight", fitting[0]["tiles"])) if cache_bytes == 1 else tiles


def costs(
    tiles: Tiles, rows: int, width: int, element_bytes: int, workers: int, copies: int = 2, *, cuda: bool = False
) -> Costs:
    """Costs in nanoseconds when ``workers`` workers share the GPU, for the CUDA C++ kernel or the Triton one.

    A tile costs the maximum of its memory time (``copies`` vectors per key) and its compute time (two GEMMs of ``rows``
    rows).
    """
    prices_table = table()["cuda_costs" if cuda else "costs"]
    tile_bytes, flops = copies * tiles.tile * width * element_bytes, 4 * rows * tiles.tile * width
    tile_ns = max(1, round(max(tile_bytes / prices_table["bytes_a_ns"], flops / prices_table["flops_a_ns"]) * workers))
    lone_ns = 0
    if cuda:
        # A team of a block's warps has fewer tiles in flight.
        lone_ns = min(tile_ns, round(tile_bytes / prices_table["lone_bytes_a_ns"] * min(2, tiles.workers)))
    prices = (prices_table[f"{name}_ns"] for name in ("start", "merge", "part", "row", "twice"))
    return Costs(tile_ns, *prices, lone=lone_ns)
