"""Where each parameter lives: one small table a module, read by everything that must know.

A module says, for each parameter it owns, along which dimension tensor parallelism cuts it:

    layout = {"up.weight": 0, "down.weight": 1, "norm.weight": WHOLE}

``WHOLE``    every tp rank holds it whole and computes its whole gradient.
``PARTIAL``  every tp rank holds it whole but uses it on a share of the heads or tokens only, so that its gradient
             must be summed over tp (query/key norms; naively an error of 507 in a prototype).

``Experts``  cut over the ranks of the expert grid: by experts, and by hidden units.

What is applied to the rows of the residual stream is the one or the other, by :func:`on_rows`.

Initialisation, loading, saving, the gradient norm and the storage view all derive from this table and nothing else.
"""

from dataclasses import dataclass
from enum import Enum

from torch import Tensor, nn

from colonnade.parallel.axis import Axes, Axis


class Replicated(Enum):
    """The two ways in which every tensor-parallel rank can hold a parameter whole."""

    WHOLE = "whole"
    PARTIAL = "partial"


WHOLE, PARTIAL = Replicated.WHOLE, Replicated.PARTIAL


@dataclass(frozen=True)
class Experts:
    """A stack of experts: dimension 0 is cut over ep, and the dimension ``hidden`` over sh (None: no other is)."""

    hidden: int | None = None


Placement = int | Replicated | Experts
"""A dimension that is cut over tp, one of the two replicated kinds, or a stack of experts."""


def on_rows(axes: Axes) -> Replicated:
    """The placement of a parameter that acts on each row of the residual stream: norms, output biases, positions."""
    return PARTIAL if axes.sequence_parallel else WHOLE


def layout_of(model: nn.Module) -> dict[str, Placement]:
    """The placement of each parameter of ``model`` by its full name, from the modules' ``layout`` tables.

    A parameter that no table mentions is our own bug, and so is a table entry without a parameter.
    """
    table = placements(model)
    names = {name for name, _ in model.named_parameters()}
    assert names == table.keys(), f"layout tables and parameters differ in {sorted(names ^ table.keys())}"
    return table


def placements(model: nn.Module) -> dict[str, Placement]:
    """The placement of each parameter that a ``layout`` table of ``model``'s modules mentions, by its full name."""
    table: dict[str, Placement] = {}
    for prefix, module in model.named_modules():
        entries: dict[str, Placement] = getattr(module, "layout", {})
        for name, placement in entries.items():
            table[f"{prefix}.{name}" if prefix else name] = placement
    return table


def share(whole: Tensor, placement: Placement, axes: Axes) -> Tensor:
    """This rank's part of a whole parameter (a view)."""
    if isinstance(placement, Replicated):
        return whole
    if isinstance(placement, Experts):
        part = _cut(whole, 0, axes.grid.ep)
        return part if placement.hidden is None else _cut(part, placement.hidden, axes.grid.sh)
    return _cut(whole, placement, axes.tp)


def _cut(x: Tensor, dim: int, axis: Axis) -> Tensor:
    start, stop = axis.part(x.shape[dim])
    return x.narrow(dim, start, stop - start)
