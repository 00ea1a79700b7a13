"""Experts in bfloat16 on a CPU where no gradient is wanted: by whoever begins least often.

A product of a few rows with a small matrix costs a library more to begin than to compute: at 512 × 256 some 35 µs, a
third of it arithmetic, and the loop begins three for each expert in use. torch's grouped product begins one for all of
them; where most of many small experts have rows, a batched product, each expert's rows padded to those of the busiest,
spreads better over the cores. Milliseconds of two cores of an EPYC, even loads, D × F of 512 × 256 with 8 of 64
experts, of 512 × 1024 with 2 of 8, and of 1024 × 3584 with 2 of 8:

    tokens       1     2     4     8    16    64   256  1024  |     1     4    16   256  |     1     4    16   256
    loop      1.24  2.11  3.90  6.55  8.75  11.3  15.9  43.1  |  0.58  1.35  2.29  6.77  |  3.03  7.90  14.1  40.2
    grouped   1.14  1.73  2.93  4.76  6.43   9.1  13.2  37.9  |  0.55  1.18  2.02  6.65  |  2.85  7.82  13.8  39.8
    batched                     4.61  4.84   7.0  12.8  28.2  |              1.77  6.94  |
"""

import torch
from torch import Tensor

from colonnade.kernels.experts import batched, grouped, loop
from colonnade.kernels.experts.reference import ACTIVATIONS, Weights

SMALL = 1 << 19
"""Numbers of a matrix, up to which experts go together in a batch."""
MOST, PADDED = 128, 4
"""Rows of the busiest of these, and all rows, padded, for one that is there."""
ROOM = 1 << 22
"""Numbers of all experts' rows together, D or F wide, up to which they are laid out one after another: of more, only
those of one expert stay in a cache.
"""
ALIGNED = 8
"""Numbers in 16 bytes, of which the grouped product wants whole ones."""


def routed(
    x_TD: Tensor, order_R: Tensor, ends_E: Tensor, weights_TA: Tensor, weights: Weights, activation: str
) -> Tensor:
    """y_TD (see :func:`reference.routed`); by the loop where it is faster or a gradient is wanted."""
    differs = torch.is_grad_enabled() and any(x.requires_grad for x in (x_TD, weights_TA, *weights.tensors))
    widest = max(weights.up_EFD.shape[1:])
    if differs or not 0 < len(order_R) * widest <= ROOM or not len(ends_E):
        return loop.routed(x_TD, order_R, ends_E, weights_TA, weights, activation)
    if weights.up_EFD[0].numel() <= SMALL and _most_have_rows(ends_E):
        run = batched.experts
    elif grouped.available and _plain(weights):
        run = _grouped
    else:
        return loop.routed(x_TD, order_R, ends_E, weights_TA, weights, activation)
    token_R, w_R1 = order_R // weights_TA.shape[1], weights_TA.flatten()[order_R].unsqueeze(1)
    y_RD = run(x_TD[token_R], ends_E, weights, activation)
    y_TD = x_TD.new_zeros(x_TD.shape, dtype=torch.promote_types(x_TD.dtype, weights_TA.dtype))
    return y_TD.index_add_(0, token_R, (y_RD * w_R1).to(y_TD.dtype)).to(x_TD.dtype)


def _most_have_rows(ends_E: Tensor) -> bool:
    sizes_E = ends_E.diff(prepend=ends_E.new_zeros(1))
    most, E = int(sizes_E.max()), len(ends_E)
    return 0 < most <= MOST and 2 * int(sizes_E.count_nonzero()) > E and most * E <= PADDED * int(ends_E[-1])


def _plain(weights: Weights) -> bool:
    """Whether a grouped product takes these as they are."""
    biased = any(bias is not None for bias in weights[3:])
    return not biased and all(n % ALIGNED == 0 for n in weights.up_EFD.shape[1:])


def _grouped(x_RD: Tensor, ends_E: Tensor, weights: Weights, activation: str) -> Tensor:
    """y_RD, as :func:`grouped.experts` without what that does for biases, odd sizes, gradients and waiting GPUs."""
    act, ends = ACTIVATIONS[activation], ends_E.to(torch.int32)
    h = grouped.product(x_RD, weights.up_EFD.transpose(1, 2), ends)
    h = act(h) if weights.gate_EFD is None else act(grouped.product(x_RD, weights.gate_EFD.transpose(1, 2), ends)) * h
    y_RD = grouped.product(h, weights.down_EFD, ends)
    y_RD[int(ends_E[-1]) :] = 0  # rows of no expert are whatever lay in memory
    return y_RD
