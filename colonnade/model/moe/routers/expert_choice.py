"""Expert choice: each expert takes its highest-scoring tokens, so all loads are equal (Zhou 2022, arXiv 2202.09368).

    p = softmax(W x)        expert e takes its C = ⌈T·A/E⌉ tokens of the highest p_te        w = p_te · scale

(Section 3.2.) T counts the tokens of all ranks: scores are gathered, and of equal scores the token with the lower index
wins, so no layout changes the choice. A token may be taken by any number of experts, also by none; A is the mean.
Weights are never renormalised. An expert that chooses among a sequence's tokens sees later ones: a decoder trained this
way has information that it lacks in generation (section 6).
"""

import torch

from colonnade.model.moe.capacity import in_global_order
from colonnade.model.moe.router import RouterInput, RouterOutput, router


@router("expert_choice")
def expert_choice(inputs: RouterInput) -> RouterOutput:
    """Up to E choices per token, its highest weight first."""
    E = inputs.moe.experts
    probs_TE = inputs.logits_TE.softmax(1)
    (all_TE,), row_T = in_global_order(inputs.token_axis, inputs.index_T, probs_TE)
    C = min(len(all_TE), -(-len(all_TE) * inputs.moe.active // E))
    best_CE = all_TE.sort(dim=0, descending=True, stable=True).indices[:C]
    taken_TE = torch.zeros_like(all_TE, dtype=torch.bool).scatter(0, best_CE, True)[row_T]
    order_TE = probs_TE.detach().masked_fill(~taken_TE, -1).sort(dim=1, descending=True, stable=True).indices
    kept_TE = taken_TE.gather(1, order_TE)
    weights_TE = probs_TE.gather(1, order_TE) * inputs.moe.router.scale
    return RouterOutput(
        order_TE.masked_fill(~kept_TE, E), weights_TE.masked_fill(~kept_TE, 0), probs_TE, min(C, len(probs_TE)) * E
    )
