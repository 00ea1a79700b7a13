"""GPTQ within a block of columns: rounds each column and compensates its error in the later columns of the block.

    for each column j:   q_j = round(w_j),   δ_j = (w_j − ŵ_j) / U_jj,   W_{:,k} −= δ_j U_jk  for k > j

:mod:`colonnade.compress.gptq` has the algorithm; it applies the δ of a block to all later blocks in one product.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from colonnade.kernels.linear.quantise import FLOAT8

FLOAT8_MAX = torch.finfo(FLOAT8).max
GROUP = 4
"""2:4 sparsity: of four consecutive inputs, two keep a weight."""


class Rounding(NamedTuple):
    """The values that the weights (F, C) of some columns can have."""

    kind: Literal["int4", "int8", "float8", "ternary", "sparse24"]
    scale_FC: Tensor | None = None
    """None for sparse24, whose weights are not rounded."""
    low_FC: Tensor | None = None
    """int4's lowest value; None for others."""
    allowed_FC: Tensor | None = None
    """ternary: bool, where a weight may be nonzero."""


def round_values(w_FC: Tensor, rounding: Rounding) -> Tensor:
    """q of each weight, as float32; not for sparse24."""
    kind, scale, low, allowed = rounding
    assert scale is not None, "sparse24 does not round"
    match kind:
        case "int4":
            assert low is not None
            return ((w_FC - low) / scale).round().clamp(0, 15)
        case "float8":
            return (w_FC / scale).clamp(-FLOAT8_MAX, FLOAT8_MAX).to(FLOAT8).float()
        case "ternary":
            assert allowed is not None
            return (w_FC / scale.clamp(min=1e-30)).round().clamp(-1, 1) * allowed
        case _:
            return (w_FC / scale).round().clamp(-127, 127)


def best_two(score_FC: Tensor) -> Tensor:
    """bool (F, C): the two highest of each four scores; C is a multiple of four."""
    groups = score_FC.unflatten(1, (-1, GROUP))
    return torch.zeros_like(groups, dtype=torch.bool).scatter_(2, groups.topk(GROUP // 2, 2).indices, True).flatten(1)


def compensate(
    w_FC: Tensor, u_CC: Tensor, round_column: Callable[[int, Tensor], tuple[Tensor, Tensor]]
) -> tuple[Tensor, Tensor]:
    """(q, δ), each (F, C), of the weights of a block; ``w_FC`` is overwritten.

    ``u_CC`` is the block of U, upper triangular. ``round_column`` gets j and the corrected w_j, and returns (q_j, ŵ_j),
    each (F, 1).
    """
    q, delta = torch.empty_like(w_FC), torch.empty_like(w_FC)
    for j in range(w_FC.shape[1]):
        column, at = w_FC[:, j : j + 1], slice(j, j + 1)
        q[:, at], value = round_column(j, column)
        delta[:, at] = (column - value) / u_CC[j, j]
        w_FC[:, j + 1 :] -= delta[:, at] * u_CC[j, j + 1 :]
    return q, delta


def round_columns(w_FC: Tensor, u_CC: Tensor, rounding: Rounding) -> tuple[Tensor, Tensor]:
    """:func:`compensate` with ``rounding``.

    For sparse24 C is a multiple of four, and q are the weights that are kept, and zeros.
    """
    kept = torch.empty(0)

    def keep(j: int, column: Tensor) -> tuple[Tensor, Tensor]:
        nonlocal kept
        if j % GROUP == 0:
            kept = best_two((w_FC[:, j : j + GROUP] / u_CC.diagonal()[j : j + GROUP]).abs())
        value = column * kept[:, j % GROUP : j % GROUP + 1]
        return value, value

    def to_grid(j: int, column: Tensor) -> tuple[Tensor, Tensor]:
        scale, low, allowed = (None if x is None else x[:, j : j + 1] for x in rounding[1:])
        assert scale is not None
        q = round_values(column, Rounding(rounding.kind, scale, low, allowed))
        return q, q * scale + (0 if low is None else low)

    return compensate(w_FC, u_CC, keep if rounding.kind == "sparse24" else to_grid)
