"""The tokens of all ranks, in the order of their numbers: what decisions about all of them at once are made on.

Ranks hold different tokens, and which ones is the layout's affair. What each says of its own is laid together and put
in order, so that every rank decides alike, and as one process would; it then keeps what concerns its own tokens.
"""

import torch
from torch import Tensor

from colonnade.parallel.axis import Axis


def in_global_order(over: Axis, index_T: Tensor, *columns: Tensor) -> tuple[list[Tensor], Tensor]:
    """(columns, where_T): each column's rows of all ranks in the order of the tokens' numbers ``index_T``, without a
    gradient, and the row of each of this rank's own tokens. Ranks tell each other over the host how many they have.
    """
    counts = over.all_gather_int(len(index_T))
    order_T = over.all_gather_uneven_(index_T, counts).argsort(stable=True)
    row_T = torch.empty_like(order_T)
    row_T[order_T] = torch.arange(len(order_T), device=order_T.device)
    start = sum(counts[: over.rank])
    return [over.all_gather_uneven_(column, counts)[order_T] for column in columns], row_T[start : start + len(index_T)]


def global_positions(ids_TA: Tensor, experts: int) -> Tensor:
    """place_TA: of each choice among those of its expert, all first choices before all second ones."""
    by_choice_R = ids_TA.T.flatten()
    order_R = by_choice_R.argsort(stable=True)
    sorted_R = by_choice_R[order_R]
    begin_E = torch.searchsorted(sorted_R, torch.arange(experts + 1, device=ids_TA.device, dtype=ids_TA.dtype))
    place_R = torch.empty_like(order_R)
    place_R[order_R] = torch.arange(len(order_R), device=ids_TA.device) - begin_E[sorted_R]
    return place_R.view(ids_TA.shape[1], -1).T
