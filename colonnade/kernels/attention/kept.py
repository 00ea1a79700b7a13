"""Keys and values as a cache keeps them: in its own type, which may be float8.

    k₈ = round(clamp(k, ±448))        e4m3: three bits of mantissa, from 448 down to 2⁻⁶ and, with fewer bits, to 2⁻⁹

No scales: keys and values that a model was trained to have are far below 448, and a scale that was not measured first
would only move the range about. What is larger is cut off there; what is not a number stays none, so that a broken
request can be told. Latents have scales (:mod:`latents`), since one vector of theirs stands for all heads.
"""

import torch
from torch import Tensor

MOST = 448.0
"""The largest number of e4m3."""


def as_kept(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x`` in a cache's type."""
    # Not every torch saturates in the cast.
    return x.clamp(-MOST, MOST).to(dtype) if dtype == torch.float8_e4m3fn else x.to(dtype)


def write(pool_PpKH: Tensor, slots_T: Tensor, x_TKH: Tensor) -> None:
    """Keep tokens in these slots (page · page_tokens + offset) of a cache."""
    pool, x = pool_PpKH.flatten(0, 1), as_kept(x_TKH, pool_PpKH.dtype)
    if pool.element_size() == 1:  # not every torch moves numbers of 8 bits that are no integers
        pool, x = pool.view(torch.uint8), x.contiguous().view(torch.uint8)
    pool.index_copy_(0, slots_T, x)


def read(pool_PpKH: Tensor, slots_S: Tensor, dtype: torch.dtype) -> Tensor:
    """x_SKH of what is in these slots, in ``dtype``."""
    pool = pool_PpKH.flatten(0, 1)
    if pool.element_size() == 1:
        return pool.view(torch.uint8).index_select(0, slots_S).view(pool.dtype).to(dtype)
    return pool.index_select(0, slots_S).to(dtype)
