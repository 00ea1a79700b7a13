"""The loss of reward tuning: a clipped policy gradient over tokens that another set of weights, or engine, sampled.

    ρ_t = min(exp(π_t − old_t), cap)                     π, old: log-probabilities of the sampled token
    loss = −Σ_t w_t · min(ρ_t A_t, clip(ρ_t, 1 − low, 1 + high) A_t)

(PPO, Schulman 2017, arXiv 1707.06347; the wider upper clip is DAPO's, Yu 2025, arXiv 2503.14476.) ``old`` is what the
engine reported when it sampled. Where engine and trainer round differently, ρ corrects for it, and its cap bounds the
variance (truncated importance sampling). The weights w and the divisor make the mean over tokens or over sequences.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from colonnade.model.loss import IGNORE
from colonnade.model.output_heads import OutputProjection
from colonnade.model.preference_loss import logp_with_gradient


@dataclass(frozen=True)
class PolicyClip:
    """Bounds of ρ."""

    low: float = 0.2
    high: float = 0.28
    cap: float = 2.0


@dataclass(frozen=True)
class PolicyLoss:
    """A model head: the summed loss of the targets, and their number."""

    targets_R: Tensor
    advantages_R: Tensor
    """w · A of each target."""
    old_R: Tensor
    """Log-probability of each target when it was sampled."""
    rows_R: Tensor | None = None
    clip: PolicyClip = PolicyClip()
    observed: list[Tensor] | None = None
    """Output: (Σ (e^d − 1 − d), max |d|, targets) with d = π − old, before any cap; None: not wanted."""

    def __call__(self, x_tD: Tensor, T: int, output: OutputProjection) -> tuple[Tensor, Tensor]:
        """(sum of the losses, number of targets), the same on all tp ranks."""
        logp_R = logp_with_gradient(x_tD, T, self.rows_R, self.targets_R, output)
        valid_R = self.targets_R != IGNORE
        if self.observed is not None and len(logp_R):
            d_R = torch.where(valid_R, logp_R.detach() - self.old_R, 0.0)
            k3_R = d_R.expm1() - d_R
            self.observed.append(torch.stack((k3_R.sum(), d_R.abs().max(), valid_R.sum().to(d_R))))
        loss_R = policy_loss(logp_R, self.old_R.to(logp_R.dtype), self.advantages_R.to(logp_R.dtype), self.clip)
        return torch.where(valid_R, loss_R, 0.0).sum(), valid_R.sum()


def policy_loss(logp_R: Tensor, old_R: Tensor, advantages_R: Tensor, clip: PolicyClip) -> Tensor:
    """The loss of each token."""
    ratio_R = (logp_R - old_R).exp().clamp(max=clip.cap)
    clipped_R = ratio_R.clamp(1 - clip.low, 1 + clip.high)
    return -torch.minimum(ratio_R * advantages_R, clipped_R * advantages_R)
