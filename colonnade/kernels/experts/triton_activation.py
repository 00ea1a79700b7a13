"""The experts' activations and their derivatives, on float32 tiles.

Kernels for the element-wise steps between two GEMMs that torch computes, one pass over the hidden units each:

    forward     h = act(a) ⊙ u                                                  3RF elements
    backward    w ⊙ h, du, da and each row's h · dh, from dh, a and u           6RF elements; dw = h · dh

Our own GEMMs compute both in their epilogues. Rows past the last end are not touched.
"""

import math

import torch
import triton
from torch import Tensor
from triton import language as tl

ROOT_HALF = tl.constexpr(math.sqrt(0.5))
GAUSS = tl.constexpr(1 / math.sqrt(2 * math.pi))
TANH = tl.constexpr(math.sqrt(2 / math.pi))
CUBE = tl.constexpr(0.044715)


@triton.jit
def activate(x, ACT: tl.constexpr):
    """(act(x), act'(x))."""
    if ACT == "silu":
        s = tl.sigmoid(x)
        y = x * s
        slope = s + y * (1 - s)
    elif ACT == "gelu":
        below = 0.5 + 0.5 * tl.erf(x * ROOT_HALF)
        y = x * below
        slope = below + x * GAUSS * tl.exp(-0.5 * x * x)
    elif ACT == "gelu_tanh":
        # 1 + tanh z = 2 sigmoid 2z: one exponential, and none that overflows
        z = TANH * (x + CUBE * x * x * x)
        s = tl.sigmoid(2 * z)
        y = x * s
        slope = s + 2 * y * (1 - s) * TANH * (1 + 3 * CUBE * x * x)
    else:
        tl.static_assert(ACT == "relu")
        y = tl.maximum(x, 0.0)
        slope = tl.where(x > 0, 1.0, 0.0)
    return y, slope


@triton.jit
def activation_forward_kernel(
    a_ptr, u_ptr, h_ptr, ends_ptr, last, F, GATED: tl.constexpr, ACT: tl.constexpr, BF: tl.constexpr
):
    """BF hidden units of one row."""
    r = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * BF + tl.arange(0, BF)
    valid = f < tl.where(r < tl.load(ends_ptr + last), F, 0)
    u = tl.load(u_ptr + r * F + f, valid, 0.0).to(tl.float32)
    h = activate(tl.load(a_ptr + r * F + f, valid, 0.0).to(tl.float32), ACT)[0] * u if GATED else activate(u, ACT)[0]
    tl.store(h_ptr + r * F + f, h.to(h_ptr.dtype.element_ty), valid)


@triton.jit
def activation_backward_kernel(
    dh_ptr, a_ptr, u_ptr, order_ptr, routing_ptr, h_ptr, da_ptr, du_ptr, dw_ptr, ends_ptr, last, F,
    GATED: tl.constexpr, ACT: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
    """All hidden units of one row."""
    r = tl.program_id(0).to(tl.int64)
    width = tl.where(r < tl.load(ends_ptr + last), F, 0)
    w = tl.load(routing_ptr + tl.load(order_ptr + r)).to(tl.float32)
    dot = tl.zeros((BF,), tl.float32)
    for f0 in range(0, width, BF):
        f = f0 + tl.arange(0, BF)
        valid = f < F
        dh = tl.load(dh_ptr + r * F + f, valid, 0.0).to(tl.float32)
        u = tl.load(u_ptr + r * F + f, valid, 0.0).to(tl.float32)
        if GATED:
            h, slope = activate(tl.load(a_ptr + r * F + f, valid, 0.0).to(tl.float32), ACT)
            tl.store(da_ptr + r * F + f, (w * dh * u * slope).to(da_ptr.dtype.element_ty), valid)
            tl.store(du_ptr + r * F + f, (w * dh * h).to(du_ptr.dtype.element_ty), valid)
            h *= u
        else:
            h, slope = activate(u, ACT)
            tl.store(du_ptr + r * F + f, (w * dh * slope).to(du_ptr.dtype.element_ty), valid)
        tl.store(h_ptr + r * F + f, (w * h).to(h_ptr.dtype.element_ty), valid)
        dot += h * dh
    tl.store(dw_ptr + r, tl.sum(dot, 0))


def _block(F: int) -> int:
    return min(1024, triton.next_power_of_2(F))


def activation_forward(a_RF: Tensor | None, u_RF: Tensor, ends_E: Tensor, activation: str) -> Tensor:
    """h_RF = act(a) ⊙ u, or act(u) without a gate."""
    R, F = u_RF.shape
    h_RF = torch.empty_like(u_RF)
    activation_forward_kernel[R, triton.cdiv(F, _block(F))](
        a_RF, u_RF, h_RF, ends_E, len(ends_E) - 1, F, a_RF is not None, activation, _block(F)
    )
    return h_RF


def activation_backward(
    dh_RF: Tensor, a_RF: Tensor | None, u_RF: Tensor, order_R: Tensor, routing_TA: Tensor, ends_E: Tensor,
    activation: str,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:  # fmt: skip
    """(w ⊙ h, du, da, dw_R in float32, 0 for rows without an expert); du overwrites dh."""
    R, F = u_RF.shape
    h_RF, da_RF = torch.empty_like(u_RF), None if a_RF is None else torch.empty_like(a_RF)
    dw_R = torch.zeros(R, dtype=torch.float32, device=u_RF.device)
    activation_backward_kernel[(R,)](
        dh_RF, a_RF, u_RF, order_R, routing_TA, h_RF, da_RF, dh_RF, dw_R, ends_E, len(ends_E) - 1, F,
        a_RF is not None, activation, _block(F),
    )  # fmt: skip
    return h_RF, dh_RF, da_RF, dw_R
