"""Experts through the C++ library: a whole mixture on the residual stream in one call, or rows that were routed before.

y = x + Σ_j w_j E_{i_j}(norm(x))        i, w by the softmax router (:mod:`colonnade.model.moe.routers.softmax`)

One call (``experts.h``) is for a rank that has all experts. :func:`routed` multiplies the rows that another router or
other ranks have chosen, with the same products: an expert rounds its inputs to 8 bits in every layout, so layouts
differ by the order of sums alone.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from colonnade.kernels import permute
from colonnade.kernels.cpu import calls, kernels
from colonnade.kernels.experts.quantised import QuantisedWeights
from colonnade.kernels.experts.reference import Weights
from colonnade.kernels.linear.quantise import Quantised
from colonnade.kernels.linear.reference import Gate, NormWeights


class SoftmaxRouter(NamedTuple):
    """The router's weights and settings."""

    weight_ED: Tensor
    bias_E: Tensor | None
    active: int
    """A."""
    normalise: bool
    scale: float


def fits(x_TD: Tensor, router: SoftmaxRouter, weights: Weights | QuantisedWeights) -> bool:
    """Whether :func:`experts_step` supports these tokens and weights."""
    with_gradient = torch.is_grad_enabled() and any(x.requires_grad for x in (x_TD, *weights.tensors))
    same = router.weight_ED.dtype == x_TD.dtype and router.weight_ED.is_contiguous() and x_TD.is_contiguous()
    if not same or with_gradient or not router.weight_ED.device == x_TD.device == weights.tensors[0].device:
        return False
    stacks = [stack for stack in _stacks(weights) if stack is not None]
    kinds = {(w.kind, w.group if w.kind == "int4" else 0, w.blocked) for w in stacks[:2] if isinstance(w, Quantised)}
    return len(kinds) <= 1 and all(
        (isinstance(stack, Quantised) or stack.is_contiguous()) and kernels.fits(x_TD, _matrix(stack, 0))
        for stack in stacks
    )


def experts_step(
    x_TD: Tensor, norm: NormWeights, router: SoftmaxRouter, weights: Weights | QuantisedWeights, activation: str
) -> Tensor:
    """y_TD: ``x_TD`` plus the weighted sum of each token's experts for its norm."""
    (T, D), dtype, choices = x_TD.shape, x_TD.dtype, len(x_TD) * router.active
    up, gate, down = _stacks(weights)
    assert up is not None
    assert down is not None
    tensors = [x_TD, norm.weight_D, router.weight_ED, *weights.tensors]
    tensors += [x for x in (norm.bias_D, router.bias_E) if x is not None]
    matrix, _ = kernels.matrix_of(router.weight_ED, router.bias_E, D, dtype)
    up_matrices = _matrices(up, weights.up_bias_EF, D, dtype)
    units = up_matrices.first.outputs
    down_matrices = _matrices(down, weights.down_bias_ED, units, dtype)
    gate_matrices = calls.ExpertMatrices() if gate is None else _matrices(gate, weights.gate_bias_EF, D, dtype)
    kernels.require(down_matrices.first.outputs == D, f"experts of {down_matrices.first.outputs} outputs for {D}")
    kernels.require(gate is None or gate_matrices.first.outputs == units, "a gate as wide as the experts")
    kernels.require(0 < router.active <= matrix.outputs, f"{router.active} of {matrix.outputs} experts")
    y_TD, normed = torch.empty_like(x_TD), torch.empty_like(x_TD)
    hidden, outputs = x_TD.new_empty(choices, units), x_TD.new_empty(choices, D)
    ids, places = (torch.empty(choices, dtype=torch.int32) for _ in range(2))
    shares = torch.empty(choices, dtype=torch.float32)
    buffers = (normed, hidden, outputs, ids, places, shares)
    arguments = calls.Experts(
        x_TD.data_ptr(), y_TD.data_ptr(), kernels.norm_of(norm.weight_D, norm.bias_D, norm.eps, D, dtype), matrix,
        up_matrices, gate_matrices, down_matrices, *(x.data_ptr() for x in buffers),
        T, router.active, router.normalise, calls.ACTIVATIONS[activation], calls.DTYPES[dtype], router.scale,
    )  # fmt: skip
    calls.run(arguments, y_TD, *tensors, *buffers)
    return y_TD


def routed(
    x_TD: Tensor, order_R: Tensor, ends_E: Tensor, weights_TA: Tensor, weights: QuantisedWeights, activation: str
) -> Tensor:
    """y_TD (see :func:`colonnade.kernels.experts.quantised.routed`) of inputs rounded as in :func:`experts_step`."""
    x_RD = permute.gather(x_TD, order_R, weights_TA.shape[1])
    start, y_RD = 0, torch.zeros_like(x_RD)
    up, down, gate, up_b, gate_b, down_b = weights
    for e, end in enumerate(ends_E.tolist()):
        if end > start:
            up_bias, gate_bias, down_bias = (None if b is None else b[e] for b in (up_b, gate_b, down_b))
            gated = None if gate is None else Gate(gate.matrix(e), gate_bias, activation)
            h_cF = kernels.fused_linear(
                x_RD[start:end], up.matrix(e), up_bias, gate=gated, activation=activation if gate is None else None
            )
            y_RD[start:end] = kernels.quantised_linear(h_cF, down.matrix(e), down_bias)
            start = end
    return permute.combine(y_RD, order_R, weights_TA)


Stack = Tensor | Quantised


def _stacks(weights: Weights | QuantisedWeights) -> tuple[Stack | None, Stack | None, Stack | None]:
    """(up, gate, down), each matrix as outputs × inputs."""
    if isinstance(weights, QuantisedWeights):
        return weights.up, weights.gate, weights.down
    return weights.up_EFD, weights.gate_EFD, weights.down_EFD.mT


def _matrix(stack: Stack, e: int) -> Stack:
    return stack.matrix(e) if isinstance(stack, Quantised) else stack[e]


def _matrices(stack: Stack, bias: Tensor | None, inputs: int, dtype: torch.dtype) -> calls.ExpertMatrices:
    one_bias = None if bias is None else bias[0]
    first, _ = kernels.matrix_of(_matrix(stack, 0), one_bias, inputs, dtype)
    values, scales = (stack.values, stack.scales) if isinstance(stack, Quantised) else (stack, None)
    kernels.require(values.is_contiguous() and (bias is None or bias.is_contiguous()), "strided experts")
    sizes = (0 if x is None else x[0].nbytes for x in (values, scales, bias))
    return calls.ExpertMatrices(first, *sizes)
