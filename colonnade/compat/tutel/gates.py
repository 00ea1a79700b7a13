"""Tutel's built-in gates, which give each of E experts a score, and the balance losses.

top         x Wgᵀ
cosine_top  normalize(Wp x + b) · normalize(Sim) · exp(min(τ, ln 100))      (Chi 2022, arXiv 2204.09179)

The losses are over this rank's tokens: each rank's gate has the gradient of its own tokens, which the program sums over
ranks (GShard, arXiv 2006.16668, algorithm 1; Riquelme 2021, arXiv 2106.05974, appendix A).
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from colonnade.config.base import did_you_mean
from colonnade.errors import ConfigError

COMMON = ("capacity_factor", "gate_noise")
"""Options that the layer reads, not the gate."""


def _check(options: dict[str, Any], known: tuple[str, ...]) -> None:
    for name in options:
        if name not in COMMON:
            raise ConfigError(f"a gate has no option '{name}'" + did_you_mean(name, sorted((*COMMON, *known))))


class LinearTopKGate(nn.Module):
    """Linear gate; in float32 with ``fp32_gate``."""

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
    """Cosine gate with a learned temperature, initially ``init_t``."""

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
        # Drawn twice, so that a seed gives the same values as in Tutel, here and for later draws.
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


def gshard_loss(scores_TE: Tensor, ids_TA: Tensor) -> Tensor:
    """E/T² · Σ_e (Σ_t p_te)(Σ_t [top1 = e]): 1 when uniform; 0 without tokens."""
    T, E = scores_TE.shape
    top_E = F.one_hot(ids_TA[:, 0], E).sum(0).to(scores_TE.dtype)
    return (scores_TE.sum(0) * top_E).sum() * (E / max(T, 1) ** 2)


def load_importance_loss(
    logits_TE: Tensor, noisy_TA: Tensor, experts: int, gate_noise: float, load_loss_input: str = "probabilities"
) -> Tensor:
    """Half the sum of the squared coefficients of variation of importance and load.

    Importance is Σ_t p_te with p = softmax(logits), load Σ_t Φ((s_te − the token's last noisy logit ``noisy_TA`` that
    is kept) / σ) with σ = ``gate_noise`` / E; variances divide by E − 1. ``load_loss_input`` selects s: the
    probabilities p, as in Tutel, or the logits, as in the paper.
    """
    if gate_noise <= 0:
        raise ConfigError("is_gshard_loss=False computes the load under noise; set the gate's gate_noise above 0")
    logits_TE = logits_TE.to(torch.promote_types(logits_TE.dtype, torch.float32))
    probs_TE = logits_TE.softmax(1)
    compared_TE = logits_TE if load_loss_input == "logits" else probs_TE
    margin_TE = (compared_TE - noisy_TA[:, -1:]) * (experts / gate_noise)
    return (_variation(probs_TE.sum(0)) + _variation(torch.special.ndtr(margin_TE).sum(0))) / 2


def _variation(x_E: Tensor) -> Tensor:
    return x_E.var(correction=min(1, len(x_E) - 1)) / (x_E.mean().square() + 1e-10)
