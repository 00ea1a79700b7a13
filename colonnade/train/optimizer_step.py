"""The end of a step, whatever the loss was: complete the gradients, take their norm, clip, AdamW, publish.

A step whose loss or norm is not finite moves nothing: weights, moments and Adam's count stay as they were, and the
schedule does not advance. Nothing waits for the device to learn which it was.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from colonnade.config import TrainConfig
from colonnade.model import Transformer
from colonnade.parallel.axis import Axis
from colonnade.parallel.fsdp import Masters
from colonnade.parallel.layout import layout_of
from colonnade.train import grad_norm
from colonnade.train.loss_scaler import LossScaler
from colonnade.train.lr_schedule import learning_rate, rate
from colonnade.train.optimizer import AdamW, FusedAdamW


class StepResult(NamedTuple):
    """What it saw."""

    norm: Tensor
    """Global gradient norm before the clip; not finite where nothing moved."""
    lr: float | Tensor
    """On the device where steps may be skipped."""
    skip: Tensor
    """float32: 1 where nothing moved, else 0."""


class OptimizerStep:
    """``move(number, loss_sum)``, after the last backward pass of step ``number`` (from 0)."""

    def __init__(
        self,
        model: Transformer,
        masters: Masters,
        optimizer: AdamW,
        train: TrainConfig,
        world: Axis,
        scaler: LossScaler | None = None,
    ):
        """``scaler`` where the loss was multiplied by its scale: float16."""
        self.model, self.masters, self.optimizer, self.train = model, masters, optimizer, train
        self.world, self.scaler, self.layout = world, scaler, layout_of(model)
        self._may_skip = scaler is not None or train.skip_bad_batches > 0

    def __call__(self, number: int, loss_sum: Tensor) -> StepResult:
        """Move the weights; ``loss_sum`` is this rank's, looked at for whether it is finite."""
        weights, model, axes = self.masters.gradient_holders, self.model, self.model.axes
        lr = self._rate(number)
        self.masters.collect()
        grad_norm.sum_tied(weights, model.config.tied, axes.embedding)
        grad_norm.sum_partial(weights, self.layout, axes.tp)
        grad_norm.sum_experts(weights, self.layout, axes.experts)
        size = grad_norm.gradient_norm(weights, self.layout, axes, self.world, model.copies, loss_sum)
        if self.scaler is not None:
            size = self.scaler.seen(size)
        skip, scale = (~size.isfinite()).to(torch.float32), None if self.scaler is None else self.scaler.used
        if isinstance(self.optimizer, FusedAdamW):
            self.optimizer.step(lr, skip, scale, grad_norm.clip_factor(size, self.train.clip))
        else:
            grad_norm.clip_(weights, size, self.train.clip)
            self.optimizer.step(lr, skip, scale)
            self.masters.update_model()
        return StepResult(size, lr, skip)

    def _rate(self, number: int) -> float | Tensor:
        """The rate of the next update. How many updates there were only the device knows where steps may be skipped."""
        if not self._may_skip:
            return learning_rate(number, self.train)
        lr = rate(self.optimizer.updates, self.train)
        return lr.float() if lr.is_cuda else lr  # torch's fused kernel for GPUs reads a float32
