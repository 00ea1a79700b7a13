"""y = x Wᵀ + b with a quantised W: dequantise, then multiply. The specification, and what a CPU uses.

A band of W's rows at a time: what is written out at once is :data:`BAND` numbers, which caches hold, however large the
model.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from colonnade.kernels.linear.quantise import Quantised, dequantise

BAND = 1 << 20
"""Weights written out at once."""


def linear(x_TD: Tensor, weight: Quantised, bias_F: Tensor | None = None) -> Tensor:
    """y_TF; the last dimension of ``x_TD`` is multiplied, whatever comes before."""
    step = band(weight)
    parts = [
        F.linear(x_TD, dequantise(weight, x_TD.dtype, slice(start, start + step)))
        for start in range(0, weight.outputs, step)
    ]
    y_TF = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
    return y_TF if bias_F is None else y_TF + bias_F


def band(weight: Quantised) -> int:
    """Outputs of ``weight`` that are written out at once."""
    return max(1, BAND // max(1, weight.inputs))
