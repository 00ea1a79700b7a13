"""Experts without sorting and without a loop over counts, so that ``torch.export`` can trace them.

    few tokens    the weights of each choice are gathered:  y_t = Σ_j w_tj · expert_{i_tj}(x_t)
    many tokens   every expert runs on all tokens:          y_t = Σ_e (Σ_j w_tj [i_tj = e]) · expert_e(x_t)

The second form does E/A times the arithmetic and reads each expert once.
"""

import torch
from torch import Tensor

from colonnade.kernels.experts.reference import ACTIVATIONS, Weights, expert


def gathered_experts(x_TD: Tensor, ids_TA: Tensor, routing_TA: Tensor, weights: Weights, activation: str) -> Tensor:
    """y_TD with the weights of each choice gathered; an id of E or more is none, with weight 0."""
    picked = weights.map(lambda w: w[ids_TA.clamp(max=len(weights.up_EFD) - 1)])
    x_TAD = x_TD[:, None].expand(-1, ids_TA.shape[1], -1)

    def product(w_TAFD: Tensor, bias_TAF: Tensor | None) -> Tensor:
        y_TAF = (w_TAFD * x_TAD[:, :, None]).sum(-1)
        return y_TAF if bias_TAF is None else y_TAF + bias_TAF

    h_TAF = product(picked.up_EFD, picked.up_bias_EF)
    if picked.gate_EFD is None:
        h_TAF = ACTIVATIONS[activation](h_TAF)
    else:
        h_TAF = h_TAF * ACTIVATIONS[activation](product(picked.gate_EFD, picked.gate_bias_EF))
    y_TAD = (h_TAF[..., None] * picked.down_EFD).sum(2)
    if picked.down_bias_ED is not None:
        y_TAD = y_TAD + picked.down_bias_ED
    return (y_TAD * routing_TA[..., None]).sum(1).to(x_TD.dtype)


def all_experts(x_TD: Tensor, ids_TA: Tensor, routing_TA: Tensor, weights: Weights, activation: str) -> Tensor:
    """y_TD with every expert computed for all tokens."""
    y_TD = torch.zeros_like(x_TD, dtype=torch.promote_types(x_TD.dtype, routing_TA.dtype))
    for e in range(len(weights.up_EFD)):
        out_TD = expert(x_TD, weights, e, activation)
        y_TD = y_TD + (routing_TA * (ids_TA == e)).sum(1, keepdim=True) * out_TD
    return y_TD.to(x_TD.dtype)
