"""Sigmoid router with a balancing bias: scores of experts are independent (DeepSeek-V3, 2412.19437, 2.1.2).

    s = σ(W x)        i = top-A of s + b, within the best groups        w = s_i / Σ s_i · scale

The bias affects which experts are chosen, never their weights; it is updated against the load once per step, so no
auxiliary loss is needed.
"""

from colonnade.model.moe.router import RouterInput, RouterOutput, router
from colonnade.model.moe.routers.noisy import expected_load
from colonnade.model.moe.routers.softmax import group_limited_top_k


@router("sigmoid", biased=True, per_token=True)
def sigmoid(inputs: RouterInput) -> RouterOutput:
    """The A experts of the highest biased score; probabilities are the scores divided by their sum."""
    scores_TE = inputs.logits_TE.sigmoid()
    ids_TA, weights_TA = group_limited_top_k(inputs, scores_TE, scores_TE)
    probs_TE = scores_TE / scores_TE.sum(1, keepdim=True).clamp(min=1e-20)
    expected_TE = expected_load(inputs, inputs.logits_TE, inputs.clean_TE, ids_TA)  # σ keeps the order of the logits
    return RouterOutput(ids_TA, weights_TA, probs_TE, expected_TE=expected_TE)
