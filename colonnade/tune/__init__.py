"""Fine-tuning: a trained model and labelled examples in, a model for one task out; and models with experts remade."""

from colonnade.tune.classify import Example, accuracy, classifier, fit
from colonnade.tune.prune_experts import measure, prune
from colonnade.tune.upcycle import upcycle

__all__ = ["Example", "accuracy", "classifier", "fit", "measure", "prune", "upcycle"]
