"""The vocabulary-parallel embedding: each rank holds some rows, looks up what it has and adds the rest.

    x = Σ_ranks (W_rank[token − start] where this rank holds the row, else 0)

(Megatron-LM, arXiv 1909.08053, section 3.) The vocabulary may have any size: shares are uneven rather than padded, so
that a checkpoint does not depend on the plan. Learned positions, where a family has them, are added after the sum.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from colonnade.config import ModelConfig
from colonnade.model.stream import Stream
from colonnade.parallel.axis import Axes
from colonnade.parallel.layout import Placement, on_rows


class _Table(nn.Module):
    """Rows to look up."""

    def __init__(self, rows: int, width: int, device: torch.device, dtype: torch.dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, width, device=device, dtype=dtype))


class Embedding(nn.Module):
    """Token ids (and positions) to the residual stream."""

    def __init__(
        self, config: ModelConfig, axes: Axes, *, positions: bool = True, device: torch.device, dtype: torch.dtype
    ):
        """``positions`` False leaves their table out: the far end of a pipeline needs the tied tokens only."""
        super().__init__()
        self.axes, self.vocab_size = axes, config.vocab_size
        self.start, stop = axes.tp.part(config.vocab_size)
        self.tokens = _Table(stop - self.start, config.width, device, dtype)
        self.layout: dict[str, Placement] = {"tokens.weight": 0}
        self.positions = None
        if positions and config.positions == "learned":
            self.positions = _Table(config.context, config.width, device, dtype)
            self.layout["positions.weight"] = on_rows(axes)

    def forward(self, stream: Stream) -> Tensor:
        """x_tD."""
        x_tD = self._rows(stream.tokens_T)
        if self.positions is not None:
            mine = self.axes.rows(len(stream.tokens_T))
            x_tD = x_tD + F.embedding(stream.positions_T[mine], self.positions.weight)
        return x_tD

    def _rows(self, tokens_T: Tensor) -> Tensor:
        weight_vD = self.tokens.weight
        v = weight_vD.shape[0]
        if v == self.vocab_size:
            return F.embedding(tokens_T, weight_vD)
        local_T = tokens_T - self.start
        here_T = (local_T >= 0) & (local_T < v)
        x_TD = F.embedding(torch.where(here_T, local_T, 0), weight_vD)
        return self.axes.leave(x_TD * here_T[:, None])
