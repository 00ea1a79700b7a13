"""Topology-aware gate: few tokens leave their node for their first choice (FasterMoE, PPoPP'22, section 4.3).

    node of the t-th of T tokens = ⌊t·nodes/T⌋        node of expert e = ⌊e·nodes/E⌋

In training at most int(outgoing_fraction · T_n) of a node's T_n tokens may choose an expert of another node first,
those of the highest probability. The others' first choice is the best expert of their node; their second is the best
of all the rest.

``moe.router.nodes`` belongs to the model, not to the plan: tokens and experts are divided as a plan of so many nodes
would divide them, and any other plan makes the same choices. Inference chooses freely.
"""

import torch
from torch import Tensor

from colonnade.model.moe.capacity import global_positions, in_global_order
from colonnade.model.moe.router import RouterInput, RouterOutput, router, select_experts


@router("topology", per_token=True)
def topology(inputs: RouterInput) -> RouterOutput:
    """The A experts of the highest probability, the first on the token's node where too many would leave."""
    moe, probs_TE = inputs.moe, inputs.logits_TE.softmax(1)
    compared_TE = inputs.logits_TE.detach()
    if inputs.training and moe.router.nodes > 1:
        compared_TE = compared_TE.masked_fill(_forced_choices(inputs, probs_TE.detach()), float("inf"))
    ids_TA, weights_TA = select_experts(moe, compared_TE, probs_TE)
    return RouterOutput(ids_TA, weights_TA, probs_TE)


def _forced_choices(inputs: RouterInput, probs_TE: Tensor) -> Tensor:
    """(T, E) booleans: the expert that a token must choose first, if any."""
    moe, nodes = inputs.moe, inputs.moe.router.nodes
    node_E = torch.arange(moe.experts, device=probs_TE.device) * nodes // moe.experts
    top_T, first_T = probs_TE.max(1)
    (all_top_T, all_first_T), row_T = in_global_order(inputs.token_axis, inputs.index_T, top_T, first_T)
    T = len(all_top_T)
    node_T = torch.arange(T, device=probs_TE.device) * nodes // max(T, 1)
    leaves_T = node_E[all_first_T] != node_T
    first_n = (torch.arange(nodes + 1, device=node_T.device) * T + nodes - 1) // nodes  # the first token of each node
    allowed_n = (moe.router.outgoing_fraction * first_n.diff().double()).long()
    # Of the tokens that would leave a node the most probable may; all others count as one more node.
    from_T = torch.where(leaves_T, node_T, nodes)
    order_T = all_top_T.argsort(descending=True, stable=True)
    position_T = torch.empty_like(order_T)
    position_T[order_T] = global_positions(from_T[order_T, None], nodes)[:, 0]
    forced_T = (leaves_T & (position_T >= allowed_n[node_T]))[row_T]
    local_TE = node_E == node_T[row_T, None]
    best_T1 = probs_TE.masked_fill(~local_TE, -1).argmax(1, keepdim=True)
    return torch.zeros_like(local_TE).scatter(1, best_T1, True) & forced_T[:, None]
