"""Each expert's rows times its weights in float8 on the matrix units of a Hopper GPU.

The one file that names torch's private ``_scaled_grouped_mm``. It wants e4m3 on both sides, rows that lie one after
another and weights whose summed dimension does, each a multiple of 16 long; a float32 scale a row and one a column of
each expert; int32 ends; and writes bfloat16. An expert may have any number of rows, also none; rows past the last end
stay as they were in memory. Nothing waits for the device.

``use_fast_accum`` as for dense products with a scale a row (:mod:`colonnade.kernels.linear.scaled_mm`).
"""

import torch
from torch import Tensor

CAPABILITY = (9, 0)
"""The only one for which torch has this kernel."""
available = hasattr(torch, "_scaled_grouped_mm")


def product(
    a_RK: Tensor, b_ENK: Tensor, a_scale: Tensor, b_scale: Tensor, ends_E: Tensor, dtype: torch.dtype
) -> Tensor:
    """c_RN (see :func:`scaled_grouped.product`)."""
    return torch._scaled_grouped_mm(
        a_RK.contiguous(),
        b_ENK.contiguous().transpose(1, 2),
        a_scale.flatten(),
        b_scale.flatten(1),
        offs=ends_E,
        out_dtype=dtype,
        use_fast_accum=True,
    )
