"""y = x Wᵀ + b, as torch computes it: the specification, and what every device but a CPU uses."""

from torch import Tensor
from torch.nn import functional as F


def linear(x_TD: Tensor, weight_FD: Tensor, bias_F: Tensor | None = None) -> Tensor:
    """y_TF."""
    return F.linear(x_TD, weight_FD, bias_F)
