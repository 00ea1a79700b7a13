"""Scores of experts and the choice of the highest, in plain torch: the specification.

    logits   = x Wᵀ + b                                in float32 at least, whatever the types of x and W
    i        = top-A of what is compared, highest first
    w_j      = s_{i_j} [/ max(Σ_j s_{i_j}, 10⁻²⁰)] · scale

NaN counts as the highest. Equal scores go to the lower index, which ``topk`` does not promise.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

LEAST = 1e-20
"""What the sum of a token's scores counts as, where it is smaller."""


def scores(x_TD: Tensor, weight_ED: Tensor, bias_E: Tensor | None = None) -> Tensor:
    """logits_TE."""
    exact = torch.promote_types(x_TD.dtype, torch.float32)
    return F.linear(x_TD.to(exact), weight_ED.to(exact), None if bias_E is None else bias_E.to(exact))


def top(x_TE: Tensor, count: int) -> Tensor:
    """int64 (T, count): indices of each row's highest, highest first, the lower index first of equals."""
    E = x_TE.shape[1]
    if x_TE.device.type != "cpu" or torch.compiler.is_compiling() or count >= E:
        return _sorted(x_TE)[:, :count]
    # On a CPU a stable sort of 128 scores takes seven times as long as topk: only rows with equal scores are sorted.
    values_TA, ids_TA = x_TE.topk(count + 1, dim=1)
    equal_T = (values_TA[:, 1:] == values_TA[:, :-1]).any(1) | values_TA[:, 0].isnan()
    rows = equal_T.nonzero().squeeze(1)
    if len(rows):
        ids_TA[rows] = _sorted(x_TE[rows])[:, : count + 1]
    return ids_TA[:, :count]


def _sorted(x_TE: Tensor) -> Tensor:
    return x_TE.sort(dim=1, descending=True, stable=True).indices


def best(
    compared_TE: Tensor, scores_TE: Tensor, active: int, *, normalise: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """(ids_TA, weights_TA), these differentiable in the scores."""
    ids_TA = top(compared_TE.detach(), active)
    weights_TA = scores_TE.gather(1, ids_TA)
    if normalise:
        weights_TA = weights_TA / weights_TA.sum(1, keepdim=True).clamp(min=LEAST)
    return ids_TA, weights_TA if scale == 1 else weights_TA * scale
