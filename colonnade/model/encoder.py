"""The encoder of an encoder–decoder model: its own blocks and norm, on sources instead of targets."""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from colonnade.config import ModelConfig
from colonnade.model.dropout import Dropout
from colonnade.model.moe.routing_context import Routing
from colonnade.parallel.axis import Axes
from colonnade.parallel.layout import Placement, residual_placement


class Source(NamedTuple):
    """S tokens of all sources of a pass, concatenated, or the spectrograms of audio."""

    tokens_S: Tensor
    """int64 token ids. For audio float (sources, mel bands, frames), all of one length."""
    positions_S: Tensor
    """int64 position of each token, or of each two frames, within its own source."""
    dropout: Dropout | None = None
    """Dropout of a training step; None: no dropout."""
    routing: Routing | None = None
    """Routing of a mixture of experts in training; None: inference. Reports are recorded after the decoder's blocks."""


class AudioFrontEnd(nn.Module):
    """Log-mel spectrograms to vectors: two convolutions with GELU, the second of stride 2, and positions.

    Radford et al., arXiv 2212.04356, section 2.2. Every rank computes it whole, then takes its rows.
    """

    def __init__(self, config: ModelConfig, axes: Axes, *, device: torch.device, dtype: torch.dtype):
        super().__init__()
        assert config.encoder is not None, "a front end belongs to an encoder"
        on = {"device": device, "dtype": dtype}
        self.conv1 = nn.Conv1d(config.encoder.mels, config.width, 3, padding=1, **on)
        self.conv2 = nn.Conv1d(config.width, config.width, 3, stride=2, padding=1, **on)
        self.positions = nn.Parameter(torch.empty(config.encoder.context, config.width, **on))
        self.layout: dict[str, Placement] = dict.fromkeys(
            (name for name, _ in self.named_parameters()), residual_placement(axes)
        )

    def forward(self, source: Source) -> Tensor:
        """x_SD."""
        x_BDS = F.gelu(self.conv2(F.gelu(self.conv1(source.tokens_S.to(self.positions.dtype)))))
        x_SD = x_BDS.transpose(1, 2).flatten(0, 1).contiguous()  # else the residual stream stays transposed to the end
        return x_SD + F.embedding(source.positions_S, self.positions)
