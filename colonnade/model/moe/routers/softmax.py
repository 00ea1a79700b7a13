"""Group-limited routing: a token's experts stand in few groups, so that it travels to few nodes.

    score of a group = its best expert's (DeepSeek-V2, arXiv 2405.04434, section 2.2.2)
                     | the sum of its two best experts' (DeepSeek-V3, arXiv 2412.19437, section 2.1.2)

What is compared has the balancing bias in it, in groups and within them. Experts of other groups are out of the
question: -∞, not the 0 that Hugging Face's port writes there, which beats a kept expert whose biased score is negative.

Softmax over the experts: the A of the highest probability, of some groups of experts only where the config says so.

    p = softmax(W x)        i = top-A of p [+ b], within the best groups        w = p_i [/ Σ p_i] · scale

GShard (arXiv 2006.16668), Mixtral, Qwen-MoE, OLMoE; DeepSeek-V2 with groups by their best expert (arXiv 2405.04434,
section 2.2.2). Switch (arXiv 2101.03961, section 2) is the same with A = 1, where the weight is p itself.
"""

from torch import Tensor

from colonnade.model.moe.router import RouterInput, RouterOutput, router, select_experts, top_indices
from colonnade.model.moe.routers.noisy import expected_load


def group_limited_top_k(seen: RouterInput, compared_TE: Tensor, scores_TE: Tensor) -> tuple[Tensor, Tensor]:
    """(ids_TA, weights_TA): the A highest ``compared_TE`` of each token, bias added, within the best groups, highest
    first; and what their scores count.
    """
    router = seen.moe.router
    compared_TE = compared_TE.detach()
    if seen.bias_E is not None:
        compared_TE = compared_TE + seen.bias_E.to(compared_TE.dtype)
    if router.groups > 1:
        by_group = compared_TE.unflatten(1, (router.groups, -1))
        score = by_group.topk(min(1 if router.group_score == "max" else 2, by_group.shape[2]), dim=2).values.sum(2)
        out = by_group.new_ones(score.shape).bool().scatter(1, top_indices(score, router.groups_kept), False)
        compared_TE = by_group.masked_fill(out.unsqueeze(2), float("-inf")).flatten(1)
    return select_experts(seen.moe, compared_TE, scores_TE)


@router("softmax", biased=True)
def softmax(seen: RouterInput) -> RouterOutput:
    """The A experts of the highest probability."""
    return softmax_top_k(seen, seen.logits_TE, seen.clean_TE)


@router("switch", biased=True, active=1)
def switch(seen: RouterInput) -> RouterOutput:
    """The one expert of the highest probability, which is its weight."""
    return softmax_top_k(seen, seen.logits_TE, seen.clean_TE)


def softmax_top_k(
    seen: RouterInput, logits_TE: Tensor, clean_TE: Tensor, sigma_T1: Tensor | None = None
) -> RouterOutput:
    """The choice by some scores; ``clean_TE`` are the same without noise, whose standard deviation is ``sigma_T1``
    (None: that of one token's scores).
    """
    moe = seen.moe
    probs_TE = logits_TE.softmax(1)
    # Probabilities of experts far apart can be equal, 0 or 1, where their logits are not.
    compared_TE = logits_TE if seen.bias_E is None and moe.router.groups == 1 else probs_TE
    ids_TA, weights_TA = group_limited_top_k(seen, compared_TE, probs_TE)
    return RouterOutput(
        ids_TA, weights_TA, probs_TE, expected_TE=expected_load(seen, logits_TE, clean_TE, ids_TA, sigma_T1)
    )
