"""Noisy top-k: the scale of the noise on a token's scores is learned (Shazeer 2017, arXiv 1701.06538, 2.1, appendix A).

    h = W x + N(0, 1) ⊙ σ,    σ = softplus(W_n x) + 10⁻²        i = top-A of h        w = softmax(h_i)

The balance losses are differentiable in both weights: the importance Σ_t w, and the load Σ_t P_te, where

    P_te = Φ((W x − k-th highest of the other h) / σ)

is the probability that expert e is among the A if only its own noise is drawn again. Without noise (inference) h = W x.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from colonnade.model.moe.router import SCORES, RouterInput, RouterOutput, RouterParameter, router, top_indices


@router(
    "noisy",
    lambda config, moe: {"noise": RouterParameter((moe.experts, config.width), 0.0)},
    random=True,
    per_token=True,
)
def noisy(inputs: RouterInput) -> RouterOutput:
    """The A experts of the highest noisy score; σ starts at softplus(0) for all."""
    A, clean_TE, noise = inputs.moe.active, inputs.logits_TE, inputs.noise
    h_TE, sigma_TE = clean_TE, None
    if noise is not None:
        sigma_TE = F.softplus(F.linear(inputs.x_TD, inputs.parameters["noise"])) + 1e-2
        h_TE = clean_TE + noise.normal(inputs.moe.experts, SCORES).to(clean_TE.dtype) * sigma_TE
    ids_TA = top_indices(h_TE, A)
    weights_TA = h_TE.gather(1, ids_TA).softmax(1)
    probs_TE = torch.zeros_like(h_TE).scatter(1, ids_TA, weights_TA)
    expected_TE = None if sigma_TE is None else selection_probability(clean_TE, h_TE, sigma_TE, ids_TA)
    return RouterOutput(ids_TA, weights_TA * inputs.moe.router.scale, probs_TE, expected_TE=expected_TE)


def expected_load(
    inputs: RouterInput, logits_TE: Tensor, clean_TE: Tensor, ids_TA: Tensor, sigma_T1: Tensor | None = None
) -> Tensor | None:
    """P_TE of a top-k router under ``moe.router.noise``, if the balance loss needs it.

    ``sigma_T1``: the noise's standard deviation (None: that of one token's scores).
    """
    moe = inputs.moe
    if inputs.noise is None or not moe.router.noise or moe.balance != "importance":
        return None
    sigma_T1 = clean_TE.new_full((1, 1), moe.router.noise / moe.experts) if sigma_T1 is None else sigma_T1
    return selection_probability(clean_TE, logits_TE, sigma_T1, ids_TA)


def selection_probability(clean_TE: Tensor, h_TE: Tensor, sigma_TE: Tensor, ids_TA: Tensor) -> Tensor:
    """P_TE: the probability that each score, with new noise of width ``sigma_TE``, is among the A highest of ``h_TE``.

    ``ids_TA`` are the A highest now.
    """
    A = ids_TA.shape[1]
    if h_TE.shape[1] == A:
        return torch.ones_like(h_TE)
    high = h_TE.gather(1, top_indices(h_TE, A + 1))
    selected_TE = torch.zeros_like(h_TE, dtype=torch.bool).scatter(1, ids_TA, True)
    # Without one of the A highest, the k-th highest of the others is the next one.
    threshold_TE = torch.where(selected_TE, high[:, A:], high[:, A - 1 : A])
    return torch.special.ndtr((clean_TE - threshold_TE) / sigma_TE)
