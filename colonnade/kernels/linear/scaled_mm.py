"""A Bᵀ of two float8 matrices on the float8 tensor cores of a GPU (Ada, Hopper and later).

The only file that names torch's private ``_scaled_mm``. It needs a row-major first and a column-major second operand,
which A and Bᵀ are when A and B are both row-major, and every dimension but M must be a multiple of 16.

``use_fast_accum`` keeps partial sums in the tensor core, with about 14 bits (DeepSeek-V3, arXiv 2412.19437, section
3.3.2). It is on for forward GEMMs, and for all GEMMs with row-wise scales, whose kernel is fast only with it (as in
torchao's recipes).
"""

import torch
from torch import Tensor
from torch.nn import functional as F

SIZE_MULTIPLE = 16


def scaled_product(a_MK: Tensor, b_NK: Tensor, a_scale: Tensor, b_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """c_MN (see :func:`reference.scaled_product`)."""
    row_wise, forward = a_scale.dim() == 2, a_MK.dtype == b_NK.dtype
    if missing := -a_MK.shape[1] % SIZE_MULTIPLE:
        # The summed dimension of a weight gradient is the number of tokens; padding it with zeros adds nothing.
        a_MK, b_NK = (F.pad(x.view(torch.uint8), (0, missing)).view(x.dtype) for x in (a_MK, b_NK))
    return torch._scaled_mm(
        a_MK.contiguous(),
        b_NK.contiguous().T,
        scale_a=a_scale,
        scale_b=b_scale.T if row_wise else b_scale,
        out_dtype=dtype,
        use_fast_accum=row_wise or forward,
    )
