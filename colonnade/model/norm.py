"""Normalisation: LayerNorm (Ba 2016) and RMSNorm (Zhang & Sennrich 2019, arXiv 1910.07467)."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from colonnade.config import ModelConfig
from colonnade.parallel.layout import WHOLE, Placement


class Norm(nn.Module):
    """RMSNorm: x / √(mean(x²) + ε) · w. LayerNorm: (x − mean) / √(var + ε) · w + b."""

    def __init__(
        self, config: ModelConfig, width: int, *, device: torch.device, dtype: torch.dtype, placement: Placement = WHOLE
    ):
        super().__init__()
        self.eps, self.width = config.norm_eps, (width,)
        self.weight = nn.Parameter(torch.empty(width, device=device, dtype=dtype))
        layer = config.norm == "layernorm"
        self.bias = nn.Parameter(torch.empty(width, device=device, dtype=dtype)) if layer else None
        self.layout: dict[str, Placement] = {"weight": placement} | ({"bias": placement} if layer else {})

    def forward(self, x: Tensor) -> Tensor:
        """(…, width) to the same shape; the mean is taken in at least float32."""
        if self.bias is None:
            return F.rms_norm(x, self.width, self.weight, self.eps)
        return F.layer_norm(x, self.width, self.weight, self.bias, self.eps)
