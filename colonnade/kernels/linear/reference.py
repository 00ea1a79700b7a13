"""Reference implementations of linear layers, in plain torch; some are also what a CPU uses.

    linear              y = x Wᵀ + b
    quantised_linear    the same with a weight-only quantised W: dequantises :data:`BAND_ELEMENTS` elements of W at a
                        time, which fit the caches however large the model is, and multiplies
    scaled_product      C = (a ⊙ s_a) (b ⊙ s_b)ᵀ of float8 matrices and their scales, in float32 arithmetic
    embedding           rows of a table, plain or quantised
    fused_linear        y = act(W x̂ + b) + r,   or   y = act(G x̂ + b_G) ⊙ (W x̂ + b) + r
                        with x̂ = x, or its RMSNorm or LayerNorm

Each part of ``fused_linear`` but W is optional. A fused kernel rounds once, at the end; here every step rounds to the
dtype of x.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from colonnade.kernels import norm as norm_reference
from colonnade.kernels.experts.reference import ACTIVATIONS
from colonnade.kernels.linear.quantise import Quantised, dequantise, round_inputs, to_rows

BAND_ELEMENTS = 1 << 20
"""Weights dequantised at once."""

Matrix = Tensor | Quantised
"""A weight, quantised or not."""


class NormWeights(NamedTuple):
    """Parameters of an RMSNorm, or with a bias of a LayerNorm."""

    weight_D: Tensor
    eps: float
    bias_D: Tensor | None = None


class Gate(NamedTuple):
    """The gate projection of a gated feed-forward layer."""

    weight: Matrix
    bias_F: Tensor | None
    activation: str
    """A key of :data:`~colonnade.kernels.experts.reference.ACTIVATIONS`."""


def linear(x_TD: Tensor, weight_FD: Tensor, bias_F: Tensor | None = None) -> Tensor:
    """y_TF."""
    return F.linear(x_TD, weight_FD, bias_F)


def quantised_linear(x_TD: Tensor, weight: Quantised, bias_F: Tensor | None = None) -> Tensor:
    """y_TF; ``x_TD`` may have any number of leading dimensions."""
    if weight.kind == "int8_dynamic":
        x_TD = round_inputs(x_TD)
    weight, step = to_rows(weight), band_rows(weight)
    parts = [
        F.linear(x_TD, dequantise(weight, x_TD.dtype, slice(start, start + step)))
        for start in range(0, weight.outputs, step)
    ]
    y_TF = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
    return y_TF if bias_F is None else y_TF + bias_F


def embedding(tokens_T: Tensor, table: Matrix, dtype: torch.dtype, *, residual_TD: Tensor | None = None) -> Tensor:
    """x_TD: the rows of ``table`` (V, D) of ``tokens_T``, plus a residual; quantised rows become ``dtype``."""
    if isinstance(table, Quantised):
        table = to_rows(table)
        values = table.values.view(torch.uint8)[tokens_T].view(table.values.dtype)  # not every torch can index float8
        x_TD = dequantise(table._replace(values=values, scales=table.scales[tokens_T]), dtype)
    else:
        x_TD = F.embedding(tokens_T, table)
    return x_TD if residual_TD is None else residual_TD + x_TD


def band_rows(weight: Quantised) -> int:
    """Rows (outputs) of ``weight`` that are dequantised at once."""
    return max(1, BAND_ELEMENTS // max(1, weight.inputs))


def scaled_product(a_MK: Tensor, b_NK: Tensor, a_scale: Tensor, b_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """c_MN in ``dtype``; a scale is a float32 scalar, or one per row (M × 1, N × 1)."""
    return ((a_MK.float() * a_scale) @ (b_NK.float() * b_scale).T).to(dtype)


def fused_linear(
    x_TD: Tensor,
    weight: Matrix,
    bias_F: Tensor | None = None,
    *,
    norm: NormWeights | None = None,
    gate: Gate | None = None,
    activation: str | None = None,
    residual_TF: Tensor | None = None,
    inplace: bool = False,
) -> Tensor:
    """y_TF; ``activation`` is for a layer without a gate. With ``inplace``, y may overwrite the residual."""
    if norm is not None:
        x_TD = norm_reference.norm(x_TD, norm.weight_D, norm.bias_D, norm.eps)
    y_TF = _linear(x_TD, weight, bias_F)
    if activation is not None:
        y_TF = ACTIVATIONS[activation](y_TF)
    if gate is not None:
        y_TF = ACTIVATIONS[gate.activation](_linear(x_TD, gate.weight, gate.bias_F)) * y_TF
    if residual_TF is None:
        return y_TF
    return residual_TF.add_(y_TF) if inplace else residual_TF + y_TF


def _linear(x_TD: Tensor, weight: Matrix, bias_F: Tensor | None) -> Tensor:
    run = quantised_linear if isinstance(weight, Quantised) else linear
    return run(x_TD, weight, bias_F)  # type: ignore[arg-type]
