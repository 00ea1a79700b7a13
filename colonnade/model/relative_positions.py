"""Relative position biases (T5, arXiv 1910.10683, section 2.1): one table for all self-attention layers of a stack.

    score_ij = q_i·k_j + b[bucket(j − i)]

For d = |j − i| and n buckets per side: d itself below n/2, above it logarithmic up to ``distance``:

    bucket = d                                                                  d < n/2
             min(n − 1, n/2 + ⌊ln(d / (n/2)) / ln(distance / (n/2)) · n/2⌋)      otherwise

A decoder has all n buckets for earlier keys. An encoder has n/2 a side, the second half for later keys. Every key at
``distance`` or farther has the last bucket of its side, so a pass expands the table once to 2·distance + 1 rows, and
kernels add the row of clamp(j − i).
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from colonnade.config.encoder import RelativePositions
from colonnade.parallel.axis import Axes
from colonnade.parallel.layout import Placement


def bucket_of(offset: Tensor, buckets: int, distance: int, *, causal: bool) -> Tensor:
    """The bucket of each key at ``offset`` = key position − query position."""
    base = torch.zeros_like(offset)
    if causal:
        d = (-offset).clamp(min=0)
    else:
        buckets //= 2
        base = (offset > 0) * buckets
        d = offset.abs()
    exact = buckets // 2
    # float32, as in the authors' code: the bucket of a distance on a boundary depends on the rounding.
    far = (d.clamp(min=1).float() / exact).log() / math.log(distance / exact) * (buckets - exact)
    return base + torch.where(d < exact, d, (exact + far.long()).clamp(max=buckets - 1))


class RelativeBias(nn.Module):
    """The table of one stack, (buckets, heads), sharded over tp by heads."""

    def __init__(
        self,
        positions: RelativePositions,
        heads: int,
        axes: Axes,
        *,
        causal: bool,
        device: torch.device,
        dtype: torch.dtype,
    ):
        super().__init__()
        self.positions, self.causal = positions, causal
        start, stop = axes.tp.part(heads)
        self.weight = nn.Parameter(torch.empty(positions.buckets, stop - start, device=device, dtype=dtype))
        self.layout: dict[str, Placement] = {"weight": 1}

    def expand(self) -> Tensor:
        """near_Rn: the bias of each offset from −distance to distance, R = 2·distance + 1."""
        return F.embedding(self._buckets(), self.weight)

    def _buckets(self) -> Tensor:
        limit = self.positions.distance
        offset = torch.arange(-limit, limit + 1, device=self.weight.device)
        return bucket_of(offset, self.positions.buckets, limit, causal=self.causal)
