"""Where each parameter lives: one small table a module, read by everything that must know.

A module says, for each parameter it owns, along which dimension tensor parallelism cuts it:

    layout = {"up.weight": 0, "down.weight": 1, "norm.weight": WHOLE}

``WHOLE``    every tp rank holds it whole and computes its whole gradient.
``PARTIAL``  every tp rank holds it whole but uses it on a share of the heads or tokens only, so that its gradient
             must be summed over tp (query/key norms; naively an error of 507 in a prototype).

What is applied to the rows of the residual stream is the one or the other, by :func:`on_rows`.

Initialisation, loading, saving, the gradient norm and the storage view all derive from this table and nothing else.
"""

from enum import Enum

from torch import Tensor, nn

from colonnade.parallel.axis import Axes, Axis


class Replicated(Enum):
    """The two ways in which every tensor-parallel rank can hold a parameter whole."""

    WHOLE = "whole"
    PARTIAL = "partial"


WHOLE, PARTIAL = Replicated.WHOLE, Replicated.PARTIAL
Placement = int | Replicated
"""A dimension that is cut over tp, or one of the two replicated kinds."""


def on_rows(axes: Axes) -> Replicated:
    """The placement of a parameter that acts on each row of the residual stream: norms, output biases, positions."""
    return PARTIAL if axes.sequence_parallel else WHOLE


def layout_of(model: nn.Module) -> dict[str, Placement]:
    """The placement of each parameter of ``model`` by its full name, from the modules' ``layout`` tables.

    A parameter that no table mentions is our own bug, and so is a table entry without a parameter.
    """
    table: dict[str, Placement] = {}
    for prefix, module in model.named_modules():
        entries: dict[str, Placement] = getattr(module, "layout", {})
        for name, placement in entries.items():
            table[f"{prefix}.{name}" if prefix else name] = placement
    names = {name for name, _ in model.named_parameters()}
    assert names == table.keys(), f"layout tables and parameters differ in {sorted(names ^ table.keys())}"
    return table


def share(whole: Tensor, placement: Placement, tp: Axis) -> Tensor:
    """This rank's part of a whole parameter (a view)."""
    if isinstance(placement, Replicated):
        return whole
    start, stop = tp.part(whole.shape[placement])
    return whole.narrow(placement, start, stop - start)
