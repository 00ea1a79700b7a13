"""A gate that knows the machine: few tokens leave their node for their first choice (FasterMoE, PPoPP'22, section 4.3).

    home of the t-th of T tokens = ⌊t·nodes/T⌋        home of expert e = ⌊e·nodes/E⌋

In training at most int(away · T_n) of a node's T_n tokens may choose an expert of another node first, those of the
highest probability. The others' first choice is the best expert at home; their second is the best of all the rest.

``moe.router.nodes`` is part of the model, not of the plan: tokens and experts are cut as a plan of so many nodes would
cut them, and any other plan makes the same choices. Inference chooses freely.
"""

import torch
from torch import Tensor

from colonnade.model.moe.capacity import global_positions, in_global_order
from colonnade.model.moe.router import RouterInput, RouterOutput, router, select_experts


@router("topology")
def topology(seen: RouterInput) -> RouterOutput:
    """The A experts of the highest probability, but that the first is at home where too many would leave."""
    moe, probs_TE = seen.moe, seen.logits_TE.softmax(1)
    compared_TE = seen.logits_TE.detach()
    if seen.training and moe.router.nodes > 1:
        compared_TE = compared_TE.masked_fill(_held(seen, probs_TE.detach()), float("inf"))
    ids_TA, weights_TA = select_experts(moe, compared_TE, probs_TE)
    return RouterOutput(ids_TA, weights_TA, probs_TE)


def _held(seen: RouterInput, probs_TE: Tensor) -> Tensor:
    """(T, E) booleans: the expert that a token must take first, where it must."""
    moe, nodes = seen.moe, seen.moe.router.nodes
    node_E = torch.arange(moe.experts, device=probs_TE.device) * nodes // moe.experts
    top_T, first_T = probs_TE.max(1)
    (all_top_T, all_first_T), where_T = in_global_order(seen.over, seen.index_T, top_T, first_T)
    T = len(all_top_T)
    home_T = torch.arange(T, device=probs_TE.device) * nodes // max(T, 1)
    leaves_T = node_E[all_first_T] != home_T
    first_n = (torch.arange(nodes + 1, device=home_T.device) * T + nodes - 1) // nodes  # each home's first token
    allowed_n = (moe.router.away * first_n.diff().double()).long()
    # Of each node's leavers the most probable go first; the rest counts as a node of its own.
    from_T = torch.where(leaves_T, home_T, nodes)
    order_T = all_top_T.argsort(descending=True, stable=True)
    place_T = torch.empty_like(order_T)
    place_T[order_T] = global_positions(from_T[order_T, None], nodes)[:, 0]
    held_T = (leaves_T & (place_T >= allowed_n[home_T]))[where_T]
    at_home_TE = node_E == home_T[where_T, None]
    best_T1 = probs_TE.masked_fill(~at_home_TE, -1).argmax(1, keepdim=True)
    return torch.zeros_like(at_home_TE).scatter(1, best_T1, True) & held_T[:, None]
