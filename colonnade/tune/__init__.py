"""Fine-tuning of encoders as classifiers; upcycling dense models to experts, and pruning experts."""

from colonnade.tune.classify import Example, accuracy, classifier, fit
from colonnade.tune.prune_experts import measure, prune
from colonnade.tune.upcycle import upcycle

__all__ = ["Example", "accuracy", "classifier", "fit", "measure", "prune", "upcycle"]
