"""y = x Wᵀ in float8, forward and backward, with scales taken anew from each operand.

    x ≈ x₈ s        s = 2^−⌊log₂(largest of the format / max |x|)⌋         one s a tensor, or one a row

    y  = x₈ W₈ᵀ      dx = dy₈ W₈       dW = dy₈ᵀ x₈          each operand scaled along what the product sums over

    tensorwise    x and W in e4m3, dy in e5m2 (Micikevicius 2022, arXiv 2209.05433)
    rowwise       all in e4m3: a scale a row makes up for the narrower range (torchao's and torchtitan's recipe)

Scales are powers of two. Then scaling rounds nothing, and what is rounded to float8 does not depend on the scale,
only on the number itself, as long as that is no more than 2¹⁵ (e4m3) or 2³⁰ (e5m2) below the largest: smaller ones
lose bits to the format's end. This is what makes the layout matter so little. Tensor parallelism cuts W and dy (or W
and x) so that ranks see different maxima; one maximum for all would take an all-reduce for each operand, some ten a
block at 40 µs each, and would change only the entries that are too small to count. So each rank scales by what it
has, and no collective is added (measured in tests/parity/test_precision_parity.py).

x and W are kept for the backward pass as they came, and cast again there: W₈ kept would be a whole model's copy
that FSDP could not free.
"""

import torch
from torch import Tensor
from torch.autograd import Function

from colonnade.kernels.linear.quantise import upscale
from colonnade.kernels.registry import choose

FORWARD, WIDE = torch.float8_e4m3fn, torch.float8_e5m2


def linear(x_TD: Tensor, weight_FD: Tensor, *, row_wise: bool) -> Tensor:
    """y_TF in the type of ``x_TD`` (bfloat16 on a GPU)."""
    if x_TD.numel() == 0:  # nothing has no maximum
        return x_TD @ weight_FD.T
    return _Linear.apply(x_TD, weight_FD, row_wise)


def quantise(x_MK: Tensor, kind: torch.dtype, *, row_wise: bool) -> tuple[Tensor, Tensor]:
    """(x₈, s) with x ≈ x₈ · s: s is float32, 0-dim or one a row (M × 1)."""
    highest = x_MK.abs().amax(1, keepdim=True) if row_wise else x_MK.abs().amax()
    up = upscale(highest, kind)
    return (x_MK * up.to(x_MK.dtype)).to(kind), up.reciprocal()


class _Linear(Function):
    @staticmethod
    def forward(ctx, x_TD: Tensor, weight_FD: Tensor, row_wise: bool) -> Tensor:
        ctx.save_for_backward(x_TD, weight_FD)
        ctx.row_wise = row_wise
        (x, x_scale), (w, w_scale) = (quantise(a, FORWARD, row_wise=row_wise) for a in (x_TD, weight_FD))
        return _product(x, w, x_scale, w_scale, x_TD.dtype)

    @staticmethod
    def backward(ctx, dy_TF: Tensor):
        x_TD, weight_FD = ctx.saved_tensors
        row_wise = ctx.row_wise
        # In dx the sum runs over F and in dW over T: other rows, other scales; of a whole tensor there is but one.
        kind = FORWARD if row_wise else WIDE
        dy, dy_scale = quantise(dy_TF, kind, row_wise=row_wise)
        dy_t, dy_t_scale = quantise(dy_TF.T, kind, row_wise=True) if row_wise else (dy.T, dy_scale)
        w_t, w_t_scale = quantise(weight_FD.T, FORWARD, row_wise=row_wise)
        x_t, x_t_scale = quantise(x_TD.T, FORWARD, row_wise=row_wise)
        dx_TD = _product(dy, w_t, dy_scale, w_t_scale, x_TD.dtype)
        dw_FD = _product(dy_t, x_t, dy_t_scale, x_t_scale, weight_FD.dtype)
        return dx_TD, dw_FD, None


def _product(a_MK: Tensor, b_NK: Tensor, a_scale: Tensor, b_scale: Tensor, dtype: torch.dtype) -> Tensor:
    return choose("scaled_mm", a_MK.device.type, a_MK.dtype)(a_MK, b_NK, a_scale, b_scale, dtype)
