"""Group-limited routing: a token's experts stand in few groups, so that it travels to few nodes.

    score of a group = its best expert's (DeepSeek-V2, arXiv 2405.04434, section 2.2.2)
                     | the sum of its two best experts' (DeepSeek-V3, arXiv 2412.19437, section 2.1.2)

What is compared has the balancing bias in it, in groups and within them. Experts of other groups are out of the
question: -∞, not the 0 that Hugging Face's port writes there, which beats a kept expert whose biased score is negative.
"""

from torch import Tensor

from colonnade.model.moe.router import Seen, best, top


def highest(seen: Seen, compared_TE: Tensor, scores_TE: Tensor) -> tuple[Tensor, Tensor]:
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
        out = by_group.new_ones(score.shape).bool().scatter(1, top(score, router.groups_kept), False)
        compared_TE = by_group.masked_fill(out.unsqueeze(2), float("-inf")).flatten(1)
    return best(seen.moe, compared_TE, scores_TE)
