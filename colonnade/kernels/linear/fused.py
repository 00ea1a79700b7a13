"""A product with what stands before and after it in a block: the specification, and what a CPU uses.

    y = W x̂ + b + r        y = act(G x̂ + b_G) ⊙ (W x̂ + b) + r        x̂ = x, or its RMSNorm x / √(mean(x²) + ε) · g

Each part but W may be missing. A fused kernel rounds once, at the end; here every step rounds to the type of x.
"""

from typing import NamedTuple

from torch import Tensor

from colonnade.kernels.experts.reference import ACTIVATIONS
from colonnade.kernels.linear import quantised, reference
from colonnade.kernels.linear.quantise import Quantised
from colonnade.kernels.norm import reference as norm_reference

Matrix = Tensor | Quantised
"""A weight as it is multiplied with."""


class Scale(NamedTuple):
    """An RMSNorm of rows."""

    weight_D: Tensor
    eps: float


class Gate(NamedTuple):
    """The other matrix of a gated layer."""

    weight: Matrix
    bias_F: Tensor | None
    activation: str
    """A name in :data:`~colonnade.kernels.experts.reference.ACTIVATIONS`."""


def linear(
    x_TD: Tensor,
    weight: Matrix,
    bias_F: Tensor | None = None,
    *,
    norm: Scale | None = None,
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
    return (quantised if isinstance(weight, Quantised) else reference).linear(x_TD, weight, bias_F)  # type: ignore[arg-type]
