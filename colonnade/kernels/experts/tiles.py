"""Sizes of the tiles of the Triton kernels: a table read once, chosen by shape, never tuned while a model runs.

The load of each expert is known to the device only, so a row of the table is chosen by what the host knows: the
kernel, the size of an element, and the mean rows an expert has when all are used alike, R / E. A decode step has few:
its tiles are as low as the matrix units allow (16), since each weight is read once whatever the tile. Training has
many: tiles as large as the registers hold (128 × 256 float32 sums, 128 registers a thread of 256).

``tiles.json`` stands beside this file; ``python benchmarks/tune_experts.py`` measures it anew. ``measured_on`` there
says on which device; "none" marks sizes reckoned, not measured.
"""

import functools
import json
from pathlib import Path
from typing import Literal, NamedTuple

Kernel = Literal["up", "gated_up", "down", "hidden_back", "rows_back", "weights_back", "gated_weights_back"]


class Tiles(NamedTuple):
    """How one kernel is cut up."""

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
    a_processor: int = 0
    """Programs a multiprocessor that stay and take one tile after another; 0: one program a tile."""
    descriptors: bool = False
    """Whether weights are fetched by the tensor copy engine (TMA)."""

    @property
    def launch(self) -> dict[str, int]:
        """What the launch of a kernel takes."""
        return {"BM": self.BM, "BN": self.BN, "BK": self.BK, "num_warps": self.warps, "num_stages": self.stages}


@functools.cache
def table() -> dict[str, list[tuple[int | None, Tiles]]]:
    """By kernel, (mean rows of an expert at most, sizes), the last without a bound."""
    record = json.loads(Path(__file__).with_name("tiles.json").read_text(encoding="utf-8"))
    return {
        kernel: [(row["rows_an_expert"], Tiles(**row["tiles"])) for row in rows]
        for kernel, rows in record["kernels"].items()
    }


WIDE = Tiles(64, 64, 32, 4, 2)
"""float32, which no tensor unit multiplies without rounding it first."""
CHOSEN: dict[str, Tiles] = {}
"""Sizes that stand above the table, by kernel: for the tool that measures, and for tests."""


def pick(kernel: Kernel, rows: int, experts: int, element_bytes: int) -> Tiles:
    """The sizes for ``rows`` rows over ``experts`` experts."""
    if kernel in CHOSEN:
        return CHOSEN[kernel]
    if element_bytes > 2:
        return WIDE
    mean = rows / max(experts, 1)
    return next(tiles for most, tiles in table()[kernel] if most is None or mean <= most)
