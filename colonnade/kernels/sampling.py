"""Sampling, and writing sampled tokens into the next step's input, in plain torch.

    greedy      argmax_i x_i
    sampled     argmax_i (x_i / temperature - log e_i),  e_i ~ Exp(1)   over the tokens kept by top-k, top-p, min-p

The second line samples from softmax(x / temperature): it is the Gumbel-max trick (Maddison 2014). The noise is a hash
of a seed, the number of tokens generated before, and the token.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from colonnade.kernels.dropout import column_hash, lowbias32

NUM_ARGS = 7
"""Columns of the arguments of :func:`sample`."""


def greedy(logits_RV: Tensor, none: int) -> Tensor:
    """Argmax token of each row, int64; ``none`` where the row's maximum is not finite."""
    top_R, tokens_R = logits_RV.max(1)  # NaN if the row contains NaN
    return torch.where(top_R.isfinite(), tokens_R, none)


def write_next_tokens_(ids_T: Tensor, last_R: Tensor) -> None:
    """Replaces placeholder ids −1 − r in ``ids_T`` by the token that row r of the previous step sampled.

    Negative sampled tokens (the row was not finite and its request has ended) become token 0.
    """
    ids_T.copy_(torch.where(ids_T < 0, last_R[(-1 - ids_T).clamp(min=0)].clamp(min=0), ids_T))


def sample(logits_RV: Tensor, args_RA: Tensor, none: int) -> Tensor:
    """tokens_R, int64; ``none`` where the row's maximum is not finite.

    The columns of ``args_RA`` (float64, exact): temperature, or 0 for the most probable token; top-k, or 0; top-p;
    log min-p, or -inf; the low and high 32 bits of the seed; the number of tokens before. Filters are applied in the
    order of Hugging Face's generate: top-k, then top-p on the renormalised rest, then min-p. The most probable token is
    always kept, and of equal ones at a limit those with the lowest ids.
    """
    x_RV = logits_RV if logits_RV.dtype == torch.float64 else logits_RV.float()
    temperature, top_k, top_p, log_min_p = args_RA[:, :4].to(x_RV.dtype).T.unsqueeze(-1)
    seed_R, index_R = args_RA[:, 4].long() | args_RA[:, 5].long() << 32, args_RA[:, 6].long()
    greedy_R = greedy(logits_RV, none)
    scaled_RV = (x_RV - x_RV.amax(1, keepdim=True)) / torch.where(temperature > 0, temperature, 1)
    best_RV, ids_RV = scaled_RV.sort(dim=-1, descending=True, stable=True)
    rank_V = torch.arange(x_RV.shape[1], device=x_RV.device)
    best_RV = best_RV.masked_fill((rank_V >= top_k) & (top_k > 0), -math.inf)
    p_RV = best_RV.softmax(-1)
    before_RV = p_RV.cumsum(-1) - p_RV
    dropped_RV = ((before_RV >= top_p) & (top_p < 1) & (rank_V > 0)) | (best_RV < log_min_p)
    noise_RV = log_exponential_noise(sample_noise(seed_R, index_R), ids_RV, x_RV.dtype)
    column_R = (best_RV.masked_fill(dropped_RV, -math.inf) - noise_RV).argmax(-1, keepdim=True)
    drawn_R = ids_RV.gather(1, column_R).squeeze(1)
    return torch.where((temperature.squeeze(1) > 0) & (greedy_R != none), drawn_R, greedy_R)


def sample_noise(seed_R: Tensor, index_R: Tensor) -> Tensor:
    """int32: a hash of each row's seed (int64) and number of tokens before.

    The seed is hashed before it is combined with the index: people choose 0, 1, 2, … for both.
    """
    return lowbias32(lowbias32(lowbias32(seed_R.int()) ^ (seed_R >> 32).int()) ^ index_R.int())


def by_row_(function: Callable[[Tensor], Tensor], x_RV: Tensor) -> Tensor:
    """Apply an element-wise function in place, on a CPU one row at a time, so that no row's bits depend on the others.

    torch's exponentials and logarithms on a CPU round differently in whole vectors and in the remainder.
    """
    if x_RV.is_cuda or len(x_RV) == 1:
        return function(x_RV)
    for row_V in x_RV.unbind(0):
        function(row_V)
    return x_RV


def log_exponential_noise(noise_R: Tensor, ids: Tensor, dtype: torch.dtype, *, rowwise: bool = False) -> Tensor:
    """log e of exponential noise e = -log u for the tokens ``ids``, (V,) for all rows or (R, V).

    The uniform u has 32 bits plus a half, so that it is never 0 or 1, and its logarithm is taken in float64: with
    float32's 24 bits, one step in a few hundred would get e = 0 for some token of a large vocabulary, and emit that
    token however improbable it is. ``rowwise``: no rounding depends on another row.
    """
    u = lowbias32(noise_R[:, None] ^ column_hash(0, ids)).double().add_(2.0**31 + 0.5).mul_(2.0**-32)
    if rowwise:
        return by_row_(torch.log_, by_row_(torch.log_, u).neg_().to(dtype))
    return u.log_().neg_().to(dtype).log_()
