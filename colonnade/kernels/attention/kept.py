"""Keys and values as a cache keeps them: in its own type, which may be float8.

    k₈ = round(clamp(k, ±448))        e4m3: three bits of mantissa, from 448 down to 2⁻⁶ and, with fewer bits, to 2⁻⁹

No scales: keys and values that a model was trained to have are far below 448, and a scale that was not measured first
would only move the range about. What is larger is cut off there; what is not a number stays none, so that a broken
request can be told. Latents have scales (:mod:`latents`), since one vector of theirs stands for all heads.
"""

import torch
from torch import Tensor

MOST = torch.finfo(torch.float8_e4m3fn).max
"""The largest number of e4m3."""


def as_kept(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x`` in a cache's type."""
    # Not every torch saturates in the cast.
    return x.clamp(-MOST, MOST).to(dtype) if dtype == torch.float8_e4m3fn else x.to(dtype)


def rows(x: Tensor, where: Tensor) -> Tensor:
    """x[where]; by bytes where a number has 8 bits, which not every torch moves otherwise."""
    if x.element_size() > 1:
        return x.index_select(0, where)
    return x.view(torch.uint8).index_select(0, where).view(x.dtype)


def put(x: Tensor, where: Tensor, new: Tensor) -> None:
    """x[where] = new, of one type; likewise."""
    if x.element_size() == 1:
        x, new = x.view(torch.uint8), new.contiguous().view(torch.uint8)
    x.index_copy_(0, where, new)


def write(pool_PpKH: Tensor, slots_T: Tensor, x_TKH: Tensor) -> None:
    """Keep tokens in these slots (page · page_tokens + offset) of a cache."""
    put(pool_PpKH.flatten(0, 1), slots_T, as_kept(x_TKH, pool_PpKH.dtype))


def read(pool_PpKH: Tensor, slots_S: Tensor, dtype: torch.dtype) -> Tensor:
    """x_SKH of what is in these slots, in ``dtype``."""
    return rows(pool_PpKH.flatten(0, 1), slots_S).to(dtype)
