"""Experts with float8 GEMMs in the forward pass and for input gradients; weight gradients stay in 16 bits.

    x ≈ x₈ s       s = 2^−⌊log₂(448 / max |x|)⌋           row-wise scales along the summed dimension, all in e4m3

    u_r  = x_r W_upᵀ        sums over D: a scale per row of x, one per hidden unit of each expert
    y_r  = h_r W_down       sums over F: a scale per row of h, one per column of each expert's W_down
    dh_r = dy_r W_downᵀ     sums over D;     dx_r = du_r W_up + da_r W_gate     sums over F
    dW_e = Σ_r p_r ⊗ q_r    sums over the expert's own rows, in the model's dtype

Rows are quantised as for dense layers (:func:`colonnade.kernels.linear.float8.quantise`), always row-wise: the grouped
GEMM has no tensor-wise scales, and with power-of-two scales both round alike. Weight gradients stay in 16 bits because
float8 tensor cores need the number of rows of each expert to be a multiple of 16, which would take padding. x and the
weights are saved unquantised and quantised again in the backward pass, as in dense layers.
"""

import torch
from torch import Tensor
from torch.autograd import Function

from colonnade.kernels.experts.grouped_mm import zero_output
from colonnade.kernels.experts.reference import ACTIVATIONS, Weights
from colonnade.kernels.linear.float8 import E4M3, quantise
from colonnade.kernels.registry import choose


def experts(x_RD: Tensor, ends_E: Tensor, weights: Weights, activation: str) -> Tensor:
    """y_RD (see :func:`reference.experts`) with float8 GEMMs."""
    R, E = len(x_RD), len(ends_E)
    if not R or not E:  # an empty tensor has no maximum
        return zero_output(x_RD, weights)
    up, down, gate, up_b, gate_b, down_b = weights
    row, act = torch.arange(R, device=x_RD.device), ACTIVATIONS[activation]
    valid_R1, ends = (row < ends_E[-1]).unsqueeze(1), ends_E.to(torch.int32)
    biased = up_b is not None or down_b is not None
    expert_R = torch.searchsorted(ends_E, row, right=True).clamp(max=E - 1) if biased else None

    def with_bias(y: Tensor, bias: Tensor | None) -> Tensor:
        return y if bias is None else y + bias[expert_R]

    # Rows past the last end may hold anything, NaN too, so they are zeroed before and after each GEMM.
    first = _GroupedGemm.apply(x_RD.where(valid_R1, 0), ends, True, up, *(() if gate is None else (gate,)))
    u, *a = (y.where(valid_R1, 0) for y in first)
    u = with_bias(u, up_b)
    h = act(u) if gate is None else act(with_bias(a[0], gate_b)) * u
    (y,) = _GroupedGemm.apply(h.where(valid_R1, 0), ends, False, down)
    return with_bias(y, down_b).where(valid_R1, 0)


def routed(
    x_TD: Tensor, order_R: Tensor, ends_E: Tensor, weights_TA: Tensor, weights: Weights, activation: str
) -> Tensor:
    """y_TD (see :func:`reference.routed`) with float8 GEMMs."""
    kind, dtype = x_TD.device.type, x_TD.dtype
    x_RD = choose("gather_rows", kind, dtype)(x_TD, order_R, weights_TA.shape[1])
    return choose("combine_rows", kind, dtype)(experts(x_RD, ends_E, weights, activation), order_R, weights_TA)


class _GroupedGemm(Function):
    """Rows times one or two stacks (E, F, D) of expert weights: from D to F (``up``), or from F to D.

    Rows past the last end must be finite; their results are undefined.
    """

    @staticmethod
    def forward(ctx, x_RK: Tensor, ends_E: Tensor, up: bool, *stacks: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x_RK, ends_E, *stacks)
        ctx.up = up
        x, scale = quantise(x_RK, E4M3, row_wise=True)
        return tuple(_gemm(x, scale, w if up else w.transpose(1, 2), ends_E, x_RK.dtype) for w in stacks)

    @staticmethod
    def backward(ctx, *dys: Tensor):
        x_RK, ends_E, *stacks = ctx.saved_tensors
        row = torch.arange(len(x_RK), device=x_RK.device)
        valid_R1 = (row < ends_E[-1]).unsqueeze(1)
        dx_RK, d_stacks = None, []
        for dy, w, needs_grad in zip(dys, stacks, ctx.needs_input_grad[3:], strict=True):
            if ctx.needs_input_grad[0]:
                dy8, scale = quantise(dy, E4M3, row_wise=True)
                part = _gemm(dy8, scale, w.transpose(1, 2) if ctx.up else w, ends_E, dy.dtype).where(valid_R1, 0)
                dx_RK = part if dx_RK is None else dx_RK + part
            p, q = (dy, x_RK) if ctx.up else (x_RK, dy)
            wgrad = choose("grouped_wgrad", dy.device.type, dy.dtype)
            d_stacks.append(wgrad(p, q, ends_E) if needs_grad else None)
        return dx_RK, None, None, *d_stacks


def _gemm(a_RK: Tensor, a_scale: Tensor, w_ENK: Tensor, ends_E: Tensor, dtype: torch.dtype) -> Tensor:
    E, N, K = w_ENK.shape
    b, b_scale = quantise(w_ENK.reshape(E * N, K), E4M3, row_wise=True)
    run = choose("scaled_grouped_mm", a_RK.device.type, a_RK.dtype)
    return run(a_RK, b.view(E, N, K), a_scale, b_scale.view(E, N, 1), ends_E, dtype)
