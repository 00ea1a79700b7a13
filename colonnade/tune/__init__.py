"""Fine-tuning: a trained model and labelled examples in, a model for one task out."""

from colonnade.tune.classify import Example, accuracy, classifier, fit

__all__ = ["Example", "accuracy", "classifier", "fit"]
