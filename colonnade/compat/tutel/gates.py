"""The gates that ``gate_type`` names: modules that give each of E experts a score.

top         x Wgᵀ
cosine_top  normalize(Wp x + b) · normalize(Sim) · exp(min(τ, ln 100))      (Chi 2022, arXiv 2204.09179)
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from colonnade.config.base import nearest
from colonnade.errors import ConfigError

COMMON = ("capacity_factor", "gate_noise")
"""Options that the layer reads, not the gate."""


def _check(options: dict[str, Any], known: tuple[str, ...]) -> None:
    for name in options:
        if name not in COMMON:
            raise ConfigError(f"a gate has no option '{name}'" + nearest(name, sorted((*COMMON, *known))))


class LinearTopKGate(nn.Module):
    """One product; in float32 with ``fp32_gate``."""

    def __init__(self, model_dim: int, num_global_experts: int, k: int = 1, fp32_gate: bool = False, **options: Any):
        super().__init__()
        _check(options, ("k", "fp32_gate"))
        self.wg = nn.Linear(model_dim, num_global_experts, bias=False, dtype=torch.float32 if fp32_gate else None)
        self.top_k, self.fp32_gate = min(num_global_experts, int(k)), fp32_gate

    def forward(self, x_TD: Tensor) -> Tensor:
        """logits_TE, in float32 or the weight's type."""
        weight = self.wg.weight.float() if self.fp32_gate else self.wg.weight
        return F.linear(x_TD.to(weight.dtype), weight)


class CosineTopKGate(nn.Module):
    """Directions compared at a learned temperature, which starts at ``init_t``."""

    def __init__(
        self,
        model_dim: int,
        num_global_experts: int,
        k: int = 1,
        fp32_gate: bool = False,
        proj_dim: int = 256,
        init_t: float = 0.5,
        **options: Any,
    ):
        super().__init__()
        _check(options, ("k", "fp32_gate", "proj_dim", "init_t"))
        self.top_k, self.fp32_gate = min(num_global_experts, int(k)), fp32_gate
        self.temperature = nn.Parameter(torch.full([1], 1.0 / init_t).log())
        self.cosine_projector = nn.Linear(model_dim, proj_dim)
        # Drawn twice, so that a seed gives the values, here and in what is drawn next, that it gives in Tutel.
        self.sim_matrix = nn.Parameter(torch.randn(proj_dim, num_global_experts))
        nn.init.normal_(self.sim_matrix, 0, 0.01)

    def forward(self, x_TD: Tensor) -> Tensor:
        """logits_TE, in float32 or the weights' type."""
        weight, bias, sim = self.cosine_projector.weight, self.cosine_projector.bias, self.sim_matrix
        if self.fp32_gate:
            weight, bias, sim = weight.float(), bias.float(), sim.float()
        direction_TP = F.normalize(F.linear(x_TD.to(weight.dtype), weight, bias), dim=1)
        return direction_TP @ F.normalize(sim, dim=0) * self.temperature.clamp(max=math.log(100)).exp()


GATES = {"top": LinearTopKGate, "cosine_top": CosineTopKGate}
