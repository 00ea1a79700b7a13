"""Tile sizes of the experts' grouped GEMMs, and whether a Triton kernel or torch computes each: a measured table.

Only the device has the load of each expert, so a table row is chosen by what the host has: the GEMM, the element
size, the layer's (F, D), and the mean rows per expert, R / E. A decode step has few rows: its tiles are as low as
tensor cores allow (16), since each weight is read once whatever the tile. Training has many rows: its tiles are as
large as the registers allow (128 × 256 float32 accumulators, 128 registers for each of 256 threads).

In ``tiles.json``, "shapes" holds what ``benchmarks/tune_experts.py`` measured, layer by layer; a layer uses the
measured one nearest to it in log(F, D). "kernels" holds estimates, used for GEMMs without a measurement. A row may also
hand a GEMM to torch's grouped GEMM (``library``), each GEMM on its own, forward or backward.
"""

import functools
from typing import Any, Literal, NamedTuple

from colonnade.kernels import tuning

Kernel = Literal["up", "gated_up", "down", "hidden_dgrad", "input_dgrad", "wgrad", "gated_wgrad"]


class GroupedTiles(NamedTuple):
    """How one grouped GEMM is computed."""

    BM: int
    """Rows of an output tile."""
    BN: int
    """Columns of an output tile."""
    BK: int
    """Elements of the summed dimension per step."""
    warps: int
    stages: int
    """Steps of the software pipeline with operands in flight at the same time."""
    GROUP: int = 8
    """Tiles of rows that go through all columns together, for L2 reuse."""
    programs_per_sm: int = 0
    """Persistent programs per SM, each taking one tile after another; 0: one program per tile."""
    descriptors: bool = False
    """Whether weights, and contiguous rows, are loaded by TMA (tensor descriptors)."""
    gather_first: bool = False
    """Whether tokens are gathered into expert order in a separate pass, not within the GEMM."""
    interleaved: bool = False
    """Whether two GEMMs that add into one result share a loop, a step of each in turn, with twice the operands."""
    library: bool = False
    """Whether torch's grouped GEMM computes it, with a separate pass for our kernel's epilogue."""


class LayerShape(NamedTuple):
    """E experts of widths D and F."""

    E: int
    F: int
    D: int


Rows = list[tuple[int | None, GroupedTiles]]
"""(maximum mean rows per expert, tiles), ascending; None in the last: no maximum."""


def parse_rows(kernels: dict[str, Any]) -> dict[str, Rows]:
    """Table rows by kernel."""
    return {
        kernel: [(row["rows_an_expert"], GroupedTiles(**row["tiles"])) for row in rows]
        for kernel, rows in kernels.items()
    }


@functools.cache
def table() -> tuple[dict[str, Rows], dict[LayerShape, dict[str, Rows]]]:
    """(estimated rows, measured rows by layer)."""
    record = tuning.load(__file__, "tiles.json")
    measured = {LayerShape(s["E"], s["F"], s["D"]): parse_rows(s["kernels"]) for s in record["shapes"]}
    return parse_rows(record["kernels"]), measured


@functools.cache
def table_rows(kernel: Kernel, shape: LayerShape) -> Rows:
    """Rows of the nearest measured layer, otherwise the estimated rows."""
    estimated, measured = table()
    known = [other for other, kernels in measured.items() if kernel in kernels]
    if not known:
        return estimated[kernel]
    return measured[tuning.nearest(known, shape[1:], lambda other: other[1:])][kernel]


FLOAT32_TILES = GroupedTiles(64, 64, 32, 4, 2)
"""For float32, which tensor cores would round."""
OVERRIDES: dict[str, GroupedTiles] = {}
"""Tiles by kernel that take precedence over the table, for tuning and tests."""


def select_tiles(kernel: Kernel, rows: int, shape: LayerShape, element_bytes: int) -> GroupedTiles:
    """Tiles for a GEMM of ``rows`` rows over all of a layer's experts."""
    if kernel in OVERRIDES:
        return OVERRIDES[kernel]
    if element_bytes > 2:
        return FLOAT32_TILES
    return tuning.first_fitting(table_rows(kernel, shape), rows / max(shape.E, 1))
