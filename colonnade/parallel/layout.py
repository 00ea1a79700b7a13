"""Placement of each parameter: one small table per module, from which everything else derives.

A module states, for each parameter it owns, the dimension that tensor parallelism shards:

    layout = {"up.weight": 0, "down.weight": 1, "norm.weight": WHOLE}

``WHOLE``    replicated over tp; every rank computes the whole gradient.
``PARTIAL``  replicated over tp, but used on a share of the heads or tokens only, so that its gradient must be summed
             over tp (query/key norms; without the sum an error of 507 in a prototype).

``Experts``  a stack of experts, sharded over :class:`~colonnade.parallel.axis.ExpertAxes` by experts and hidden units.

Parameters that act on rows of the residual stream are one or the other, by :func:`residual_placement`.

Initialisation, loading, saving, the gradient norm and the storage view all derive from this table and nothing else.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Any

from torch import Tensor, nn

from colonnade.parallel.axis import Axes, Axis


class Replicated(Enum):
    """How a parameter is replicated over tensor-parallel ranks: with whole or with partial gradients."""

    WHOLE = "whole"
    PARTIAL = "partial"


WHOLE, PARTIAL = Replicated.WHOLE, Replicated.PARTIAL


@dataclass(frozen=True)
class Experts:
    """A stack of experts: dimension 0 is sharded over ep, dimension ``hidden`` over etp (None: no dimension)."""

    hidden: int | None = None


Placement = int | Replicated | Experts
"""A dimension sharded over tp, a kind of replication, or a stack of experts."""


def residual_placement(axes: Axes) -> Replicated:
    """Placement of a parameter that acts on rows of the residual stream: norms, output biases, positions."""
    return PARTIAL if axes.sequence_parallel else WHOLE


def layout_of(model: nn.Module) -> dict[str, Placement]:
    """Placement of each parameter of ``model`` by its full name; asserts that every parameter has one.

    A quantised matrix is not a parameter.
    """
    table = placements(model)
    names = {name for name, _ in model.named_parameters()}
    quantised = {prefix for prefix, module in model.named_modules() if getattr(module, "quantised", None) is not None}
    if quantised:
        table = {name: at for name, at in table.items() if name in names or name.rpartition(".")[0] not in quantised}
    assert names == table.keys(), f"layout tables and parameters differ in {sorted(names ^ table.keys())}"
    return table


def placements(model: nn.Module) -> dict[str, Placement]:
    """Merge the ``layout`` tables of all modules of ``model``, by full parameter name."""
    table: dict[str, Placement] = {}
    for prefix, module in model.named_modules():
        entries: Any = getattr(module, "layout", {})  # a dict[str, Placement]
        for name, placement in entries.items():
            table[f"{prefix}.{name}" if prefix else name] = placement
    return table


def local_part(whole: Tensor, placement: Placement, axes: Axes) -> Tensor:
    """Return this rank's shard of a whole parameter (a view)."""
    if isinstance(placement, Replicated):
        return whole
    if isinstance(placement, Experts):
        part = _narrow(whole, 0, axes.experts.ep)
        return part if placement.hidden is None else _narrow(part, placement.hidden, axes.experts.etp)
    return _narrow(whole, placement, axes.tp)


def _narrow(x: Tensor, dim: int, axis: Axis) -> Tensor:
    start, stop = axis.part(x.shape[dim])
    return x.narrow(dim, start, stop - start)
