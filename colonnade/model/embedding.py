"""The token stream, a model's only input, and the vocabulary-parallel embedding.

    x = Σ_ranks (W_rank[token − start] if this rank has the row, else 0)

Each rank has some rows of the embedding (Megatron-LM, arXiv 1909.08053, section 3). The vocabulary may have any size:
shares are uneven rather than padded, so that a checkpoint does not depend on the plan. Learned positions and segments,
if the model has them, are added after the sum, and BERT normalises the result (Devlin 2019, arXiv 1810.04805, section
3).
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from colonnade.config import ModelConfig
from colonnade.kernels.linear.quantise import Quantised
from colonnade.kernels.registry import choose
from colonnade.model.dropout import Dropout
from colonnade.model.encoder import Source
from colonnade.model.moe.routing_context import Routing
from colonnade.model.norm import Norm
from colonnade.model.tensor_parallel_linear import QuantisableMatrix
from colonnade.parallel.axis import Axes
from colonnade.parallel.layout import Placement, residual_placement


class Stream(NamedTuple):
    """T tokens of all sequences, concatenated: no padding, no batch dimension.

    The ``attend`` of the forward pass defines which tokens belong to one sequence (:mod:`~colonnade.model.attend`).
    """

    tokens_T: Tensor
    """int64 token ids."""
    positions_T: Tensor
    """int64 position of each token within its own sequence."""
    segments_T: Tensor | None = None
    """int64 segment of each token, for a model with segment embeddings; None: segment 0."""
    dropout: Dropout | None = None
    """Dropout and other random numbers of a training step; None: no dropout."""
    routing: Routing | None = None
    """Routing of a mixture of experts; None: inference."""
    source: Source | None = None
    """The input of the encoder of an encoder–decoder model in this pass; None: nothing new."""


FIRST_POSITION = 2
"""Of sinusoidal positions: NLLB numbers the padding token's position 1."""


def sinusoids(positions_T: Tensor, width: int) -> Tensor:
    """float32 (T, width): sin | cos of p · 10000^(−i / (width/2 − 1)), as in Whisper and NLLB."""
    half = width // 2
    i = torch.arange(half, device=positions_T.device)
    angles = positions_T[:, None] * torch.exp(-math.log(10000.0) / (half - 1) * i)
    return torch.cat([angles.sin(), angles.cos()], 1)


class _Table(QuantisableMatrix):
    """An embedding table; quantised only if it is the output projection too."""

    never_quantise = True

    def __init__(self, rows: int, width: int, device: torch.device, dtype: torch.dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, width, device=device, dtype=dtype))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of looked-up rows."""
        return self.weight.dtype if self.quantised is None else self.dequantised_dtype


class Embedding(nn.Module):
    """Token ids, positions and segments to the residual stream."""

    kernels = "auto"
    """The implementation of the look-up of tokens (:mod:`~colonnade.kernels.registry`)."""

    def __init__(
        self, config: ModelConfig, axes: Axes, *, positions: bool = True, device: torch.device, dtype: torch.dtype
    ):
        """``positions`` False: token embeddings only, for tied weights on a pipeline's last stage."""
        super().__init__()
        self.axes, self.vocab_size = axes, config.vocab_size
        self.start, stop = axes.tp.part(config.vocab_size)
        self.tokens = _Table(stop - self.start, config.width, device, dtype)
        self.layout: dict[str, Placement] = {"tokens.weight": 0}
        self.factor = config.width**0.5 if config.scale_embedding else 1.0
        self.sinusoidal = config.positions == "sinusoidal"
        self.positions = None
        if positions and config.positions == "learned":
            self.positions = _Table(config.context, config.width, device, dtype)
            self.layout["positions.weight"] = residual_placement(axes)
        self.segments = self.norm = None
        if positions and config.segments:
            self.segments = _Table(config.segments, config.width, device, dtype)
            self.layout["segments.weight"] = residual_placement(axes)
        if positions and config.embed_norm:
            self.norm = Norm(config, config.width, device=device, dtype=dtype, placement=residual_placement(axes))

    def forward(self, stream: Stream) -> Tensor:
        """x_tD."""
        x_tD = self._positioned(stream.tokens_T, stream.positions_T)
        mine = self.axes.rows(len(stream.tokens_T))
        if self.positions is not None:
            run = choose("embedding", x_tD.device.type, x_tD.dtype, self.kernels)
            x_tD = run(stream.positions_T[mine], self.positions.weight, x_tD.dtype, residual_TD=x_tD)
        if self.segments is not None:
            table, segments_T = self.segments.weight, stream.segments_T
            x_tD = x_tD + (table[0] if segments_T is None else F.embedding(segments_T[mine], table))
        return x_tD if self.norm is None else self.norm(x_tD)

    def of_source(self, tokens_S: Tensor, positions_S: Tensor) -> Tensor:
        """x_sD of an encoder's tokens."""
        return self._positioned(tokens_S, positions_S)

    def _positioned(self, tokens_T: Tensor, positions_T: Tensor) -> Tensor:
        """This rank's rows, with sinusoidal positions if the model has them."""
        x_tD = self._rows(tokens_T)
        if self.factor != 1.0:
            x_tD = x_tD * self.factor
        if self.sinusoidal:
            mine = self.axes.rows(len(tokens_T))
            x_tD = x_tD + sinusoids(positions_T[mine] + FIRST_POSITION, x_tD.shape[1]).to(x_tD.dtype)
        return x_tD

    def _rows(self, tokens_T: Tensor) -> Tensor:
        table = self.tokens.matrix
        v, dtype = len(table.values if isinstance(table, Quantised) else table), self.tokens.dtype
        run = choose("embedding", tokens_T.device.type, dtype, self.kernels)
        if v == self.vocab_size:
            return run(tokens_T, table, dtype)
        local_T = tokens_T - self.start
        here_T = (local_T >= 0) & (local_T < v)
        x_TD = run(torch.where(here_T, local_T, 0), table, dtype)
        return self.axes.leave_tp_region(x_TD * here_T[:, None])
