"""Column- and row-parallel linear layers on the residual stream.

    column_parallel    x_tD to products with all T tokens             all-gather (or nothing), then W_0, W_1, …
    row_parallel       the ranks' partial products, summed, to y_tD    W, then all-reduce or reduce-scatter

With ``Axes.row_transfer`` (plan.tp_overlap) communication overlaps with the products
(:mod:`~colonnade.parallel.overlapped_matmul`), if all ranks have the same number of rows.
"""

from typing import TYPE_CHECKING

from torch import Tensor

from colonnade.model.linear import Linear
from colonnade.parallel.axis import Axes

if TYPE_CHECKING:
    from colonnade.parallel.overlapped_matmul import RowTransfer


def column_parallel(axes: Axes, x_tD: Tensor, T: int, *linears: Linear) -> list[Tensor]:
    """y_Tz of each of ``linears`` for the T tokens of the residual stream."""
    mover = _mover(axes, T, linears)
    if mover is None:
        x_TD = axes.enter_tp_region(x_tD, T)
        return [linear(x_TD) for linear in linears]
    from colonnade.parallel.overlapped_matmul import all_gather_matmul

    ys = all_gather_matmul(x_tD, [linear.weight for linear in linears], mover)
    return [y if linear.bias is None else y + linear.bias for y, linear in zip(ys, linears, strict=True)]


def row_parallel(axes: Axes, x_Tz: Tensor, linear: Linear) -> Tensor:
    """y_tD of ``linear``; the bias is added once, after the sum over ranks."""
    mover = _mover(axes, len(x_Tz), (linear,))
    if mover is None:
        y_tD = axes.leave_tp_region(linear.product(x_Tz))
    else:
        from colonnade.parallel.overlapped_matmul import matmul_reduce_scatter

        y_tD = matmul_reduce_scatter(x_Tz, linear.weight, mover)
    return y_tD if linear.bias is None else y_tD + linear.bias


def _mover(axes: Axes, T: int, linears: tuple[Linear, ...]) -> "RowTransfer | None":
    """The mover for these products, if they can overlap."""
    if axes.row_transfer is None or T == 0 or T % axes.tp.size:
        return None
    return None if any(linear.float8 or linear.quantised for linear in linears) else axes.row_transfer
