"""Dynamic loss scaling for float16: avoids underflow of small gradients, backs off after an overflow.

    loss' = s · loss        g = g' / s        s ← s / 2 after an overflow,  2 s after N steps without one

float16 has nothing between 0 and 6·10⁻⁸, where many activation gradients lie; multiplying the loss by s shifts all of
them up by that factor (Micikevicius 2018, arXiv 1710.03740, section 3.2; the dynamic rule follows its section 5 and
Megatron-LM, arXiv 1909.08053, section 4.2). An overflow shows in the global gradient norm, which every rank has anyway:
no collective is added, all ranks make the same decision, and a step that overflowed updates nothing, neither weights
nor moments nor Adam's step count.

The host never reads the decision. The scale, the steps since it last changed and the number of skipped steps are
tensors on the device; the fused AdamW takes "skip" and "divide by s" as tensors too. Only checkpoints and metrics read
them. s is a power of two, so scaling rounds nothing in float32.
"""

import torch
from torch import Tensor

from colonnade.config import TrainConfig

MAX_SCALE = 2.0**32
"""Upper limit: without overflows (a batch without targets) the scale would grow to infinity."""
MIN_SCALE = 1.0
"""Below it gradients overflow even unscaled: the run has diverged."""


class LossScaler:
    """The loss scale and its update rule, identical on all ranks because all see the same norm."""

    def __init__(self, train: TrainConfig, device: torch.device):
        self.growth_interval = train.loss_scale_steps
        self.scale = torch.full((), train.loss_scale, dtype=torch.float32, device=device)
        """s of the next step."""
        self.good_steps = torch.zeros((), dtype=torch.int32, device=device)
        """Steps without an overflow since s last changed."""
        self.skipped = torch.zeros((), dtype=torch.int32, device=device)
        """Steps of the run that overflowed and were skipped."""
        self.used_scale = self.scale
        """s of the step last passed to :meth:`update`; its gradients are still multiplied by it."""

    def scaled_divisor(self, divisor: Tensor) -> Tensor:
        """``divisor`` / s: dividing the loss by it scales the loss by s."""
        return divisor / self.scale

    def update(self, scaled_norm: Tensor) -> Tensor:
        """Choose the next scale from the norm of the scaled gradients; returns the unscaled norm."""
        overflow = ~scaled_norm.isfinite()
        good_steps = self.good_steps + 1
        grow = good_steps == self.growth_interval
        grown = torch.where(grow, self.scale * 2, self.scale).clamp(max=MAX_SCALE)
        # New tensors, because the metrics of earlier steps still refer to the old ones.
        self.used_scale = self.scale
        self.scale = torch.where(overflow, self.scale / 2, grown)
        self.good_steps = torch.where(overflow | grow, 0, good_steps)
        self.skipped = self.skipped + overflow
        return scaled_norm / self.used_scale

    @property
    def state(self) -> tuple[float, int]:
        """(s, steps without an overflow) for a checkpoint; synchronises with the device."""
        return self.scale.item(), int(self.good_steps.item())

    def restore(self, state: tuple[float, int], skipped: int) -> None:
        """Restore a :attr:`state` from a checkpoint."""
        self.scale = torch.full_like(self.scale, state[0])
        self.good_steps = torch.full_like(self.good_steps, state[1])
        self.skipped = torch.full_like(self.skipped, skipped)
