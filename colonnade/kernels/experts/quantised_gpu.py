"""Experts with quantised weights on a GPU (see :mod:`quantised`): two products of :mod:`triton_quantised`, and a sum.

Weights are widened within the products at any number of rows: nothing is written out, so that prompts take no more
memory than tokens do. Nothing waits for the device.
"""

# pyright: reportCallIssue=false, reportArgumentType=false
# A kernel is launched with more than its signature says, and its constants are plain numbers.

import torch
from torch import Tensor

from colonnade.kernels.experts import triton_quantised
from colonnade.kernels.experts.quantised import Stacks
from colonnade.kernels.experts.tiles import Tiles
from colonnade.kernels.experts.triton_schedule import padded, programs
from colonnade.kernels.linear.quantise import NIBBLES, Quantised
from colonnade.kernels.permute.triton_moves import rows_in, summed

CHOSEN: tuple[tuple[int | None, Tiles], ...] = (
    (16, Tiles(16, 64, 64, 4, 4)),
    (64, Tiles(64, 64, 64, 4, 3)),
    (None, Tiles(128, 128, 64, 8, 3)),
)
"""By the mean rows of an expert, at most; of int4 a step has 16 words. Reckoned, not measured: they fit the chip."""
WORDS = 16
"""The least that the matrix units sum over at once."""
EXACT = Tiles(16, 64, 32, 4, 2)
"""float32, which no tensor unit multiplies without rounding it first."""


def routed(
    x_TD: Tensor, order_R: Tensor, ends_E: Tensor, weights_TA: Tensor, weights: Stacks, activation: str,
    how: Tiles | None = None,
) -> Tensor:  # fmt: skip
    """y_TD (see :func:`quantised.routed`); ``how`` cuts the products up, where that is not chosen here."""
    x_TD, weights_TA, ends_E = rows_in(x_TD), weights_TA.contiguous(), ends_E.contiguous()
    up, down, gate, up_b, gate_b, down_b = weights
    R, E, F, D = len(order_R), len(ends_E), up.outputs, down.outputs
    h, y = x_TD.new_empty(R, F), x_TD.new_empty(R, D)
    if y.numel():
        how = how or pick(R, E, x_TD.dtype)
        cut = _Cut(up, how, R, ends_E)
        triton_quantised.up[cut.grid](
            x_TD, order_R, ends_E, up.values, cut.scales(up), up_b,
            None if gate is None else gate.values, None if gate is None else cut.scales(gate), gate_b,
            h, R, D, F, E, x_TD.stride(0), weights_TA.shape[1], *cut.stored,
            gate is not None, up_b is not None, activation, **cut.how,
        )  # fmt: skip
        cut = _Cut(down, how, R, ends_E)
        triton_quantised.down[cut.grid](
            h, order_R, ends_E, down.values, cut.scales(down), down_b, weights_TA, y, R, F, D, E, *cut.stored,
            down_b is not None, **cut.how,
        )  # fmt: skip
    return summed(y, order_R, *weights_TA.shape, ends_E=ends_E)


def pick(rows: int, experts: int, dtype: torch.dtype) -> Tiles:
    """The sizes for ``rows`` rows over ``experts`` experts."""
    if dtype.itemsize > 2:
        return EXACT
    return next(tiles for most, tiles in CHOSEN if most is None or rows <= most * max(1, experts))


class _Cut:
    """How a product with ``weight`` is cut up, and what its launch takes."""

    def __init__(self, weight: Quantised, how: Tiles, rows: int, ends_E: Tensor):
        self.four = weight.kind == "int4"
        self.grid = (programs(rows, ends_E, weight.outputs, how),)
        self.stored = (weight.values.shape[2], weight.scales.shape[2] if self.four else 0)
        """Columns and groups of a row, as it is stored."""
        self.how = {
            **how.launch, "BK": WORDS if self.four else how.BK, "GROUP": how.GROUP,
            "E_PAD": padded(ends_E), "KIND": weight.kind, "WORDS": weight.group // NIBBLES if self.four else 1,
        }  # fmt: skip

    def scales(self, weight: Quantised) -> Tensor:
        return weight.scales.view(torch.int32) if self.four else weight.scales
