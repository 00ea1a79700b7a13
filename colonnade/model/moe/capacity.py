"""Capacity: how many tokens an expert takes, and which (GShard, arXiv 2006.16668; Switch, section 2.2; Tutel).

    n_e = ⌈T/E⌉          f > 0: C = A·int(f·n_e)     f = 0: C = the largest load     f < 0: the smaller of the two

The place of a token's j-th choice is the number of earlier tokens with the same j-th choice, plus all first … (j−1)-th
choices of that expert: every first choice stands before every second one. Places from C on are dropped. Earlier means a
lower number in the step's global batch, or a higher first weight (batch-prioritised, Riquelme 2021, arXiv 2106.05974).

Unlike Tutel's, C is computed after the tokens are put in order, so that f = 0 drops nothing in any order; and places
are counted over the tokens of all ranks unless the config says otherwise, so that no layout changes who is dropped.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from colonnade.config import MoeConfig
from colonnade.model.moe.router import Choice
from colonnade.parallel.axis import SOLO, Axis


class Admitted(NamedTuple):
    """The choices that got a place: others have expert E and weight 0."""

    ids_TA: Tensor
    weights_TA: Tensor


def admit(choice: Choice, index_T: Tensor, moe: MoeConfig, over: Axis) -> Admitted:
    """Which choices get a place, by the tokens' numbers ``index_T``; ``over`` are the ranks that have other tokens."""
    ids_TA, weights_TA = choice.ids_TA, choice.weights_TA
    if moe.capacity is None:
        return Admitted(ids_TA, weights_TA)
    over = SOLO if moe.capacity_over == "rank" else over
    first_T = weights_TA[:, 0].detach() if moe.priority else torch.zeros_like(weights_TA[:, 0])
    all_ids, all_index, all_first, mine = _everybodys(ids_TA, index_T, first_T, over)
    order_T = all_index.argsort(stable=True)
    order_T = order_T[all_first[order_T].argsort(descending=True, stable=True)]
    place_TA = torch.empty_like(all_ids)
    place_TA[order_T] = places(all_ids[order_T], moe.experts)
    limit = capacity(moe, int(over.sum_(torch.tensor(len(ids_TA), device=ids_TA.device))), all_ids)
    kept_TA = (place_TA < limit)[mine] & (ids_TA < moe.experts)
    return Admitted(ids_TA.where(kept_TA, moe.experts), weights_TA * kept_TA)


def places(ids_TA: Tensor, experts: int) -> Tensor:
    """place_TA: of each choice among those of its expert, all first choices before all second ones."""
    by_choice_R = ids_TA.T.flatten()
    order_R = by_choice_R.argsort(stable=True)
    sorted_R = by_choice_R[order_R]
    begin_E = torch.searchsorted(sorted_R, torch.arange(experts + 1, device=ids_TA.device, dtype=ids_TA.dtype))
    place_R = torch.empty_like(order_R)
    place_R[order_R] = torch.arange(len(order_R), device=ids_TA.device) - begin_E[sorted_R]
    return place_R.view(ids_TA.shape[1], -1).T


def capacity(moe: MoeConfig, tokens: int, ids_TA: Tensor) -> Tensor:
    """0-dim: C for so many ``tokens`` that chose ``ids_TA``."""
    factor = moe.capacity
    assert factor is not None, "a dropless layer has no capacity"
    share = -(-tokens // moe.experts)
    bound = torch.tensor(moe.active * int(abs(factor) * share), device=ids_TA.device)
    if factor > 0:
        return bound
    one_hot = torch.zeros(moe.experts + 1, dtype=torch.int64, device=ids_TA.device)
    ids_R = ids_TA.flatten()
    largest = one_hot.index_add(0, ids_R, torch.ones_like(ids_R))[: moe.experts].max()
    return largest if factor == 0 else torch.minimum(largest, bound)


def _everybodys(ids_TA: Tensor, index_T: Tensor, first_T: Tensor, over: Axis) -> tuple[Tensor, Tensor, Tensor, slice]:
    """Choices, numbers and first weights of the tokens of all ranks, and where this rank's are among them."""
    if over.size == 1:
        return ids_TA, index_T, first_T, slice(None)
    counts = over.list_(len(ids_TA))
    gathered = [over.lay_together_(x, counts) for x in (ids_TA, index_T, first_T)]
    start = sum(counts[: over.rank])
    return gathered[0], gathered[1], gathered[2], slice(start, start + counts[over.rank])
