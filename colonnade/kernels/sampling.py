"""Greedy sampling, and writing sampled tokens into the next step's input, in plain torch."""

import torch
from torch import Tensor


def greedy(logits_RV: Tensor, none: int) -> Tensor:
    """Argmax token of each row, int64; ``none`` where the row's maximum is not finite."""
    top_R, tokens_R = logits_RV.max(1)  # NaN if the row contains NaN
    return torch.where(top_R.isfinite(), tokens_R, none)


def write_next_tokens_(ids_T: Tensor, last_R: Tensor) -> None:
    """Replaces placeholder ids −1 − r in ``ids_T`` by the token that row r of the previous step sampled.

    Negative sampled tokens (the row was not finite and its request has ended) become token 0.
    """
    ids_T.copy_(torch.where(ids_T < 0, last_R[(-1 - ids_T).clamp(min=0)].clamp(min=0), ids_T))
