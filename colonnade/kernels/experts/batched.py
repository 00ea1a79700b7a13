"""Experts in one batched product, each padded to the rows of the busiest.

It multiplies E · max n_e rows for Σ n_e, and reads every expert's weights: right for few experts used alike, wrong for
skewed loads and for a few tokens among many experts.
"""

import torch
from torch import Tensor

from colonnade.kernels.dropout.reference import Hidden
from colonnade.kernels.experts.reference import ACTIVATIONS, Weights


def experts(x_RD: Tensor, ends_E: Tensor, weights: Weights, activation: str, dropout: Hidden | None = None) -> Tensor:
    """y_RD (see :func:`reference.experts`)."""
    E, D, R = len(ends_E), x_RD.shape[1], len(x_RD)
    sizes_E = ends_E.diff(prepend=ends_E.new_zeros(1))
    longest = int(sizes_E.max()) if E else 0
    row = torch.arange(R, device=x_RD.device)
    expert_R = torch.searchsorted(ends_E, row, right=True)
    kept = row[expert_R < E]
    expert_c = expert_R[kept]
    slot_c = expert_c * longest + kept - (ends_E - sizes_E)[expert_c]
    x_ECD = x_RD.new_zeros(E * longest, D).index_copy(0, slot_c, x_RD[kept]).view(E, longest, D)

    def product(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        return torch.bmm(x, w) if bias is None else torch.baddbmm(bias.unsqueeze(1), x, w)

    u = product(x_ECD, weights.up_EFD.transpose(1, 2), weights.up_bias_EF)
    act = ACTIVATIONS[activation]
    if weights.gate_EFD is None:
        h = act(u)
    else:
        h = act(product(x_ECD, weights.gate_EFD.transpose(1, 2), weights.gate_bias_EF)) * u
    if dropout is not None:
        row_EC = dropout.row_R.new_zeros(E * longest).index_copy(0, slot_c, dropout.row_R[kept]).view(E, longest)
        h = dropout._replace(row_R=row_EC).drop(h)
    y_ECD = product(h, weights.down_EFD, weights.down_bias_ED)
    return torch.zeros_like(x_RD).index_copy(0, kept, y_ECD.flatten(0, 1)[slot_c])
