"""Softmax over the experts: the A of the highest probability, of some groups of experts only where the config says so.

    p = softmax(W x)        i = top-A of p [+ b], within the best groups        w = p_i [/ Σ p_i] · scale

GShard (arXiv 2006.16668), Mixtral, Qwen-MoE, OLMoE; DeepSeek-V2 with groups by their best expert (arXiv 2405.04434,
section 2.2.2). Switch (arXiv 2101.03961, section 2) is the same with A = 1, where the weight is p itself.
"""

from torch import Tensor

from colonnade.model.moe.router import Choice, Seen, router
from colonnade.model.moe.routers.groups import highest
from colonnade.model.moe.routers.noisy import expected_load


@router("softmax", biased=True)
def softmax(seen: Seen) -> Choice:
    """The A experts of the highest probability."""
    return by_softmax(seen, seen.logits_TE, seen.clean_TE)


@router("switch", biased=True, active=1)
def switch(seen: Seen) -> Choice:
    """The one expert of the highest probability, which is its weight."""
    return by_softmax(seen, seen.logits_TE, seen.clean_TE)


def by_softmax(seen: Seen, logits_TE: Tensor, clean_TE: Tensor, sigma_T1: Tensor | None = None) -> Choice:
    """The choice by some scores; ``clean_TE`` are the same without noise, whose standard deviation is ``sigma_T1``
    (None: that of one token's scores).
    """
    moe = seen.moe
    probs_TE = logits_TE.softmax(1)
    # Probabilities of experts far apart can be equal, 0 or 1, where their logits are not.
    compared_TE = logits_TE if seen.bias_E is None and moe.router.groups == 1 else probs_TE
    ids_TA, weights_TA = highest(seen, compared_TE, probs_TE)
    return Choice(ids_TA, weights_TA, probs_TE, expected_TE=expected_load(seen, logits_TE, clean_TE, ids_TA, sigma_T1))
