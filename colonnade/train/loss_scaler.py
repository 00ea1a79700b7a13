"""The loss scale of float16: large enough that small gradients do not vanish, lowered when large ones overflow.

    loss' = s · loss        g = g' / s        s ← s / 2 after an overflow,  2 s after N steps without one

float16 has nothing between 0 and 6·10⁻⁸, where many gradients of activations lie; multiplying the loss by s moves all
of them up by as much (Micikevicius 2018, arXiv 1710.03740, section 3.2; the dynamic rule is that of its section 5 and
of Megatron-LM, arXiv 1909.08053, section 4.2). An overflow shows in the global gradient norm, which every rank has
anyway: no collective is added, all ranks decide alike, and a step that overflowed moves nothing, neither weights nor
moments nor Adam's own count.

The decision is never read by the program. The scale, the steps since it last changed and the number of skipped steps
are tensors on the device; the fused AdamW takes "skip" and "divide by s" as tensors too. Only a checkpoint and a line
of metrics read them. s is a power of two, so scaling rounds nothing in float32.
"""

import torch
from torch import Tensor

from colonnade.config import TrainConfig

MAX_SCALE = 2.0**32
"""A scale that nothing ever overflows (a batch without targets) stops here, long before it would be infinite."""
MIN_SCALE = 1.0
"""Below it gradients overflow unscaled: the run has diverged, and halving on would hide it."""


class LossScaler:
    """The scale and its rule; one for all ranks, because all see the same norm."""

    def __init__(self, train: TrainConfig, device: torch.device):
        self.every = train.loss_scale_steps
        self.scale = torch.full((), train.loss_scale, dtype=torch.float32, device=device)
        """s, of the next step."""
        self.good = torch.zeros((), dtype=torch.int32, device=device)
        """Steps without an overflow since s last changed."""
        self.skipped = torch.zeros((), dtype=torch.int32, device=device)
        """Steps of the run that overflowed and moved nothing."""
        self.used = self.scale
        """s of the step whose norm was last :meth:`seen`, by which its gradients are still multiplied."""

    def up(self, divisor: Tensor) -> Tensor:
        """What the loss must be divided by instead of ``divisor``, to come out s times as large."""
        return divisor / self.scale

    def seen(self, scaled_norm: Tensor) -> Tensor:
        """The norm of the true gradients, from that of the scaled ones; decides about this step and the next scale."""
        over = ~scaled_norm.isfinite()
        good = self.good + 1
        grown = torch.where(good == self.every, self.scale * 2, self.scale).clamp(max=MAX_SCALE)
        # New tensors, because the outcomes of earlier steps still hold the old ones.
        self.used = self.scale
        self.scale = torch.where(over, self.scale / 2, grown)
        self.good = torch.where(over | (good == self.every), 0, good)
        self.skipped = self.skipped + over
        return scaled_norm / self.used

    @property
    def state(self) -> tuple[float, int]:
        """(s, steps without an overflow) for a checkpoint; waits for the device."""
        return self.scale.item(), int(self.good.item())

    def restore(self, state: tuple[float, int], skipped: int) -> None:
        """Go on from a :attr:`state`."""
        self.scale = torch.full_like(self.scale, state[0])
        self.good = torch.full_like(self.good, state[1])
        self.skipped = torch.full_like(self.skipped, skipped)
