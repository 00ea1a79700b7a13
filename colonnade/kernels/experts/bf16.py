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
from colonnade.kernels.experts.reference import Weights
from colonnade.kernels.permute import reference as permute

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
        run = grouped.experts
    else:
        return loop.routed(x_TD, order_R, ends_E, weights_TA, weights, activation)
    x_RD = permute.gather(x_TD, order_R, weights_TA.shape[1])
    return permute.combine(run(x_RD, ends_E, weights, activation), order_R, weights_TA)


def _most_have_rows(ends_E: Tensor) -> bool:
    sizes_E = ends_E.diff(prepend=ends_E.new_zeros(1))
    most, E = int(sizes_E.max()), len(ends_E)
    return 0 < most <= MOST and 2 * int(sizes_E.count_nonzero()) > E and most * E <= PADDED * int(ends_E[-1])


def _plain(weights: Weights) -> bool:
    """Whether a grouped product takes these as they are, with nothing to be filled up."""
    biased = any(bias is not None for bias in weights[3:])
    return not biased and all(n % ALIGNED == 0 for n in weights.up_EFD.shape[1:])
