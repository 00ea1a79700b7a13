"""Normalisation: LayerNorm (Ba 2016) and RMSNorm (Zhang & Sennrich 2019, arXiv 1910.07467)."""

import torch
from torch import Tensor, nn

from colonnade.config import ModelConfig
from colonnade.kernels.registry import choose
from colonnade.parallel.axis import Axis
from colonnade.parallel.layout import WHOLE, Placement


class Norm(nn.Module):
    """RMSNorm: x / √(mean(x²) + ε) · w. LayerNorm: (x − mean) / √(var + ε) · w + b."""

    kernels = "auto"
    """The implementation (:mod:`~colonnade.kernels.registry`)."""

    def __init__(
        self,
        config: ModelConfig,
        width: int,
        *,
        device: torch.device,
        dtype: torch.dtype,
        placement: Placement = WHOLE,
        eps: float | None = None,
    ):
        """``eps``: ε, if it is not the model's."""
        super().__init__()
        self.eps = config.norm_eps if eps is None else eps
        self.weight = nn.Parameter(torch.empty(width, device=device, dtype=dtype))
        layer = config.norm == "layernorm"
        self.bias = nn.Parameter(torch.empty(width, device=device, dtype=dtype)) if layer else None
        self.layout: dict[str, Placement] = {"weight": placement} | ({"bias": placement} if layer else {})

    def forward(self, x: Tensor) -> Tensor:
        """(…, width) to the same shape; the mean is computed in at least float32."""
        return choose("norm", x.device.type, x.dtype, self.kernels)(x, self.weight, self.bias, self.eps)


class HeadsNorm(nn.Module):
    """RMSNorm over all heads of a token; this rank has a share of them (OLMoE, arXiv 2409.02060)."""

    kernels = "auto"
    """The implementation on one rank."""

    def __init__(self, config: ModelConfig, heads: int, tp: Axis, *, device: torch.device, dtype: torch.dtype):
        """``heads``: the number over all ranks of ``tp``."""
        super().__init__()
        self.eps, self.tp, self.total_width = config.norm_eps, tp, heads * config.head_width
        self.weight = nn.Parameter(torch.empty(self.total_width // tp.size, device=device, dtype=dtype))
        self.layout: dict[str, Placement] = {"weight": 0}

    def forward(self, x_TnH: Tensor) -> Tensor:
        """(T, heads, width) to the same shape."""
        if self.tp.size == 1:
            run = choose("norm", x_TnH.device.type, x_TnH.dtype, self.kernels)
            return run(x_TnH.flatten(1), self.weight, None, self.eps).view_as(x_TnH)
        x_Tz = x_TnH.flatten(1).to(torch.promote_types(x_TnH.dtype, torch.float32))
        # Each rank scales its own heads by the replicated sum, so the sum's gradient is summed over ranks too.
        squares_T1 = self.tp.fan_out(self.tp.fan_in(x_Tz.square().sum(1, keepdim=True)))
        scaled_Tz = x_Tz * torch.rsqrt(squares_T1 / self.total_width + self.eps)
        return (scaled_Tz.to(x_TnH.dtype) * self.weight).view_as(x_TnH)
