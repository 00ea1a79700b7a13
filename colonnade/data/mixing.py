"""MixUp and CutMix: mixes two images per training sample, as a function of (seed, sample number).

    mixup    x = λ x_a + (1 − λ) x_b                        Zhang 2018, arXiv 1710.09412
    cutmix   a box of x_a is replaced by that of x_b        Yun 2019, arXiv 1905.04899
    label    y = λ y_a + (1 − λ) y_b                        λ ~ Beta(α, α)

CutMix's box has the centre (u, v), uniform, and the sides √(1 − λ) of the image's; λ is then corrected to the actual
share of x_a, because a box may extend over the border. Partner, λ and box depend only on the seed and the sample's
number, not on its batch: a run's samples are the same on any number of ranks, with any micro-batch, and after a resume.
(Other libraries mix a batch with its own reversal.) A sample's number grows over all epochs, so each epoch mixes it
differently.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from colonnade.data.loader import MASK64, splitmix64
from colonnade.errors import ConfigError

Kind = Literal["mixup", "cutmix", "both"]
"""both: each sample uses one of the two, with equal probability."""


class Mix(NamedTuple):
    """The parameters of one mixed sample."""

    partner: int
    """The index of x_b in the data."""
    share: float
    """λ, the weight of y_a."""
    box: tuple[int, int, int, int] | None
    """CutMix: top, left, bottom, right of the box from x_b; None: MixUp."""


@dataclass(frozen=True)
class Mixer:
    """Draws and applies mixes of images (…, height, width) of a data set of ``samples`` images."""

    samples: int
    kind: Kind = "both"
    alpha: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.samples < 1 or not 0 < self.alpha < float("inf"):
            raise ConfigError(f"mixing needs samples and an alpha above 0, not {self.samples} and {self.alpha:g}")

    def draw(self, number: int, height: int, width: int) -> Mix:
        """The mix of sample ``number`` (from 0, over all epochs)."""
        random = np.random.Generator(np.random.Philox(key=splitmix64((self.seed & MASK64) ^ splitmix64(number))))
        partner, share = int(random.integers(self.samples)), float(random.beta(self.alpha, self.alpha))
        cut = self.kind == "cutmix" or (self.kind == "both" and bool(random.integers(2)))
        if not cut:
            return Mix(partner, share, None)
        half = 0.5 * (1 - share) ** 0.5
        v, u = random.random(2)
        top, bottom = (min(height, max(0, round(height * (v + side)))) for side in (-half, half))
        left, right = (min(width, max(0, round(width * (u + side)))) for side in (-half, half))
        return Mix(partner, 1 - (bottom - top) * (right - left) / (height * width), (top, left, bottom, right))

    def mix(
        self, images: Tensor, numbers: Sequence[int], read: Callable[[list[int]], Tensor]
    ) -> tuple[Tensor, list[int], Tensor]:
        """(mixed images, partners, λ of each) of ``images`` (B, …, height, width) with these sample numbers.

        ``read`` returns the images with given indices.
        """
        height, width = images.shape[-2:]
        mixes = [self.draw(number, height, width) for number in numbers]
        partners = [each.partner for each in mixes]
        mixed, others = images.clone(), read(partners)
        for x_a, x_b, (_, share, box) in zip(mixed, others, mixes, strict=True):
            if box is None:
                x_a.mul_(share).add_(x_b, alpha=1 - share)
            else:
                top, left, bottom, right = box
                x_a[..., top:bottom, left:right] = x_b[..., top:bottom, left:right]
        return mixed, partners, torch.tensor([each.share for each in mixes], dtype=images.dtype, device=images.device)


def mixed_cross_entropy(logits_BC: Tensor, labels_B: Tensor, partners_B: Tensor, share_B: Tensor) -> Tensor:
    """The mean of λ · (cross-entropy with y_a) + (1 − λ) · (that with y_b)."""
    logp_BC = logits_BC.log_softmax(1)
    own_B, other_B = (logp_BC.gather(1, labels[:, None]).squeeze(1) for labels in (labels_B, partners_B))
    return -(share_B * own_B + (1 - share_B) * other_B).mean()
