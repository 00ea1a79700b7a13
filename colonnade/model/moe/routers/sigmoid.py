"""Sigmoid scores with a balancing bias: no expert's score depends on the others' (DeepSeek-V3, 2412.19437, 2.1.2).

    s = σ(W x)        i = top-A of s + b, within the best groups        w = s_i / Σ s_i · scale

The bias decides who is chosen, never with what weight; it moves against the load once a step, so that no loss need pull
at the scores.
"""

from colonnade.model.moe.router import RouterInput, RouterOutput, router
from colonnade.model.moe.routers.noisy import expected_load
from colonnade.model.moe.routers.softmax import group_limited_top_k


@router("sigmoid", biased=True)
def sigmoid(seen: RouterInput) -> RouterOutput:
    """The A experts of the highest biased score; the probabilities are the scores, divided by their sum."""
    scores_TE = seen.logits_TE.sigmoid()
    ids_TA, weights_TA = group_limited_top_k(seen, scores_TE, scores_TE)
    probs_TE = scores_TE / scores_TE.sum(1, keepdim=True).clamp(min=1e-20)
    expected_TE = expected_load(seen, seen.logits_TE, seen.clean_TE, ids_TA)  # σ keeps the order of the logits
    return RouterOutput(ids_TA, weights_TA, probs_TE, expected_TE=expected_TE)
