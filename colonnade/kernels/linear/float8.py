"""y = x Wᵀ in float8, forward and backward, with dynamic scales of each operand.

    x ≈ x₈ s        s = 2^−⌊log₂(largest value of the format / max |x|)⌋        one s per tensor, or one per row

    y  = x₈ W₈ᵀ      dx = dy₈ W₈       dW = dy₈ᵀ x₈          each operand scaled along the summed dimension

    tensorwise    x and W in e4m3, dy in e5m2 (Micikevicius 2022, arXiv 2209.05433)
    rowwise       all in e4m3: a scale per row makes up for the narrower range (torchao's and torchtitan's recipe)

Scales are powers of two, so scaling does not round. What is rounded to float8 then does not depend on the scale, only
on the value itself, as long as that is at most 2¹⁵ (e4m3) or 2³⁰ (e5m2) below the maximum; smaller values are subnormal
and lose bits. Therefore the parallel layout hardly matters. Tensor parallelism shards W and dy (or W and x), so ranks
have different maxima. One maximum for all ranks would take an all-reduce per operand, some ten per block at 40 µs each,
and would change only values that are too small to count. So each rank scales by its own maximum, without a collective
(measured in tests/parity/test_precision_parity.py).

x and W are saved for the backward pass unquantised and quantised again there: a saved W₈ would be a copy of the whole
model that FSDP could not free.
"""

import torch
from torch import Tensor
from torch.autograd import Function

from colonnade.kernels.linear.quantise import power_of_two_scale
from colonnade.kernels.registry import choose

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def linear(x_TD: Tensor, weight_FD: Tensor, *, row_wise: bool) -> Tensor:
    """y_TF in the dtype of ``x_TD`` (bfloat16 on a GPU)."""
    if x_TD.numel() == 0:  # an empty tensor has no maximum
        return x_TD @ weight_FD.T
    return _Linear.apply(x_TD, weight_FD, row_wise)


def quantise(x_MK: Tensor, kind: torch.dtype, *, row_wise: bool) -> tuple[Tensor, Tensor]:
    """(x₈, s) with x ≈ x₈ · s; s is a float32 scalar, or one per row (M × 1)."""
    highest = x_MK.abs().amax(1, keepdim=True) if row_wise else x_MK.abs().amax()
    scale = power_of_two_scale(highest, kind)
    return (x_MK * scale.to(x_MK.dtype)).to(kind), scale.reciprocal()


class _Linear(Function):
    @staticmethod
    def forward(ctx, x_TD: Tensor, weight_FD: Tensor, row_wise: bool) -> Tensor:
        ctx.save_for_backward(x_TD, weight_FD)
        ctx.row_wise = row_wise
        (x, x_scale), (w, w_scale) = (quantise(a, E4M3, row_wise=row_wise) for a in (x_TD, weight_FD))
        return _scaled_gemm(x, w, x_scale, w_scale, x_TD.dtype)

    @staticmethod
    def backward(ctx, dy_TF: Tensor):
        x_TD, weight_FD = ctx.saved_tensors
        row_wise = ctx.row_wise
        # dx sums over F and dW over T, so row-wise scales differ; a tensor-wise scale serves both.
        kind = E4M3 if row_wise else E5M2
        dy, dy_scale = quantise(dy_TF, kind, row_wise=row_wise)
        dy_t, dy_t_scale = quantise(dy_TF.T, kind, row_wise=True) if row_wise else (dy.T, dy_scale)
        w_t, w_t_scale = quantise(weight_FD.T, E4M3, row_wise=row_wise)
        x_t, x_t_scale = quantise(x_TD.T, E4M3, row_wise=row_wise)
        dx_TD = _scaled_gemm(dy, w_t, dy_scale, w_t_scale, x_TD.dtype)
        dw_FD = _scaled_gemm(dy_t, x_t, dy_t_scale, x_t_scale, weight_FD.dtype)
        return dx_TD, dw_FD, None


def _scaled_gemm(a_MK: Tensor, b_NK: Tensor, a_scale: Tensor, b_scale: Tensor, dtype: torch.dtype) -> Tensor:
    return choose("scaled_mm", a_MK.device.type, a_MK.dtype)(a_MK, b_NK, a_scale, b_scale, dtype)
