"""How the products of a few rows are cut up on a GPU: a table, never tuned while a model runs.

``thin_tiles.json`` stands beside this file; ``python benchmarks/thin_linear.py --tune`` measures it anew.
``measured_on`` there says on which device; "none" marks sizes that were reckoned: a memory of 4.3 TB/s that answers
after 0.9 µs is kept busy by 3.9 MB on their way, 30 KB a multiprocessor of 132. A row of the table without sizes says
that the library's product, with what stands around it as kernels of their own, is faster.
"""

import functools
import json
import math
from pathlib import Path
from typing import Any, NamedTuple


class SkinnyTiles(NamedTuple):
    """How a kernel is cut up."""

    BN: int
    """Outputs of a block."""
    BK: int
    """Stored columns, a step: inputs, or words of eight for int4."""
    warps: int
    stages: int
    """Steps' weights that are on their way at once, the one in use among them."""
    programs_per_sm: int = 0
    """Programs a multiprocessor that stay and take one block after another; 0: one program a block."""
    units: bool = False
    """Whether the matrix units multiply (:mod:`~colonnade.kernels.linear.triton_skinny_gemm_tensor_core`); else the
    weights' rows do in registers, with float32."""


@functools.cache
def table() -> list[dict[str, Any]]:
    """The rows of the file."""
    return json.loads(Path(__file__).with_name("thin_tiles.json").read_text(encoding="utf-8"))["rows"]


OVERRIDE: list[SkinnyTiles] = []
"""Where there is one, it stands above the table: for the tool that measures, and for tests."""
MAX_ROWS = 16
"""Rows, at most, that a kernel of the table multiplies."""
MAX_CUDA_CORE_ROWS = 4
"""Those that one without the matrix units does."""
FALLBACK = SkinnyTiles(8, 512, 4, 4, 2)
"""Where the table has matrix units and x is not for them."""


def select_tiles(kind: str, rows: int, outputs: int, inputs: int, *, gated: bool) -> SkinnyTiles | None:
    """Of the nearest shape in the table, or None where the library is faster; ``kind`` is "plain" or one of
    :data:`~colonnade.kernels.linear.quantise.Kind`.
    """
    if OVERRIDE:
        return OVERRIDE[0]
    found = [row for row in table() if (row["kind"], row["gated"]) == (kind, gated) and rows <= row["rows"]]
    if not found:
        return None
    least = min(row["rows"] for row in found)
    near = min(
        (row for row in found if row["rows"] == least),
        key=lambda row: abs(math.log(row["outputs"] / outputs)) + abs(math.log(row["inputs"] / inputs)),
    )
    return SkinnyTiles(**near["tiles"]) if near["tiles"] else None
