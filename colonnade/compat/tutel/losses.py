"""The balance losses of a layer, over the tokens of this rank: each rank's gate has a gradient of its own tokens, which
the program sums over the ranks (GShard, arXiv 2006.16668, algorithm 1; Riquelme 2021, arXiv 2106.05974, appendix A).
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from colonnade.errors import ConfigError


def gshard_loss(scores_TE: Tensor, ids_TA: Tensor) -> Tensor:
    """E/T² · Σ_e (Σ_t p_te)(Σ_t [top1 = e]): 1 when uniform; 0 without tokens."""
    T, E = scores_TE.shape
    top_E = F.one_hot(ids_TA[:, 0], E).sum(0).to(scores_TE.dtype)
    return (scores_TE.sum(0) * top_E).sum() * (E / max(T, 1) ** 2)


def load_importance_loss(
    logits_TE: Tensor, noisy_TA: Tensor, experts: int, gate_noise: float, load_loss_input: str = "probabilities"
) -> Tensor:
    """Half the sum of the squared coefficients of variation of importance and load.

    Importance is Σ_t p_te with p = softmax(logits), load Σ_t Φ((s_te − the token's last noisy logit ``noisy_TA`` that
    is kept) / σ) with σ = ``gate_noise`` / E; variances divide by E − 1. s is what ``load_loss_input`` names: the
    probabilities p, as Tutel has it, or the logits, as in the paper.
    """
    if gate_noise <= 0:
        raise ConfigError("is_gshard_loss=False counts the load under noise; give the gate a gate_noise above 0")
    logits_TE = logits_TE.to(torch.promote_types(logits_TE.dtype, torch.float32))
    probs_TE = logits_TE.softmax(1)
    compared_TE = logits_TE if load_loss_input == "logits" else probs_TE
    margin_TE = (compared_TE - noisy_TA[:, -1:]) * (experts / gate_noise)
    return (_variation(probs_TE.sum(0)) + _variation(torch.special.ndtr(margin_TE).sum(0))) / 2


def _variation(x_E: Tensor) -> Tensor:
    return x_E.var(correction=min(1, len(x_E) - 1)) / (x_E.mean().square() + 1e-10)
