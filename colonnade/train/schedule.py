"""The learning rate as a pure function of the step, so that a resumed run needs no state to continue it.

    s < warmup:   lr(s) = lr_max · (s + 1) / (warmup + 1)
    otherwise:    u = (s − warmup) / (steps − 1 − warmup)        from 0 at the peak to 1 at the last step
                  cosine:  lr_min + (lr_max − lr_min) · (1 + cos πu) / 2       (Loshchilov 2016, SGDR, equation 5)
                  linear:  lr_max + (lr_min − lr_max) · u
                  constant: lr_max

Steps count from 0. The first step already moves (a rate of exactly 0 would waste it), the peak is reached at step
``warmup``, and the last step of the run uses ``final_lr`` exactly.
"""

import math

from colonnade.config import TrainConfig


def learning_rate(step: int, train: TrainConfig) -> float:
    """The rate of optimizer step ``step`` (from 0); steps past the end stay at the final rate."""
    if step < train.warmup_steps:
        return train.lr * (step + 1) / (train.warmup_steps + 1)
    decay_steps = max(train.steps - 1 - train.warmup_steps, 1)
    done = min((step - train.warmup_steps) / decay_steps, 1.0)
    if train.schedule == "cosine":
        return train.final_lr + (train.lr - train.final_lr) * (1 + math.cos(math.pi * done)) / 2
    if train.schedule == "linear":
        return train.lr + (train.final_lr - train.lr) * done
    return train.lr
