"""Top-2 with a random second expert (GShard, arXiv 2006.16668, section 2.2 and algorithm 1).

    g = softmax(W x)_i / Σ        the second choice is dropped where 2·g₂ < U(0, 1)

A second expert with a small weight changes little, and its slot is worth more to another token: it is kept with a
probability proportional to its weight. The first weight is not raised in return. Inference keeps every second expert.
"""

from colonnade.model.moe.router import SECOND, RouterInput, RouterOutput, router
from colonnade.model.moe.routers.softmax import softmax_top_k


@router("gshard", biased=True, random=True, active=2, per_token=True)
def gshard(inputs: RouterInput) -> RouterOutput:
    """The two experts of the highest probability, the second at random."""
    choice = softmax_top_k(inputs, inputs.logits_TE, inputs.clean_TE)
    if inputs.noise is None:
        return choice
    pair_TA = choice.probs_TE.gather(1, choice.ids_TA)
    chance_T1 = 2 * pair_TA[:, 1:] / pair_TA.sum(1, keepdim=True)
    dropped_TA = (chance_T1 < inputs.noise.uniform(1, SECOND).to(chance_T1.dtype)).repeat(1, 2)
    dropped_TA[:, 0] = False
    return choice._replace(
        ids_TA=choice.ids_TA.masked_fill(dropped_TA, inputs.moe.experts),
        weights_TA=choice.weights_TA.masked_fill(dropped_TA, 0),
    )
