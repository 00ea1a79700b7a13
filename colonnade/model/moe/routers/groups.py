"""Group-limited routing: a token's experts stand in few groups, so that it travels to few nodes.

    score of a group = its best expert's (DeepSeek-V2, arXiv 2405.04434, section 2.2.2)
                     | the sum of its two best experts' (DeepSeek-V3, arXiv 2412.19437, section 2.1.2)

What is compared has the balancing bias in it, in groups and within them. Experts of other groups are out of the
question: -∞, not the 0 that Hugging Face's port writes there, which beats a kept expert whose biased score is negative.
"""

from torch import Tensor

from colonnade.model.moe.router import Seen


def highest(seen: Seen, scores_TE: Tensor) -> Tensor:
    """ids_TA: the A highest scores of each token, bias added, within the best groups; highest first."""
    router = seen.moe.router
    compared_TE = scores_TE.detach()
    if seen.bias_E is not None:
        compared_TE = compared_TE + seen.bias_E.to(scores_TE.dtype)
    if router.groups > 1:
        by_group = compared_TE.unflatten(1, (router.groups, -1))
        best = by_group.topk(min(1 if router.group_score == "max" else 2, by_group.shape[2]), dim=2).values.sum(2)
        out = by_group.new_ones(best.shape).bool().scatter(1, best.topk(router.groups_kept, dim=1).indices, False)
        compared_TE = by_group.masked_fill(out.unsqueeze(2), float("-inf")).flatten(1)
    return compared_TE.topk(seen.moe.active, dim=1).indices
