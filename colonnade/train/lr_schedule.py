"""Learning-rate schedules: linear warmup, then cosine, linear or constant; a pure function of the step.

    s < warmup:   lr(s) = lr_max · (s + 1) / (warmup + 1)
    otherwise:    u = (s − warmup) / (steps − 1 − warmup)        from 0 at the peak to 1 at the last step
                  cosine:  lr_min + (lr_max − lr_min) · (1 + cos πu) / 2       (Loshchilov 2016, SGDR, equation 5)
                  linear:  lr_max + (lr_min − lr_max) · u
                  constant: lr_max

Steps count from 0. The first step already has a rate above 0 (a rate of exactly 0 would waste it), the peak is reached
at step ``warmup``, and the last step of the run uses ``final_lr`` exactly.

s counts the steps that updated the weights: a skipped step (a float16 overflow, a bad batch) does not advance the
schedule, as in Megatron-LM, so a run whose loss scale starts too high still warms up. ``train.steps`` includes the
skipped ones, so a run that skipped k steps ends k steps before the end of its decay. A resumed run needs no saved
schedule state.
"""

import math

import torch
from torch import Tensor

from colonnade.config import TrainConfig


def learning_rate(step: int, train: TrainConfig) -> float:
    """The rate of optimizer step ``step`` (from 0); steps past the end stay at the final rate."""
    return learning_rate_tensor(torch.tensor(step), train).item()


def learning_rate_tensor(step: Tensor, train: TrainConfig) -> Tensor:
    """The rate in float64 on the device of ``step`` (0-dim), for a step number that is only on the device."""
    step = step.double()
    warmup = train.lr * (step + 1) / (train.warmup_steps + 1)
    u = ((step - train.warmup_steps) / max(train.steps - 1 - train.warmup_steps, 1)).clamp(0, 1)
    if train.schedule == "cosine":
        decay = train.final_lr + (train.lr - train.final_lr) * (1 + torch.cos(math.pi * u)) / 2
    elif train.schedule == "linear":
        decay = train.lr + (train.final_lr - train.lr) * u
    else:
        decay = torch.full_like(step, train.lr)
    return torch.where(step < train.warmup_steps, warmup, decay)
