"""Expert choice: each expert takes the tokens that it likes best, so that no load ever differs (Zhou 2022, arXiv
2202.09368, section 3.2).

    p = softmax(W x)        expert e takes its C = ⌈T·A/E⌉ tokens of the highest p_te        w = p_te · scale

T counts the tokens of all ranks: scores are laid together, and ties go to the token of the lower number, so that no
layout changes who is taken. A token may be taken by any number of experts, by none too; A is their mean. Weights are
never renormalised. An expert that chooses among a sequence's tokens looks at those to come: a decoder trained so knows
more than it will when it generates (ibid., section 6).
"""

import torch

from colonnade.model.moe.capacity import in_global_order
from colonnade.model.moe.router import RouterInput, RouterOutput, router


@router("expert_choice")
def expert_choice(seen: RouterInput) -> RouterOutput:
    """Up to E choices a token, its highest weight first."""
    E = seen.moe.experts
    probs_TE = seen.logits_TE.softmax(1)
    (all_TE,), where_T = in_global_order(seen.over, seen.index_T, probs_TE)
    C = min(len(all_TE), -(-len(all_TE) * seen.moe.active // E))
    best_CE = all_TE.sort(dim=0, descending=True, stable=True).indices[:C]
    taken_TE = torch.zeros_like(all_TE, dtype=torch.bool).scatter(0, best_CE, True)[where_T]
    order_TE = probs_TE.detach().masked_fill(~taken_TE, -1).sort(dim=1, descending=True, stable=True).indices
    kept_TE = taken_TE.gather(1, order_TE)
    weights_TE = probs_TE.gather(1, order_TE) * seen.moe.router.scale
    return RouterOutput(
        order_TE.masked_fill(~kept_TE, E), weights_TE.masked_fill(~kept_TE, 0), probs_TE, min(C, len(probs_TE)) * E
    )
