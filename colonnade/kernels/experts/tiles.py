"""Who computes each of the experts' products, and how the Triton kernels are cut up: a table read once, never tuned
while a model runs.

The load of each expert is known to the device only, so a row of the table is chosen by what the host knows: the
product, the size of an element, the layer's (F, D), and the mean rows an expert has when all are used alike, R / E.
A decode step has few: its tiles are as low as the matrix units allow (16), since each weight is read once whatever the
tile. Training has many: tiles as large as the registers hold (128 × 256 float32 sums, 128 registers a thread of 256).

``tiles.json`` stands beside this file. Under "shapes" is what ``benchmarks/tune_experts.py`` measured, layer by layer;
a layer takes the rows of the measured one that is nearest to it in log(F, D), and for what is measured nowhere those
under "kernels", which are reckoned. A row may also give a product to torch's grouped one (``library``), each for
itself, forward or back.
"""

import functools
import json
import math
from pathlib import Path
from typing import Any, Literal, NamedTuple

Kernel = Literal["up", "gated_up", "down", "hidden_back", "rows_back", "weights_back", "gated_weights_back"]


class GroupedTiles(NamedTuple):
    """How one product is done."""

    BM: int
    """Rows of the result in a tile."""
    BN: int
    """Columns of the result in a tile."""
    BK: int
    """What is summed over, a step."""
    warps: int
    stages: int
    """How many steps' operands are on their way at once."""
    GROUP: int = 8
    """Tiles of rows that pass all columns together."""
    programs_per_sm: int = 0
    """Programs a multiprocessor that stay and take one tile after another; 0: one program a tile."""
    descriptors: bool = False
    """Whether weights, and rows that lie one after another, are fetched by the tensor copy engine (TMA)."""
    laid: bool = False
    """Whether tokens are laid out in the order of the experts before, in a pass of its own, not gathered meanwhile."""
    together: bool = False
    """Of two products that add to one sum, whether a step does one of each: one loop, with twice the operands."""
    library: bool = False
    """Whether torch's grouped product does it, and a pass of its own what our kernel does beside the product."""

    @property
    def launch(self) -> dict[str, int]:
        """What the launch of a kernel takes."""
        return {"BM": self.BM, "BN": self.BN, "BK": self.BK, "num_warps": self.warps, "num_stages": self.stages}


class LayerShape(NamedTuple):
    """E experts of widths D and F."""

    E: int
    F: int
    D: int


Rows = list[tuple[int | None, GroupedTiles]]
"""(mean rows of an expert at most, how), the last without a bound."""


def parse_rows(record: dict[str, Any]) -> dict[str, Rows]:
    """By kernel, of one part of the file."""
    return {
        kernel: [(row["rows_an_expert"], GroupedTiles(**row["tiles"])) for row in rows]
        for kernel, rows in record.items()
    }


@functools.cache
def table() -> tuple[dict[str, Rows], dict[LayerShape, dict[str, Rows]]]:
    """(what is reckoned, what is measured of each layer)."""
    record = json.loads(Path(__file__).with_name("tiles.json").read_text(encoding="utf-8"))
    measured = {LayerShape(s["E"], s["F"], s["D"]): parse_rows(s["kernels"]) for s in record["shapes"]}
    return parse_rows(record["kernels"]), measured


@functools.cache
def table_rows(kernel: Kernel, shape: LayerShape) -> Rows:
    """Those of the measured layer that is nearest, else those that are reckoned."""
    reckoned, measured = table()

    def away(other: LayerShape) -> float:
        return sum(abs(math.log2(max(a, 1) / b)) for a, b in zip(shape[1:], other[1:], strict=True))

    known = [other for other, kernels in measured.items() if kernel in kernels]
    return measured[min(known, key=away)][kernel] if known else reckoned[kernel]


WIDE = GroupedTiles(64, 64, 32, 4, 2)
"""float32, which no tensor unit multiplies without rounding it first."""
OVERRIDES: dict[str, GroupedTiles] = {}
"""What stands above the table, by kernel: for the tool that measures, and for tests."""


def select_tiles(kernel: Kernel, count: int, shape: LayerShape, element_bytes: int) -> GroupedTiles:
    """How to do a product of ``count`` rows over a layer's experts."""
    if kernel in OVERRIDES:
        return OVERRIDES[kernel]
    if element_bytes > 2:
        return WIDE
    mean = count / max(shape.E, 1)
    return next(tiles for most, tiles in table_rows(kernel, shape) if most is None or mean <= most)
