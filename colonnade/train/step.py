"""One optimizer step, read from top to bottom.

    loss = Σ token losses / Σ valid tokens          both over data ranks, context ranks and micro-batches
    a step whose loss or norm is not finite moves nothing: weights, moments and Adam's count stay as they were

The count of valid tokens is summed over all of them *before* the first backward pass, so that each micro-batch's
backward already carries the right weight and gradients are plain sums (a mean of means over ranks or micro-batches of
unequal counts is another loss, and differs from layout to layout).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from colonnade.config import TrainConfig
from colonnade.data import Batch
from colonnade.model import IGNORE, Loss, Transformer
from colonnade.parallel.axis import Axis
from colonnade.parallel.fsdp import Masters
from colonnade.parallel.layout import layout_of
from colonnade.train import norm
from colonnade.train.lay import lay
from colonnade.train.optimizer import AdamW
from colonnade.train.piped import Piped
from colonnade.train.schedule import learning_rate


@dataclass(frozen=True)
class Outcome:
    """What a step leaves to be looked at later; all on the device, nobody has waited for it."""

    loss_sum: Tensor
    """Of this rank's tokens."""
    count: Tensor
    """Valid tokens of all data ranks."""
    norm: Tensor
    """Global gradient norm before the clip."""
    lr: float
    """Learning rate that the step used."""


class Step:
    """``step(number, micro_batches)``: forward, backward, norm, clip, AdamW."""

    def __init__(
        self,
        model: Transformer,
        masters: Masters,
        optimizer: AdamW,
        train: TrainConfig,
        world: Axis,
        piped: Piped | None = None,
    ):
        """``piped`` when ``model`` is one rank's part of a pipeline."""
        self.piped = piped
        self.model, self.masters, self.optimizer, self.train = model, masters, optimizer, train
        self.axes, self.world, self.layout = model.axes, world, layout_of(model)

    def __call__(self, number: int, micro_batches: Sequence[Batch]) -> Outcome:
        """Train on this data rank's ``micro_batches`` as step ``number`` (from 0)."""
        weights, lr = self.masters.local, learning_rate(number, self.train)
        count = valid_tokens(micro_batches, self.axes.dp)
        if self.piped is None:
            loss_sum = self._accumulate(micro_batches, count)
        else:
            loss_sum = self.piped.step(micro_batches, count, self.train.label_smoothing)
        self.masters.collect()
        norm.sum_tied(weights, self.model.config.tied, self.axes.ends)
        norm.sum_partial(weights, self.layout, self.axes.tp)
        gradient_norm = norm.gradient_norm(weights, self.layout, self.axes, self.world, self.model.copies, loss_sum)
        norm.clip_(weights, gradient_norm, self.train.clip)
        self.optimizer.step(lr, found_inf=(~gradient_norm.isfinite()).to(torch.float32))
        self.masters.publish()
        return Outcome(loss_sum, count, gradient_norm, lr)

    def _accumulate(self, micro_batches: Sequence[Batch], count: Tensor) -> Tensor:
        """Forward and backward of one micro-batch after another; the summed loss."""
        loss_sum = 0
        for i, batch in enumerate(micro_batches):
            self.masters.accumulate(last=i == len(micro_batches) - 1)
            batch_sum = forward(self.model, batch, self.train.label_smoothing)
            (batch_sum / count).backward()
            loss_sum += batch_sum.detach()
        assert isinstance(loss_sum, Tensor), "a step needs at least one micro-batch"
        return loss_sum


@torch.no_grad()
def evaluate(model: Transformer, batches: Iterable[Batch], piped: Piped | None = None) -> Tensor:
    """The mean loss over this data rank's ``batches`` and everybody else's, without label smoothing."""
    batches = list(batches)
    count = valid_tokens(batches, model.axes.dp)
    if piped is None:
        losses = [forward(model, batch, 0.0).double() for batch in batches]
        mine = torch.stack(losses).sum()
    else:
        mine = piped.evaluate(batches)
    return model.axes.everywhere(mine) / count


def forward(model: Transformer, batch: Batch, smoothing: float) -> Tensor:
    """The summed loss of a micro-batch, or of this context rank's tokens of it."""
    stream, attend, targets_t = lay(batch, model.axes.cp)
    loss_sum, _ = model(stream, attend, Loss(targets_t, smoothing))
    return loss_sum


def valid_tokens(batches: Iterable[Batch], dp: Axis) -> Tensor:
    """How many targets count in this step, over all data ranks; at least 1, so that an empty step is a step of 0."""
    return dp.sum_(torch.stack([(batch.targets_T != IGNORE).sum() for batch in batches]).sum()).clamp(min=1)
