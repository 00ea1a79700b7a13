"""Training: the loop, one step of it, the optimizer, and what is noted on the way."""

from colonnade.train.log import Summary
from colonnade.train.loop import Trainer
from colonnade.train.metrics import Diverged

__all__ = ["Diverged", "Summary", "Trainer"]
