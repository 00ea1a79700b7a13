"""Training: the loop, one step of it, the optimizer, and what is noted on the way."""

from colonnade.train.loop import Trainer
from colonnade.train.metrics import Diverged
from colonnade.train.run_log import Summary

__all__ = ["Diverged", "Summary", "Trainer"]
