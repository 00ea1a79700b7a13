"""The transducer's loss of one utterance, cell by cell (Graves, arXiv 1211.3711, section 2.3).

    α(t, u) = logaddexp(α(t−1, u) + ∅(t−1, u), α(t, u−1) + y(t, u−1))        α(0, 0) = 0
    loss    = −α(T−1, U) − ∅(T−1, U)

∅(t, u) is the log-probability of the blank at frame t after u labels, y(t, u) that of label u + 1.
"""

import torch
from torch import Tensor


def transducer_loss(logprobs_TUV: Tensor, labels: list[int], blank: int) -> Tensor:
    """−log p(labels | frames) from all log-probabilities, (T, len(labels) + 1, V); differentiable."""
    T = len(logprobs_TUV)
    alpha: dict[tuple[int, int], Tensor] = {(0, 0): logprobs_TUV.new_zeros(())}
    for t in range(T):
        for u in range(len(labels) + 1):
            arcs = []
            if t:
                arcs.append(alpha[t - 1, u] + logprobs_TUV[t - 1, u, blank])
            if u:
                arcs.append(alpha[t, u - 1] + logprobs_TUV[t, u - 1, labels[u - 1]])
            if arcs:
                alpha[t, u] = torch.logsumexp(torch.stack(arcs), 0)
    return -alpha[T - 1, len(labels)] - logprobs_TUV[T - 1, len(labels), blank]
