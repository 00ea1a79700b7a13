"""The likeliest token of each row of logits; of a row that is not finite, what marks it. Tokens that a step is told."""

import torch
from torch import Tensor


def greedy(logits_RV: Tensor, none: int) -> Tensor:
    """tokens_R, int64; ``none`` where a row's largest logit is not a finite number."""
    top_R, tokens_R = logits_RV.max(1)  # of a row with NaN that is NaN
    return torch.where(top_R.isfinite(), tokens_R, none)


def tell_(ids_T: Tensor, last_R: Tensor) -> None:
    """Put tokens that the work before drew, ``last_R``, in the place of negative ids (−1 − r for draw r); token 0 for
    what was none and ended its request.
    """
    ids_T.copy_(torch.where(ids_T < 0, last_R[(-1 - ids_T).clamp(min=0)].clamp(min=0), ids_T))
