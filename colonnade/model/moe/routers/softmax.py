"""Softmax router: the A experts of the highest probability, within the best groups of experts if configured.

    p = softmax(W x)        i = top-A of p [+ b], within the best groups        w = p_i [/ Σ p_i] · scale

GShard (arXiv 2006.16668), Mixtral, Qwen-MoE, OLMoE. Switch (arXiv 2101.03961, section 2) is the same with A = 1, where
the weight is p itself.

Group-limited routing takes a token's experts from few groups, so that it travels to few nodes:

    score of a group = that of its best expert (DeepSeek-V2, arXiv 2405.04434, section 2.2.2)
                     | the sum of its two best experts (DeepSeek-V3, arXiv 2412.19437, section 2.1.2)

The balancing bias is added to all compared scores, of groups and within them. Experts of other groups are masked with
-∞, not with the 0 of Hugging Face's port, which exceeds a negative biased score of a kept expert.
"""

from torch import Tensor

from colonnade.model.moe.router import RouterInput, RouterOutput, router, select_experts, top_indices
from colonnade.model.moe.routers.noisy import expected_load


@router("softmax", biased=True, per_token=True)
def softmax(inputs: RouterInput) -> RouterOutput:
    """The A experts of the highest probability."""
    return softmax_top_k(inputs, inputs.logits_TE, inputs.clean_TE)


@router("switch", biased=True, active=1, per_token=True)
def switch(inputs: RouterInput) -> RouterOutput:
    """The one expert of the highest probability, which is its weight."""
    return softmax_top_k(inputs, inputs.logits_TE, inputs.clean_TE)


def softmax_top_k(
    inputs: RouterInput, logits_TE: Tensor, clean_TE: Tensor, sigma_T1: Tensor | None = None
) -> RouterOutput:
    """The A experts of the highest softmax of ``logits_TE``.

    ``clean_TE`` are the same without noise, whose standard deviation is ``sigma_T1`` (None: that of one token's
    scores).
    """
    moe = inputs.moe
    probs_TE = logits_TE.softmax(1)
    # Probabilities of experts far apart can be equal, 0 or 1, where their logits are not.
    compared_TE = logits_TE if inputs.bias_E is None and moe.router.groups == 1 else probs_TE
    ids_TA, weights_TA = group_limited_top_k(inputs, compared_TE, probs_TE)
    expected_TE = expected_load(inputs, logits_TE, clean_TE, ids_TA, sigma_T1)
    return RouterOutput(ids_TA, weights_TA, probs_TE, expected_TE=expected_TE)


def group_limited_top_k(inputs: RouterInput, compared_TE: Tensor, scores_TE: Tensor) -> tuple[Tensor, Tensor]:
    """(ids_TA, weights_TA): the A highest ``compared_TE`` plus bias within the best groups, highest first.

    Weights come from ``scores_TE``.
    """
    router = inputs.moe.router
    compared_TE = compared_TE.detach()
    if inputs.bias_E is not None:
        compared_TE = compared_TE + inputs.bias_E.to(compared_TE.dtype)
    if router.groups > 1:
        by_group = compared_TE.unflatten(1, (router.groups, -1))
        score = by_group.topk(min(1 if router.group_score == "max" else 2, by_group.shape[2]), dim=2).values.sum(2)
        masked = by_group.new_ones(score.shape).bool().scatter(1, top_indices(score, router.groups_kept), False)
        compared_TE = by_group.masked_fill(masked.unsqueeze(2), float("-inf")).flatten(1)
    return select_experts(inputs.moe, compared_TE, scores_TE)
