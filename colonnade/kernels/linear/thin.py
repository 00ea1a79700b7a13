"""y = x Wᵀ + b for a few rows on a CPU: decoding, where reading W once is all that a product should cost.

torch hands x Wᵀ to MKL as it stands, and for a few rows MKL computes it on one core, and far below what even that one
reads from memory. The same product in other words is fast (float32, two cores of an EPYC 9004, W 1536 × 576, not in
any cache; GB/s of W, where the cores read 60 to 70):

    rows of x                      1      2      4      8     16     32
    x Wᵀ                          13      7      9      9      7      5
    (W xᵀ)ᵀ                       33     33     24     15     10      7
    x Wᵀ, W in 16 blocks          27     20     20     17     12      7

The second line needs x to stay in the nearest cache, and at least two rows (a single one would go to MKL's
matrix-vector product, which is the slow one, so x is taken twice). The third, one batched product over blocks of W's
rows, needs neither. From some 32 rows on arithmetic decides, and torch's way does as well. docs/log.md, "CPU decode",
has the other shapes, and what failed.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

FEW_ROWS = 32
"""With more rows than this, x Wᵀ is left as it is."""
NEAR_BYTES = 1 << 14
"""Half of a first-level cache: what x may take for the second line."""
BLOCKS = 16
"""At least one for each core of a small machine, and large ones all the same."""


def linear(x_TD: Tensor, weight_FD: Tensor, bias_F: Tensor | None = None) -> Tensor:
    """y_TF (see :func:`reference.linear`)."""
    T = len(x_TD)
    if x_TD.dim() != 2 or T > FEW_ROWS:
        return F.linear(x_TD, weight_FD, bias_F)
    near = max(T, 2) * x_TD.shape[1] * x_TD.element_size() <= NEAR_BYTES
    if near or len(weight_FD) % BLOCKS:
        twice_TD = torch.cat((x_TD, x_TD)) if T == 1 else x_TD
        y_TF = (weight_FD @ twice_TD.T).T[:T].contiguous()
    else:
        blocks = weight_FD.unflatten(0, (BLOCKS, -1)).transpose(1, 2)
        y_TF = torch.bmm(x_TD.expand(BLOCKS, -1, -1), blocks).transpose(0, 1).flatten(1)
    return y_TF if bias_F is None else y_TF + bias_F
