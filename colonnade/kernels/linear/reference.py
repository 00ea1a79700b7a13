"""y = x Wᵀ + b, as torch computes it: the specification, and what every device but a CPU uses.

y = x Wᵀ + b with a quantised W: dequantise, then multiply. The specification, and what a CPU uses.

A band of W's rows at a time: what is written out at once is :data:`BAND_ELEMENTS` numbers, which caches hold, however large the
model.

A Bᵀ of two float8 matrices with their scales, as an equation: the specification of :mod:`scaled_mm`.

    C = (a ⊙ s_a) (b ⊙ s_b)ᵀ

The arithmetic is float32's.

A product with what stands before and after it in a block: the specification, and what a CPU uses.

    y = W x̂ + b + r        y = act(G x̂ + b_G) ⊙ (W x̂ + b) + r        x̂ = x, or its RMSNorm x / √(mean(x²) + ε) · g

Each part but W may be missing. A fused kernel rounds once, at the end; here every step rounds to the type of x.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from colonnade.kernels import norm as norm_reference
from colonnade.kernels.experts.reference import ACTIVATIONS
from colonnade.kernels.linear.quantise import Quantised, dequantise


def linear(x_TD: Tensor, weight_FD: Tensor, bias_F: Tensor | None = None) -> Tensor:
    """y_TF."""
    return F.linear(x_TD, weight_FD, bias_F)


BAND_ELEMENTS = 1 << 20
"""Weights written out at once."""


def quantised_linear(x_TD: Tensor, weight: Quantised, bias_F: Tensor | None = None) -> Tensor:
    """y_TF; the last dimension of ``x_TD`` is multiplied, whatever comes before."""
    step = band_rows(weight)
    parts = [
        F.linear(x_TD, dequantise(weight, x_TD.dtype, slice(start, start + step)))
        for start in range(0, weight.outputs, step)
    ]
    y_TF = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
    return y_TF if bias_F is None else y_TF + bias_F


def band_rows(weight: Quantised) -> int:
    """Outputs of ``weight`` that are written out at once."""
    return max(1, BAND_ELEMENTS // max(1, weight.inputs))


def scaled_product(a_MK: Tensor, b_NK: Tensor, a_scale: Tensor, b_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """c_MN in ``dtype``; a scale is one float32 number, or one a row (M × 1, N × 1)."""
    return ((a_MK.float() * a_scale) @ (b_NK.float() * b_scale).T).to(dtype)


Matrix = Tensor | Quantised
"""A weight as it is multiplied with."""


class RmsNorm(NamedTuple):
    """An RMSNorm of rows."""

    weight_D: Tensor
    eps: float


class Gate(NamedTuple):
    """The other matrix of a gated layer."""

    weight: Matrix
    bias_F: Tensor | None
    activation: str
    """A name in :data:`~colonnade.kernels.experts.reference.ACTIVATIONS`."""


def fused_linear(
    x_TD: Tensor,
    weight: Matrix,
    bias_F: Tensor | None = None,
    *,
    norm: RmsNorm | None = None,
    gate: Gate | None = None,
    more_TF: Tensor | None = None,
    own: bool = False,
) -> Tensor:
    """y_TF, which may take the place of r where that is the caller's ``own``."""
    if norm is not None:
        x_TD = norm_reference.norm(x_TD, norm.weight_D, None, norm.eps)
    y_TF = _plain(x_TD, weight, bias_F)
    if gate is not None:
        y_TF = ACTIVATIONS[gate.activation](_plain(x_TD, gate.weight, gate.bias_F)) * y_TF
    if more_TF is None:
        return y_TF
    return more_TF.add_(y_TF) if own else more_TF + y_TF


def _plain(x_TD: Tensor, weight: Matrix, bias_F: Tensor | None) -> Tensor:
    if isinstance(weight, Quantised):
        return quantised_linear(x_TD, weight, bias_F)
    return linear(x_TD, weight, bias_F)
