"""A Bᵀ of two float8 matrices on the float8 matrix units of a GPU (Ada, Hopper and later).

The one file that names torch's private ``_scaled_mm``. It wants a row-major first and a column-major second operand,
which A and Bᵀ are when both A and B lie row by row, and every dimension but M in multiples of 16. Sums within a
product are kept in the unit's own registers (``use_fast_accum``: about 14 bits of them, DeepSeek-V3, arXiv 2412.19437,
section 3.3.2) where that is enough: in a forward product, and with a scale a row, whose kernel loses much of its speed
otherwise.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

MULTIPLE = 16


def product(a_MK: Tensor, b_NK: Tensor, a_scale: Tensor, b_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """c_MN (see :func:`scaled.product`)."""
    missing = -a_MK.shape[1] % MULTIPLE
    if missing:  # a number of tokens, in the gradient of a weight; zeros add nothing to a sum over them
        a_MK, b_NK = F.pad(a_MK.view(torch.uint8), (0, missing)), F.pad(b_NK.view(torch.uint8), (0, missing))
    row_wise = a_scale.dim() == 2
    forward = a_MK.dtype == b_NK.dtype
    return torch._scaled_mm(
        a_MK.contiguous(),
        b_NK.contiguous().T,
        scale_a=a_scale,
        scale_b=b_scale.T if row_wise else b_scale,
        out_dtype=dtype,
        use_fast_accum=row_wise or forward,
    )
