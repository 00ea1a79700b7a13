"""The loss of reward tuning: a clipped policy gradient over tokens that another set of weights, or engine, sampled.

    ρ_t = min(exp(π_t − old_t), cap)                     π, old: log-probabilities of the sampled token
    loss = Σ_t w_t · (−min(ρ_t A_t, clip(ρ_t, 1 − low, 1 + high) A_t) + kl · (exp(d_t) − 1 − d_t)),   d = ref − π

(PPO, Schulman 2017, arXiv 1707.06347; the wider upper clip is DAPO's, Yu 2025, arXiv 2503.14476; the estimate of the
divergence from a reference model is GRPO's, Shao 2024, arXiv 2402.03300.) ``old`` is what the engine reported when it
sampled. Where engine and trainer round differently, ρ corrects for it. Beyond its cap ρ is constant, so the token
has no gradient; this bounds the loss of a token with a negative advantage (as in dual-clip PPO, Ye 2020, arXiv
1912.09729). The weights w and the divisor make the mean over tokens or over sequences. All log-probabilities
are those of the distribution that was sampled from: logits divided by the temperature.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from colonnade.model.exact_forward import exact_logprobs, replace_value
from colonnade.model.loss import IGNORE
from colonnade.model.output_heads import OutputProjection
from colonnade.model.preference_loss import logp_with_gradient


@dataclass(frozen=True)
class PolicySettings:
    """Bounds of ρ, the weight of the divergence from the reference model, and the sampling temperature."""

    low: float = 0.2
    high: float = 0.28
    cap: float = 2.0
    kl: float = 0.0
    temperature: float = 1.0
    exact: str = ""
    """The kernels that the values of log-probabilities are taken from, those of the batch-invariant engine
    (:func:`colonnade.model.exact_forward.make_exact`); empty: ordinary ones."""


@dataclass(frozen=True)
class PolicyLoss:
    """A model head: the summed loss of the targets, and their number."""

    targets_R: Tensor
    policy_4R: Tensor
    """Of each target its weight w, its advantage A, and its log-probability when it was sampled and under the
    reference model.
    """
    rows_R: Tensor | None = None
    settings: PolicySettings = PolicySettings()
    observed: list[Tensor] | None = None
    """Output: (Σ (e^d − 1 − d), max |d|, targets, Σ divergence) with d = π − old, before any cap; None: not wanted."""

    def logprobs(self, x_tD: Tensor, T: int, output: OutputProjection) -> Tensor:
        """π_R: a separate head."""
        inputs = x_tD, T, self.rows_R, self.targets_R, output, self.settings.temperature
        logp_R = logp_with_gradient(*inputs)
        kernels = self.settings.exact
        return replace_value(logp_R, exact_logprobs(*inputs, kernels)) if kernels else logp_R

    def __call__(self, x_tD: Tensor, T: int, output: OutputProjection) -> tuple[Tensor, Tensor]:
        """(sum of the losses, number of targets), the same on all tp ranks."""
        logp_R = self.logprobs(x_tD, T, output)
        weight_R, advantage_R, old_R, reference_R = self.policy_4R.to(logp_R.dtype)
        valid_R = self.targets_R != IGNORE
        loss_R = policy_loss(logp_R, old_R, advantage_R, self.settings)
        k3_R = divergence(logp_R, reference_R)
        if self.settings.kl:
            loss_R = loss_R + self.settings.kl * k3_R
        if self.observed is not None and len(logp_R):
            d_R = torch.where(valid_R, logp_R.detach() - old_R, 0.0)
            kl_R = torch.where(valid_R, k3_R.detach(), 0.0)
            count = valid_R.sum().to(d_R)
            self.observed.append(torch.stack(((d_R.expm1() - d_R).sum(), d_R.abs().max(), count, kl_R.sum())))
        return torch.where(valid_R, weight_R * loss_R, 0.0).sum(), valid_R.sum()


def policy_loss(logp_R: Tensor, old_R: Tensor, advantages_R: Tensor, settings: PolicySettings) -> Tensor:
    """The loss of each token, without the divergence."""
    ratio_R = (logp_R - old_R).exp().clamp(max=settings.cap)
    clipped_R = ratio_R.clamp(1 - settings.low, 1 + settings.high)
    return -torch.minimum(ratio_R * advantages_R, clipped_R * advantages_R)


def divergence(logp_R: Tensor, reference_R: Tensor) -> Tensor:
    """An estimate of KL(π ‖ ref) for each token, never negative (k3, Schulman 2020)."""
    d_R = reference_R - logp_R
    return d_R.expm1() - d_R
