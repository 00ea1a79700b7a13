"""Small experts in bfloat16 on a CPU, when most of them have rows: one batched product of all.

A product of a few rows with a small matrix costs a library more to begin than to compute: at 512 × 256 some 35 µs, a
third of it arithmetic; a batched one begins once. Each expert's rows are padded to those of the busiest. Milliseconds
of two cores of an EPYC, no gradient, even loads; D × F of 512 × 256, 8 of 64 experts, and of 512 × 1024, 2 of 8:

    tokens          8     16     64    256   1024          16     64    256   1024
    loop          6.6    9.2   11.2   16.5   37.0         2.4    3.3    6.9   21.0
    batched       4.1    5.0    6.1   12.0   28.2         1.8    2.8    6.9   24.1

With fewer experts in use (fewer tokens) the loop reads less; copying those out of the stack costs more than it saves.
"""

import torch
from torch import Tensor

from colonnade.kernels.experts import batched, loop
from colonnade.kernels.experts.reference import Weights

SMALL = 1 << 19
"""Numbers of a matrix."""
MOST, PADDED = 128, 4
"""Rows of the busiest expert, and all rows, padded, for one that is there."""


def routed(
    x_TD: Tensor, order_R: Tensor, ends_E: Tensor, weights_TA: Tensor, weights: Weights, activation: str
) -> Tensor:
    """y_TD (see :func:`reference.routed`); by the loop where it is faster or a gradient is wanted."""
    differs = torch.is_grad_enabled() and any(x.requires_grad for x in (x_TD, weights_TA, *weights.tensors))
    fits = not differs and weights.up_EFD[0].numel() <= SMALL and _together(ends_E)
    if not fits:
        return loop.routed(x_TD, order_R, ends_E, weights_TA, weights, activation)
    token_R, w_R1 = order_R // weights_TA.shape[1], weights_TA.flatten()[order_R].unsqueeze(1)
    y_RD = batched.experts(x_TD[token_R], ends_E, weights, activation)
    y_TD = x_TD.new_zeros(x_TD.shape, dtype=torch.promote_types(x_TD.dtype, weights_TA.dtype))
    return y_TD.index_add_(0, token_R, (y_RD * w_R1).to(y_TD.dtype)).to(x_TD.dtype)


def _together(ends_E: Tensor) -> bool:
    sizes_E = ends_E.diff(prepend=ends_E.new_zeros(1))
    most, E = int(sizes_E.max()) if len(sizes_E) else 0, len(ends_E)
    return 0 < most <= MOST and 2 * int(sizes_E.count_nonzero()) > E and most * E <= PADDED * int(ends_E[-1])
