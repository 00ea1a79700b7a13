"""Sampling of a few rows on one thread of a CPU, with the bits of :mod:`colonnade.serve.sampler`.

A decode step of a small model takes a few milliseconds. For 32 rows of 2,048 tokens torch spent 2.5 ms on about 200
calls, many of which wake all threads; NumPy computes the same in 0.7 ms, with torch's logarithms.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from colonnade.kernels.dropout import LOW, column_hash
from colonnade.kernels.sampling import by_row_


def sample_few(
    logits_RV: Tensor,
    temperatures: Sequence[float],
    seeds: Sequence[int],
    indices: Sequence[int],
    none: int,
    *,
    rowwise: bool = False,
) -> Tensor:
    """tokens_R of rows without filters, int64; ``none`` where the row's maximum is not finite.

    ``rowwise``: no rounding depends on another row.
    """
    exact = torch.float64 if logits_RV.dtype == torch.float64 else torch.float32
    x_RV: np.ndarray[Any, Any] = logits_RV.to(exact).numpy()
    top_R = x_RV.max(1)
    finite_R = np.isfinite(top_R)
    score_RV = x_RV - np.where(finite_R, top_R, 0)[:, None]
    if any(temperature != 1.0 for temperature in temperatures):
        temperature_R = torch.tensor(temperatures, dtype=exact)
        with np.errstate(invalid="ignore"):  # -inf / inf
            score_RV /= temperature_R.numpy()[:, None]
    seed_R = np.array(seeds, np.int64)
    noise_R = _lowbias32_((seed_R & LOW).astype(np.uint32))
    noise_R = _lowbias32_(noise_R ^ (seed_R >> 32 & LOW).astype(np.uint32))
    noise_R = _lowbias32_(noise_R ^ (np.array(indices, np.int64) & LOW).astype(np.uint32))
    u_RV = _lowbias32_(noise_R[:, None] ^ _column_hashes(x_RV.shape[1])).view(np.int32).astype(np.float64)
    u_RV += 2.0**31 + 0.5
    u_RV *= 2.0**-32
    by_row = by_row_ if rowwise else lambda function, x: function(x)
    by_row(torch.log_, torch.from_numpy(u_RV))
    noise_RV = np.negative(u_RV, out=u_RV).astype(score_RV.dtype, copy=False)
    by_row(torch.log_, torch.from_numpy(noise_RV))
    score_RV -= noise_RV
    return torch.from_numpy(np.where(finite_R, score_RV.argmax(1), none))


def _lowbias32_(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """:func:`colonnade.kernels.dropout.lowbias32` of uint32 in place."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x ^= x >> np.uint32(shift)
        x *= np.uint32(factor)
    x ^= x >> np.uint32(16)
    return x


@lru_cache(maxsize=8)
def _column_hashes(V: int) -> np.ndarray[Any, Any]:
    """The hashes of tokens 0 to V - 1, uint32."""
    return column_hash(0, torch.arange(V)).numpy().view(np.uint32)
