"""The likeliest token of each row of logits; of a row that is not finite, what marks it."""

import torch
from torch import Tensor


def greedy(logits_RV: Tensor, none: int) -> Tensor:
    """tokens_R, int64; ``none`` where a row's largest logit is not a finite number."""
    top_R, tokens_R = logits_RV.max(1)  # of a row with NaN that is NaN
    return torch.where(top_R.isfinite(), tokens_R, none)
