"""The experts' activations and their slopes, on float32 tiles."""

# pyright: reportCallIssue=false, reportArgumentType=false

import math

import triton
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
