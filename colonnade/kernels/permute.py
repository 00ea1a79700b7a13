"""Token permutation by expert and back, in plain torch.

    order   = stable argsort of the T·A choices by expert           choice r = t·A + j: token t's j-th
    x_RD    = x_TD[order // A]                                      gather: each token once for each of its choices
    y_TD    = Σ_j w_tj · y_RD[row of choice (t, j)]                 combine

An expert id of E or more marks an unused choice: these are sorted last, and rows from ``ends_E[-1]`` on are undefined.
The number of rows is known without a device synchronisation (MegaBlocks, arXiv 2211.15841, section 4, pads rows to
blocks; here they are not padded).
"""

import torch
from torch import Tensor


def sort(ids_TA: Tensor, experts: int, rows: int | None = None) -> tuple[Tensor, Tensor]:
    """(order_R, ends_E): the choices sorted by expert, then by token, and the end of each expert's rows.

    ``rows`` bounds the number of used choices, if they are fewer than T·A.
    """
    ids_R = ids_TA.flatten()
    order_R = ids_R.argsort(stable=True)
    wanted_E = torch.arange(1, experts + 1, device=ids_TA.device, dtype=ids_TA.dtype)
    ends_E = torch.searchsorted(ids_R[order_R], wanted_E)
    return (order_R if rows is None else order_R[:rows]), ends_E


def positions(ids_TA: Tensor, experts: int) -> Tensor:
    """int64 (T, A): each choice's position among those of its expert, all first choices before all second ones.

    That of an unused choice is arbitrary.
    """
    by_choice_R = ids_TA.T.flatten()
    order_R = by_choice_R.argsort(stable=True)
    sorted_R = by_choice_R[order_R]
    begin_E = torch.searchsorted(sorted_R, torch.arange(experts + 1, device=ids_TA.device, dtype=ids_TA.dtype))
    position_R = torch.empty_like(order_R)
    position_R[order_R] = torch.arange(len(order_R), device=ids_TA.device) - begin_E[sorted_R]
    return position_R.view(ids_TA.shape[1], -1).T


def count(ids_TA: Tensor, experts: int) -> Tensor:
    """int64 (E,): the number of choices of each expert."""
    count_E = torch.zeros(experts + 1, dtype=torch.int64, device=ids_TA.device)
    ids_R = ids_TA.flatten().clamp(max=experts)
    return count_E.index_add(0, ids_R, torch.ones_like(ids_R))[:experts]


def gather(x_TD: Tensor, order_R: Tensor, active: int) -> Tensor:
    """x_RD: the token of each row; ``order_R`` has no duplicates."""
    return x_TD[order_R // active]


def combine(y_RD: Tensor, order_R: Tensor, weights_TA: Tensor) -> Tensor:
    """y_TD: the weighted sum of each token's rows, in the dtype of ``y_RD``."""
    T, A = weights_TA.shape
    w_R1 = weights_TA.flatten()[order_R].unsqueeze(1)
    weighted_RD = (y_RD * w_R1).to(torch.promote_types(y_RD.dtype, weights_TA.dtype))
    into_TD = weighted_RD.new_zeros(T, y_RD.shape[1])
    return into_TD.index_add(0, order_R // A, weighted_RD).to(y_RD.dtype)
