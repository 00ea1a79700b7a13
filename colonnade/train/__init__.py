"""Training: the loop, the training step, the optimizer, memory checks, metrics and logs."""

from colonnade.train.loop import Trainer
from colonnade.train.metrics import Diverged
from colonnade.train.run_log import Summary

__all__ = ["Diverged", "Summary", "Trainer"]
