"""A weight and perhaps a bias, for this rank's share of the rows and columns."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Linear(nn.Module):
    """y = x Wᵀ + b, uninitialised: weights come from :mod:`initialise` or from a file, never from here."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool, device: torch.device, dtype: torch.dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(outputs, device=device, dtype=dtype)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """(…, inputs) to (…, outputs)."""
        return F.linear(x, self.weight, self.bias)
