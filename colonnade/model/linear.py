"""A weight and perhaps a bias, for this rank's share of the rows and columns."""

import torch
from torch import Tensor, nn

from colonnade.kernels.choose import choose


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x Wᵀ + b, (…, inputs) to (…, outputs)."""
    return choose("linear", x.device.type, x.dtype)(x, weight, bias)


class Linear(nn.Module):
    """y = x Wᵀ + b, uninitialised: weights come from :mod:`initialise` or from a file, never from here."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool, device: torch.device, dtype: torch.dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(outputs, device=device, dtype=dtype)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """(…, inputs) to (…, outputs)."""
        return linear(x, self.weight, self.bias)
